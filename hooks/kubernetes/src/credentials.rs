//! The credentials of a connection to the API server: the service account of the agent's pod, or a
//! kubeconfig.
//!
//! Of the kubeconfig format, the part is read that node components use: a server, its authority, and
//! a client certificate or a token. kube's own reader would be a third of the agent's program, and
//! with it of its memory (docs/decisions/0029). Programs that print credentials are not run.

use std::env;
use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Uri;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;

/// The directory in which the kubelet mounts the service account's files.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Why there are no credentials, or no answer.
#[derive(Debug, thiserror::Error)]
#[error("{act}")]
pub struct Failure {
    act: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    pub(crate) fn new(act: impl Into<String>) -> Self {
        let act = act.into();
        Self { act, source: None }
    }

    pub(crate) fn of<E: Into<Box<dyn Error + Send + Sync>>>(
        act: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        |source| Self {
            act: act.into(),
            source: Some(source.into()),
        }
    }

    fn unread(path: &Path) -> impl FnOnce(io::Error) -> Self {
        Self::of(format!("read {}", path.display()))
    }
}

/// The service account of this pod.
///
/// Its files are in the pod's mount namespace, which the agent leaves, and the kubelet replaces the
/// token every hour. So the directory stays open, and the files are read through its descriptor.
#[derive(Debug)]
pub struct ServiceAccount {
    server: Uri,
    directory: File,
}

impl ServiceAccount {
    /// The service account of this process. The process must still be in the pod's mount namespace.
    /// `None` outside a pod.
    ///
    /// # Errors
    /// If its directory is not there.
    pub fn of_this_pod() -> Option<Result<Self, Failure>> {
        let host = env::var("KUBERNETES_SERVICE_HOST").ok()?;
        Some(Self::open(host))
    }

    fn open(mut host: String) -> Result<Self, Failure> {
        let port = env::var("KUBERNETES_SERVICE_PORT");
        let port = port.map_err(Failure::of("read KUBERNETES_SERVICE_PORT"))?;
        if let Ok(IpAddr::V6(address)) = host.parse() {
            host = format!("[{address}]");
        }
        let Ok(server) = format!("https://{host}:{port}").parse() else {
            let act = "the address of the API server in the environment is not valid";
            return Err(Failure::new(act));
        };
        let directory = File::open(SERVICE_ACCOUNT).map_err(Failure::of(format!(
            "open {SERVICE_ACCOUNT}; set automountServiceAccountToken"
        )))?;
        Ok(Self { server, directory })
    }

    fn credentials(&self) -> Result<Credentials, Failure> {
        let files = PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()));
        let authority = files.join("ca.crt");
        let authority = fs::read(&authority).map_err(Failure::unread(&authority))?;
        Ok(Credentials {
            server: self.server.clone(),
            server_name: None,
            authorities: certificates(&authority, "authority's certificate")?,
            identity: None,
            token: Some(Token::File(files.join("token"))),
        })
    }
}

/// The credentials to use. Credentials are read for each new connection: kubelet and administrators
/// renew the files.
#[derive(Debug)]
pub enum Access {
    /// Those of the pod.
    ServiceAccount(ServiceAccount),
    /// Those of a file.
    Kubeconfig(PathBuf),
}

impl Access {
    /// The pod's service account, else the kubeconfig. The config is the node's: its kubeconfig may
    /// name a server at 127.0.0.1, which a pod with a network of its own does not reach.
    ///
    /// # Errors
    /// If there is neither.
    pub fn choose(
        kubeconfig: Option<PathBuf>,
        service_account: Option<Result<ServiceAccount, Failure>>,
    ) -> Result<Self, Failure> {
        match (service_account, kubeconfig) {
            (Some(Ok(account)), _) => Ok(Self::ServiceAccount(account)),
            (Some(Err(_)) | None, Some(path)) => Ok(Self::Kubeconfig(path)),
            (Some(Err(error)), None) => Err(error),
            (None, None) => Err(Failure::new(
                "no kubeconfig is configured, and this is no pod with a service account; set [agent.kubernetes] kubeconfig",
            )),
        }
    }

    pub(crate) fn credentials(&self) -> Result<Credentials, Failure> {
        match self {
            Self::ServiceAccount(account) => account
                .credentials()
                .map_err(Failure::of("read the service account of this pod")),
            Self::Kubeconfig(path) => read_kubeconfig(path).map_err(Failure::of(format!(
                "read the kubeconfig {}",
                path.display()
            ))),
        }
    }
}

