//! A node's way to the API server: credentials, and a client of single requests.
//!
//! The agent writes events and reads pods with it. kube's own client would be a third of the agent's
//! program (docs/decisions/0029).
#![forbid(unsafe_code)]

mod client;
mod credentials;

use std::env;
use std::fs;

pub use self::client::{ApiClient, ApiError, Status, StatusCause, StatusDetails};
pub use self::credentials::{Access, Failure, ServiceAccount};

/// The node's name in Kubernetes: the config's, the environment's, or the kernel's.
pub fn node_name(configured: Option<&str>) -> String {
    if let Some(name) = configured {
        return name.to_owned();
    }
    match env::var("NODE_NAME") {
        Ok(name) if !name.is_empty() => name,
        _ => {
            let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            name.trim().to_lowercase()
        }
    }
}
