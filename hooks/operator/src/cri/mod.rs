//! The client of the CRI: sandboxes, containers, and the runtime's own facts about them.

mod client;
mod info;
mod lists;
mod messages;
pub mod of_node;
pub mod trial;

pub use self::client::{Cri, CriError};
pub use self::info::ContainerInfo;
pub use self::messages::{Container, KnownEntries, POD_UID, PodSandbox};