/// Everything for a connection.
#[derive(Debug)]
pub(crate) struct Credentials {
    pub(crate) server: Uri,
    /// The name in the server's certificate, if it is not that of its address.
    pub(crate) server_name: Option<String>,
    pub(crate) authorities: Vec<CertificateDer<'static>>,
    /// The client's certificate, the certificates that signed it, and its key.
    pub(crate) identity: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    pub(crate) token: Option<Token>,
}

pub(crate) enum Token {
    /// As the kubeconfig has it.
    Text(String),
    /// In a file that is read for each request: its owner replaces it.
    File(PathBuf),
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(_) => f.write_str("Text(..)"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

impl Token {
    pub(crate) fn read(&self) -> Result<String, Failure> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::File(path) => {
                let text = fs::read_to_string(path).map_err(Failure::unread(path))?;
                Ok(text.trim().to_owned())
            }
        }
    }
}

fn certificates(pem: &[u8], what: &'static str) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let certificates: Result<_, _> = CertificateDer::pem_slice_iter(pem).collect();
    certificates.map_err(Failure::of(format!("read the {what} as PEM")))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    current_context: String,
    contexts: Vec<Named<Context>>,
    clusters: Vec<Named<Cluster>>,
    users: Vec<Named<User>>,
}

#[derive(Deserialize)]
struct Named<T> {
    name: String,
    #[serde(alias = "context", alias = "cluster", alias = "user")]
    part: T,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    tls_server_name: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: bool,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    exec: Option<serde_norway::Value>,
    auth_provider: Option<serde_norway::Value>,
    username: Option<String>,
}

/// The credentials of the current context.
fn read_kubeconfig(path: &Path) -> Result<Credentials, Failure> {
    let text = fs::read(path).map_err(Failure::unread(path))?;
    let file = serde_norway::from_slice(&text).map_err(Failure::of("parse it as YAML"));
    let file: Kubeconfig = file?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let context = named(file.contexts, "context", &file.current_context)?;
    let cluster = named(file.clusters, "cluster", &context.cluster)?;
    let user = named(file.users, "user", &context.user)?;
    if cluster.insecure_skip_tls_verify {
        // The server would not be authenticated, and would get the token.
        return Err(Failure::new(
            "its cluster sets insecure-skip-tls-verify, which is not supported; give it a certificate-authority",
        ));
    }
    let authorities = match content(
        &cluster.certificate_authority,
        &cluster.certificate_authority_data,
        folder,
    )? {
        Some(pem) => certificates(&pem, "authority's certificate")?,
        None => Vec::new(),
    };
    let server = cluster.server.parse();
    let server = server.map_err(|_| Failure::new("its server is not valid"))?;
    let chain = content(
        &user.client_certificate,
        &user.client_certificate_data,
        folder,
    )?;
    let key = content(&user.client_key, &user.client_key_data, folder)?;
    let mut identity = None;
    if let (Some(chain), Some(key)) = (chain, key) {
        let chain = certificates(&chain, "client's certificate")?;
        // The parser's error never contains the key.
        let key = PrivateKeyDer::from_pem_slice(&key);
        let key = key.map_err(Failure::of("read the client's key as PEM"))?;
        identity = Some((chain, key));
    }
    Ok(Credentials {
        server,
        server_name: cluster.tls_server_name,
        authorities,
        identity,
        token: user.token(folder)?,
    })
}

fn named<T>(parts: Vec<Named<T>>, what: &'static str, name: &str) -> Result<T, Failure> {
    match parts.into_iter().find(|part| part.name == name) {
        Some(found) => Ok(found.part),
        None => Err(Failure::new(format!("it has no {what} {name:?}"))),
    }
}

impl User {
    fn token(self, folder: &Path) -> Result<Option<Token>, Failure> {
        let of_file = self.token_file.map(|file| Token::File(folder.join(file)));
        let token = self.token.map(Token::Text).or(of_file);
        let has_certificate =
            self.client_certificate.is_some() || self.client_certificate_data.is_some();
        let has_other =
            self.exec.is_some() || self.auth_provider.is_some() || self.username.is_some();
        if token.is_none() && !has_certificate && has_other {
            return Err(Failure::new(
                "its user has neither a client certificate nor a token; programs, passwords and providers are not supported",
            ));
        }
        Ok(token)
    }
}

