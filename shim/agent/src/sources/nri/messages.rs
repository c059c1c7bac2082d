//! The messages of nri's `pkg/api/api.proto`, v1alpha1, as far as the plugin uses them. Unknown
//! fields are passed over.
//!
//! The author of a pod chooses annotations and mounts: a message has up to 4 MiB.

use bindguard_operator::cri::KnownEntries;
use prost::bytes::Bytes;
use prost::{DecodeError, Message};

/// The service that the runtime serves.
pub const RUNTIME: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The service that a plugin serves.
pub const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The bit of CREATE_CONTAINER, event 4, in a subscription. No bit at all would subscribe to
/// everything.
pub const CREATE_CONTAINER: i32 = 1 << 3;

/// The bit of START_CONTAINER, event 6.
pub const START_CONTAINER: i32 = 1 << 5;

/// The bit of VALIDATE_CONTAINER_ADJUSTMENT, event 14. Runtimes before NRI 0.10 refuse a plugin with
/// this bit.
pub const VALIDATE_CONTAINER: i32 = 1 << 13;

/// The number of START_CONTAINER in a [`StateChangeEvent`].
pub const START_CONTAINER_EVENT: i32 = 6;

/// Names the plugin.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterPluginRequest {
    #[prost(string, tag = "1")]
    pub plugin_name: String,
    /// Two digits; plugins are called in this order.
    #[prost(string, tag = "2")]
    pub plugin_idx: String,
    /// The version of NRI that the plugin serves; runtimes before NRI 0.10 skip the field.
    #[prost(string, tag = "3")]
    pub nri_version: String,
}

/// Names the runtime.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigureRequest {
    /// `containerd` or `cri-o`.
    #[prost(string, tag = "2")]
    pub runtime_name: String,
    #[prost(string, tag = "3")]
    pub runtime_version: String,
    /// Its version of NRI; empty before NRI 0.12.
    #[prost(string, tag = "6")]
    pub nri_version: String,
}

/// Subscribes to events.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigureResponse {
    /// A bit for each event.
    #[prost(int32, tag = "2")]
    pub events: i32,
}

/// The containers that exist. A runtime splits a long list into several requests.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SynchronizeRequest {
    /// Containers of this part, which are only counted.
    #[prost(message, repeated, tag = "2")]
    pub containers: Vec<()>,
    /// True if more parts follow.
    #[prost(bool, tag = "3")]
    pub more: bool,
}

/// The answer to a part.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SynchronizeResponse {
    /// Must repeat the request's value: a plugin that does not is closed.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerRequest {
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "2")]
    pub container: Option<NriContainer>,
}

/// A new container with the changes of all plugins.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ValidateRequest {
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodSandbox>,
    /// The container before the changes.
    #[prost(message, optional, tag = "2")]
    pub container: Option<NriContainer>,
    #[prost(message, optional, tag = "3")]
    pub adjust: Option<ContainerAdjustment>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ValidateResponse {
    /// True if the runtime must not create the container.
    #[prost(bool, tag = "1")]
    pub reject: bool,
    /// Why not.
    #[prost(string, tag = "2")]
    pub reason: String,
}

/// A container that was created and is about to start.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct StartContainerRequest {
    #[prost(message, optional, tag = "2")]
    pub container: Option<CreatedContainer>,
}

/// The event of a runtime whose NRI has one call for all events.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct StateChangeEvent {
    /// The number of the event.
    #[prost(int32, tag = "1")]
    pub event: i32,
    #[prost(message, optional, tag = "3")]
    pub container: Option<CreatedContainer>,
}

/// The changes to a new container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerResponse {
    /// Absent: no change.
    #[prost(message, optional, tag = "1")]
    pub adjust: Option<ContainerAdjustment>,
}

/// The changed parts of a container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAdjustment {
    /// Removed and added mounts.
    #[prost(message, repeated, tag = "3")]
    pub mounts: Vec<NriMount>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandbox {
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub uid: String,
    #[prost(string, tag = "4")]
    pub namespace: String,
    /// Its annotations that bindguard reads, whatever the runtime passes on to containers.
    #[prost(message, required, tag = "6")]
    pub annotations: KnownEntries,
}

/// A container before its create.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NriContainer {
    #[prost(string, tag = "1")]
    pub id: String,
    /// The id of its pod.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    /// Its name in the pod.
    #[prost(string, tag = "3")]
    pub name: String,
    /// The mounts of its spec, each as the bytes of an [`NriMount`].
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub mounts: Vec<Bytes>,
}

impl NriContainer {
    /// The first mounts of its spec. A pod can mount a volume at 30,000 places, which need ten times
    /// the memory of the message.
    ///
    /// # Errors
    /// If the bytes are no mounts.
    pub fn first_mounts(&self, limit: usize) -> Result<Vec<NriMount>, DecodeError> {
        let mounts = self.mounts.iter().take(limit);
        mounts
            .map(|mount| NriMount::decode(mount.clone()))
            .collect()
    }
}

/// A container after its create.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CreatedContainer {
    #[prost(string, tag = "1")]
    pub id: String,
    /// The id of its pod.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    /// The pid of its init; some runtimes say 0 before the start.
    #[prost(uint32, tag = "12")]
    pub pid: u32,
}

/// A mount of a spec.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message, serde::Serialize)]
pub struct NriMount {
    /// The path in the container; with a `-` before it, the mount is removed.
    #[prost(string, tag = "1")]
    pub destination: String,
    /// `bind` or a filesystem type.
    #[prost(string, tag = "2")]
    pub r#type: String,
    /// The path on the host.
    #[prost(string, tag = "3")]
    pub source: String,
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}
