//! The client of the CRI: sandboxes, containers, and the runtime's own facts about them.
//!
//! The messages are the kubelet's: `k8s.io/cri-api`, v1.

mod client;
mod info;
mod lists;
pub mod of_node;

pub use k8s_cri::v1::{Container, PodSandbox, PodSandboxMetadata, PodSandboxState};

pub use self::client::{Cri, CriError, POD_UID};
pub use self::info::ContainerInfo;
