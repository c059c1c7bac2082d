//! The credentials for the API server.

use std::env;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};

/// The directory in which the kubelet mounts them.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// Neither is there.
    #[error(
        "no kubeconfig is configured, and this is no pod with a service account; set [agent.kubernetes] kubeconfig"
    )]
    None,
    /// The service account's files are incomplete.
    #[error("read the service account of this pod")]
    ServiceAccount(#[source] InClusterError),
    /// Their directory is not there.
    #[error("open {SERVICE_ACCOUNT}; set automountServiceAccountToken")]
    Directory(#[source] io::Error),
    /// The kubeconfig is not usable.
    #[error("read the kubeconfig {}", path.display())]
    Kubeconfig {
        /// Its path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: Box<KubeconfigError>,
    },
}

/// The service account of this pod.
///
/// Its files are in the pod's mount namespace, which the agent leaves, and the kubelet replaces the token every hour. So the
/// directory stays open, and the files are read through its descriptor.
#[derive(Debug)]
pub struct ServiceAccount {
    config: Config,
    _directory: File,
}

impl ServiceAccount {
    /// The one of this process, which is still in the pod's mount namespace. `None` outside a pod.
    ///
    /// # Errors
    /// If its files are not there.
    pub fn of_this_pod() -> Option<Result<Self, AccessError>> {
        env::var_os("KUBERNETES_SERVICE_HOST").map(|_| Self::open(Path::new(SERVICE_ACCOUNT)))
    }

    fn open(directory: &Path) -> Result<Self, AccessError> {
        let mut config = Config::incluster_env().map_err(AccessError::ServiceAccount)?;
        let directory = File::open(directory).map_err(AccessError::Directory)?;
        let files = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        config.auth_info.token_file = Some(files.join("token").display().to_string());
        config.root_cert_file = Some(files.join("ca.crt"));
        Ok(Self { config, _directory: directory })
    }
}

/// The credentials to use.
#[derive(Debug)]
pub enum Access {
    /// Those of the pod.
    ServiceAccount(Box<ServiceAccount>),
    /// Those of a file. It is read for each new connection: its owner renews certificates.
    Kubeconfig(PathBuf),
}

impl Access {
    /// The kubeconfig if one is named, else the service account.
    ///
    /// # Errors
    /// If there is neither.
    pub fn choose(
        kubeconfig: Option<PathBuf>,
        service_account: Option<Result<ServiceAccount, AccessError>>,
    ) -> Result<Self, AccessError> {
        match (kubeconfig, service_account) {
            (Some(path), _) => Ok(Self::Kubeconfig(path)),
            (None, Some(account)) => account.map(|account| Self::ServiceAccount(Box::new(account))),
            (None, None) => Err(AccessError::None),
        }
    }

    /// The client's configuration. The agent paces its requests itself.
    pub(super) async fn config(&self) -> Result<Config, AccessError> {
        let mut config = match self {
            Self::ServiceAccount(account) => account.config.clone(),
            Self::Kubeconfig(path) => {
                let failed = |source| AccessError::Kubeconfig { path: path.clone(), source: Box::new(source) };
                let file = Kubeconfig::read_from(path).map_err(failed)?;
                Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(failed)?
            }
        };
        config.default_retry = false;
        Ok(config)
    }
}
