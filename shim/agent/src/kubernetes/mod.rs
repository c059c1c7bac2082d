//! The agent's way to the API server. Nothing else of the agent needs it.
//!
//! In a pod the credentials are those of its service account, else those of a kubeconfig. The agent
//! writes events and patches its own pod. It watches nothing, and reads a pod only for kubediag's
//! processors.

mod access;
mod client;
mod credentials;
mod event_object;
mod kubeconfig;
mod start;

use std::env;
use std::fs;

pub use self::access::{Access, AccessError, ServiceAccount};
pub use self::client::{ApiClient, ApiError};
pub use self::start::start;

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
