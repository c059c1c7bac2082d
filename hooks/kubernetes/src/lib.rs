//! A node's way to the API server: credentials, and a client of single requests.
//!
//! The agent writes events and reads pods with it. kube's own client would be a third of the agent's
//! program (docs/decisions/0029).
#![forbid(unsafe_code)]

mod access;
mod client;
mod credentials;
mod kubeconfig;

use std::env;
use std::fs;

pub use self::access::{Access, AccessError, ServiceAccount};
pub use self::client::{ApiClient, ApiError, Status, StatusCause, StatusDetails};
pub use self::credentials::ReadError;
pub use self::kubeconfig::KubeconfigError;

/// The node's name in Kubernetes: the config's, the environment's, or the kernel's.
pub fn node_name(configured: Option<&str>) -> String {
    let of_environment = || env::var("NODE_NAME").ok().filter(|name| !name.is_empty());
    let of_kernel = || {
        fs::read_to_string("/proc/sys/kernel/hostname")
            .unwrap_or_default()
            .trim()
            .to_lowercase()
    };
    configured
        .map(str::to_owned)
        .or_else(of_environment)
        .unwrap_or_else(of_kernel)
}
