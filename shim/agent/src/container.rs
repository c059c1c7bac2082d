//! The identity of a pod, and a running container.

use std::sync::Arc;

use bindguard_core::spec::SpecUsers;

/// A pod, as the API server knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodIdentity {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// A running container, as far as a refresh needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its name for people.
    pub name: String,
    /// Its init.
    pub pid: u32,
    /// The user namespaces in its spec; `None` if the spec is not known.
    pub spec: Option<Arc<SpecUsers>>,
    /// The pod, and the container's name in the pod.
    pub pod: Option<(PodIdentity, String)>,
}
