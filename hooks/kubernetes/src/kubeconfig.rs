//! The part of the kubeconfig format that node components use: a server, its authority, and a
//! client certificate or a token.
//!
//! kube's own reader would be a third of the agent's program, and with it of its memory
//! (docs/decisions/0029). Programs that print credentials are not run.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::credentials::{ClientIdentity, Credentials, ReadError, Token, bytes, certificates, key};

/// Why a kubeconfig is not usable.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("parse it as YAML")]
    Yaml(#[from] serde_norway::Error),
    /// It has no such part.
    #[error("it has no {what} {name:?}")]
    Missing {
        /// The kind of the part.
        what: &'static str,
        name: String,
    },
    /// The form of a part differs from the API's documentation.
    #[error("its {0} is not valid")]
    Invalid(&'static str),
    /// Credentials of a kind that the agent does not use.
    #[error(
        "its user has neither a client certificate nor a token; programs, passwords and providers are not supported"
    )]
    Unsupported,
    /// The server would not be authenticated, and would get the token.
    #[error(
        "its cluster sets insecure-skip-tls-verify, which is not supported; give it a certificate-authority"
    )]
    Insecure,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    current_context: String,
    contexts: Vec<Named<Context>>,
    clusters: Vec<Named<Cluster>>,
    users: Vec<Named<User>>,
}

#[derive(Debug, Deserialize)]
struct Named<T> {
    name: String,
    #[serde(alias = "context", alias = "cluster", alias = "user")]
    part: T,
}

#[derive(Debug, Deserialize)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Debug, Deserialize)]
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

impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("User").finish_non_exhaustive()
    }
}

/// The credentials of the current context.
pub(super) fn read_kubeconfig(path: &Path) -> Result<Credentials, KubeconfigError> {
    let file: File = serde_norway::from_slice(&bytes(path)?)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let context = named(file.contexts, "context", &file.current_context)?;
    let cluster = named(file.clusters, "cluster", &context.cluster)?;
    let user = named(file.users, "user", &context.user)?;
    if cluster.insecure_skip_tls_verify {
        return Err(KubeconfigError::Insecure);
    }
    let authority = content(
        &cluster.certificate_authority,
        &cluster.certificate_authority_data,
        folder,
    )?;
    let authorities = authority
        .map(|pem| certificates(&pem, "authority's certificate"))
        .transpose()?;
    Ok(Credentials {
        server: cluster
            .server
            .parse()
            .map_err(|_| KubeconfigError::Invalid("server"))?,
        server_name: cluster.tls_server_name,
        authorities: authorities.unwrap_or_default(),
        identity: user.identity(folder)?,
        token: user.token(folder)?,
    })
}

fn named<T>(parts: Vec<Named<T>>, what: &'static str, name: &str) -> Result<T, KubeconfigError> {
    let found = parts.into_iter().find(|part| part.name == name);
    let missing = || KubeconfigError::Missing {
        what,
        name: name.to_owned(),
    };
    Ok(found.ok_or_else(missing)?.part)
}

impl User {
    fn identity(&self, folder: &Path) -> Result<Option<ClientIdentity>, KubeconfigError> {
        let chain = content(
            &self.client_certificate,
            &self.client_certificate_data,
            folder,
        )?;
        let pem = content(&self.client_key, &self.client_key_data, folder)?;
        let (Some(chain), Some(pem)) = (chain, pem) else {
            return Ok(None);
        };
        Ok(Some(ClientIdentity {
            chain: certificates(&chain, "client's certificate")?,
            key: key(&pem)?,
        }))
    }

    fn token(self, folder: &Path) -> Result<Option<Token>, KubeconfigError> {
        let token = match (self.token, self.token_file) {
            (Some(token), _) => Some(Token::Text(token)),
            (None, Some(file)) => Some(Token::File(folder.join(file))),
            (None, None) => None,
        };
        let has_certificate =
            self.client_certificate.is_some() || self.client_certificate_data.is_some();
        let has_other =
            self.exec.is_some() || self.auth_provider.is_some() || self.username.is_some();
        if token.is_none() && !has_certificate && has_other {
            return Err(KubeconfigError::Unsupported);
        }
        Ok(token)
    }
}

/// The content of a file, or of its text in the kubeconfig, which comes first.
fn content(
    file: &Option<PathBuf>,
    data: &Option<String>,
    folder: &Path,
) -> Result<Option<Vec<u8>>, KubeconfigError> {
    match (data, file) {
        (Some(data), _) => STANDARD
            .decode(data.trim())
            .map(Some)
            .map_err(|_| KubeconfigError::Invalid("base64")),
        (None, Some(file)) => Ok(Some(bytes(&folder.join(file))?)),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use super::*;

    fn read(user: &str) -> Result<Credentials, KubeconfigError> {
        read_with("tls-server-name: api", user)
    }

    fn read_with(cluster: &str, user: &str) -> Result<Credentials, KubeconfigError> {
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
        assert!(matches!(insecure, Err(KubeconfigError::Insecure)));
        read_with("insecure-skip-tls-verify: false", "{ token: text }").unwrap();
    }

    #[test]
    fn other_kinds_of_credentials_are_refused() {
        for user in ["{ exec: { command: aws } }", "{ username: a, password: b }"] {
            assert!(
                matches!(read(user), Err(KubeconfigError::Unsupported)),
                "{user}"
            );
        }
        let wrong = read("{ client-certificate-data: '!', client-key-data: YQ== }");
        assert!(matches!(wrong, Err(KubeconfigError::Invalid("base64"))));
        assert!(matches!(
            read("{ client-certificate: none, client-key: none }"),
            Err(KubeconfigError::Read(_))
        ));
        assert!(matches!(read("["), Err(KubeconfigError::Yaml(_))));
    }
}
