//! A running container.

use std::sync::Arc;

use bindguard_core::identity::Identity;
use bindguard_core::spec::SpecUsers;

/// A running container, as far as a refresh needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    pub id: String,
    pub name: String,
    pub pid: u32,
    /// The user namespaces in its spec; `None` if the spec is not known.
    pub spec: Option<Arc<SpecUsers>>,
    /// The pod, and the container's name in the pod; without a pod, the name for people.
    pub identity: Identity,
}
