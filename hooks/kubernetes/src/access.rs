//! The way to the API server: the service account of the agent's pod, or a kubeconfig.

use std::env::{self, VarError};
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use hyper::Uri;

use super::credentials::{Credentials, ReadError, Token, bytes, certificates};
use super::kubeconfig::{KubeconfigError, read_kubeconfig};

/// The directory in which the kubelet mounts the service account's files.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// Neither is there.
    #[error(
        "no kubeconfig is configured, and this is no pod with a service account; set [agent.kubernetes] kubeconfig"
    )]
    None,
    /// The environment's port is missing or no number.
    #[error("read KUBERNETES_SERVICE_PORT")]
    Port(#[source] VarError),
    /// The server's address is none.
    #[error("the address of the API server in the environment is not valid")]
    Server,
    /// The directory of the service account is not there.
    #[error("open {SERVICE_ACCOUNT}; set automountServiceAccountToken")]
    Directory(#[source] io::Error),
    /// Its files are not readable.
    #[error("read the service account of this pod")]
    ServiceAccount(#[from] ReadError),
    /// The kubeconfig is not usable.
    #[error("read the kubeconfig {}", path.display())]
    Kubeconfig {
        path: PathBuf,
        #[source]
        source: KubeconfigError,
    },
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
    pub fn of_this_pod() -> Option<Result<Self, AccessError>> {
        let host = env::var("KUBERNETES_SERVICE_HOST").ok()?;
        Some(Self::open(&host, Path::new(SERVICE_ACCOUNT)))
    }

    fn open(host: &str, directory: &Path) -> Result<Self, AccessError> {
        let port = env::var("KUBERNETES_SERVICE_PORT").map_err(AccessError::Port)?;
        let host = match host.parse() {
            Ok(IpAddr::V6(address)) => format!("[{address}]"),
            Ok(IpAddr::V4(_)) | Err(_) => host.to_owned(),
        };
        let server = format!("https://{host}:{port}")
            .parse()
            .map_err(|_| AccessError::Server)?;
        Ok(Self {
            server,
            directory: File::open(directory).map_err(AccessError::Directory)?,
        })
    }

    fn credentials(&self) -> Result<Credentials, AccessError> {
        let files = PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()));
        Ok(Credentials {
            server: self.server.clone(),
            server_name: None,
            authorities: certificates(&bytes(&files.join("ca.crt"))?, "authority's certificate")?,
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
        service_account: Option<Result<ServiceAccount, AccessError>>,
    ) -> Result<Self, AccessError> {
        match (service_account, kubeconfig) {
            (Some(Ok(account)), _) => Ok(Self::ServiceAccount(account)),
            (Some(Err(_)) | None, Some(path)) => Ok(Self::Kubeconfig(path)),
            (Some(Err(error)), None) => Err(error),
            (None, None) => Err(AccessError::None),
        }
    }

    pub(super) fn credentials(&self) -> Result<Credentials, AccessError> {
        match self {
            Self::ServiceAccount(account) => account.credentials(),
            Self::Kubeconfig(path) => {
                read_kubeconfig(path).map_err(|source| AccessError::Kubeconfig {
                    path: path.clone(),
                    source,
                })
            }
        }
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
        let unmounted = || Some(Err(AccessError::Directory(io::ErrorKind::NotFound.into())));
        assert!(matches!(
            Access::choose(kubeconfig(), unmounted()),
            Ok(Access::Kubeconfig(_))
        ));
        assert!(matches!(
            Access::choose(None, unmounted()),
            Err(AccessError::Directory(_))
        ));
        assert!(matches!(
            Access::choose(kubeconfig(), None),
            Ok(Access::Kubeconfig(_))
        ));
        assert!(matches!(Access::choose(None, None), Err(AccessError::None)));
    }
}