/// The content of a file, or of its text in the kubeconfig, which comes first.
fn content(
    file: &Option<PathBuf>,
    data: &Option<String>,
    folder: &Path,
) -> Result<Option<Vec<u8>>, Failure> {
    match (data, file) {
        (Some(data), _) => {
            let pem = STANDARD.decode(data.trim());
            let pem = pem.map_err(|_| Failure::new("its base64 is not valid"))?;
            Ok(Some(pem))
        }
        (None, Some(file)) => {
            let file = folder.join(file);
            Ok(Some(fs::read(&file).map_err(Failure::unread(&file))?))
        }
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    /// The DaemonSet's agent reads the config of the node.
    #[test]
    fn the_nodes_kubeconfig_is_used_only_without_a_service_account() {
        let directory = || File::open("/").unwrap();
        let account = || ServiceAccount {
            server: "https://10.0.0.1:443".parse().unwrap(),
            directory: directory(),
        };
        let kubeconfig = || Some(PathBuf::from("/etc/kubernetes/kubelet.conf"));
        assert!(matches!(
            Access::choose(kubeconfig(), Some(Ok(account()))),
            Ok(Access::ServiceAccount(_))
        ));
        assert!(matches!(
            Access::choose(None, Some(Ok(account()))),
            Ok(Access::ServiceAccount(_))
        ));
        let unmounted = || Some(Err(Failure::new("open it")));
        assert!(matches!(
            Access::choose(kubeconfig(), unmounted()),
            Ok(Access::Kubeconfig(_))
        ));
        let error = |chosen: Result<Access, Failure>| chosen.unwrap_err().to_string();
        assert_eq!(error(Access::choose(None, unmounted())), "open it");
        assert!(matches!(
            Access::choose(kubeconfig(), None),
            Ok(Access::Kubeconfig(_))
        ));
        let none = error(Access::choose(None, None));
        assert!(none.starts_with("no kubeconfig is configured, and this is no pod"));
    }
}

#[cfg(test)]
mod kubeconfig_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;
    use bindguard_core::error_chain;

    fn read(user: &str) -> Result<Credentials, Failure> {
        read_with("tls-server-name: api", user)
    }

    fn read_with(cluster: &str, user: &str) -> Result<Credentials, Failure> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), "from a file\n").unwrap();
        let path = folder.path().join("kubelet.conf");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\npreferences: {{}}\n\
             contexts:\n- name: c\n  context: {{ cluster: k, user: u, namespace: n }}\n\
             clusters:\n- name: k\n  cluster:\n    server: https://192.0.2.1:6443\n    {cluster}\n\
             users:\n- name: u\n  user: {user}\n"
        );
        fs::write(&path, text).unwrap();
        let credentials = read_kubeconfig(&path)?;
        if let Some(token) = &credentials.token {
            assert!(["text", "from a file"].contains(&token.read().unwrap().as_str()));
        }
        Ok(credentials)
    }

    #[test]
    fn tokens_are_read_from_the_text_and_from_a_file() {
        let credentials = read("{ token: text }").unwrap();
        assert_eq!(credentials.server, "https://192.0.2.1:6443/");
        assert_eq!(credentials.server_name.as_deref(), Some("api"));
        assert!(
            !format!("{credentials:?}").contains("text"),
            "a token is no text for a log"
        );
        assert!(matches!(
            read("{ tokenFile: token }").unwrap().token,
            Some(Token::File(_))
        ));
        assert!(read("{}").unwrap().token.is_none());
    }

    #[test]
    fn servers_are_authenticated() {
        let insecure = read_with("insecure-skip-tls-verify: true", "{ token: text }");
        let error = insecure.unwrap_err().to_string();
        assert!(error.starts_with("its cluster sets insecure-skip-tls-verify"));
        read_with("insecure-skip-tls-verify: false", "{ token: text }").unwrap();
    }

    #[test]
    fn other_kinds_of_credentials_are_refused() {
        for user in ["{ exec: { command: aws } }", "{ username: a, password: b }"] {
            let error = read(user).unwrap_err().to_string();
            assert!(error.starts_with("its user has neither"), "{user}: {error}");
        }
        let wrong = read("{ client-certificate-data: '!', client-key-data: YQ== }");
        assert_eq!(wrong.unwrap_err().to_string(), "its base64 is not valid");
        let missing = read("{ client-certificate: none, client-key: none }").unwrap_err();
        let text = error_chain(&missing);
        assert!(
            text.starts_with("read ") && text.contains("/none: No such file"),
            "{text}"
        );
        let no_yaml = read("[").unwrap_err();
        assert_eq!(no_yaml.to_string(), "parse it as YAML");
    }
}
