//! The messages of the CRI, `runtime.v1` of `k8s.io/cri-api`, with the fields that bindguard reads.
//!
//! The author of a pod chooses its annotations, labels and mounts, and a node has a hundred pods. A
//! decoder for whole messages needs twenty times the memory of an answer with many short keys. So
//! the other fields are skipped while an answer is decoded.
//!
//! A message with a single field of a plain type has the form of prost's own message for that type:
//! `i32` for a state, `String` for an id, `()` for an answer of which nothing is read.

use std::collections::HashMap;
use std::fmt::Debug;

use bindguard_core::policy::{MODE, PROPAGATION};
use bindguard_core::refresh_request::{NOTIFY, REFRESH, REFRESH_BINDS};
use prost::bytes::{Buf, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType, bytes, skip_field};
use prost::{DecodeError, Message};

use crate::pods::ContainerState;

/// The label with which the kubelet marks sandboxes and containers (`pkg/kubelet/types/labels.go`).
pub const POD_UID: &str = "io.kubernetes.pod.uid";

/// `PodSandboxState`: the containers of the sandbox can run.
pub const READY: i32 = 0;

/// `NamespaceMode`: the namespace of the node.
pub const OF_NODE: i32 = 2;

/// The key of a verbose answer about a container or a sandbox.
pub const INFO: &str = "info";

/// The key of a verbose answer about the runtime.
pub const CONFIG: &str = "config";

const KNOWN: [&str; 8] = [
    REFRESH,
    REFRESH_BINDS,
    NOTIFY,
    MODE,
    PROPAGATION,
    POD_UID,
    INFO,
    CONFIG,
];

/// The entries of a `map<string, string>` whose keys bindguard reads. The values are parts of the
/// answer, without a copy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownEntries {
    entries: Vec<(&'static str, Bytes)>,
    /// The key of the entry that is being decoded.
    key: Option<&'static str>,
}

impl KnownEntries {
    /// The value of a known key.
    pub fn get(&self, key: &str) -> Option<&str> {
        str::from_utf8(self.bytes(key)?).ok()
    }

    pub fn bytes(&self, key: &str) -> Option<&Bytes> {
        let entry = self.entries.iter().find(|(known, _)| *known == key);
        entry.map(|(_, value)| value)
    }
}

/// As a field that is not repeated, prost merges each entry of the map into the same value.
impl Message for KnownEntries {
    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        let mut text = Bytes::new();
        match tag {
            1 => {
                bytes::merge(wire_type, &mut text, buf, ctx)?;
                self.key = KNOWN.into_iter().find(|known| known.as_bytes() == text);
                if let Some(key) = self.key {
                    self.entries.retain(|(known, _)| *known != key);
                    self.entries.push((key, Bytes::new()));
                }
            }
            2 => {
                bytes::merge(wire_type, &mut text, buf, ctx)?;
                if let (Some(_), Some((_, value))) = (self.key.take(), self.entries.last_mut()) {
                    *value = text;
                }
            }
            _ => skip_field(wire_type, tag, buf, ctx)?,
        }
        Ok(())
    }

    // bindguard sends no such map.
    fn encode_raw(&self, _: &mut impl BufMut) {}

    fn encoded_len(&self) -> usize {
        0
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The sandbox of a pod.
#[derive(prost::Message)]
pub struct PodSandbox {
    #[prost(string, tag = "1")]
    pub id: String,
    /// The names of the pod.
    #[prost(message, required, tag = "2")]
    pub metadata: PodSandboxMetadata,
    #[prost(int32, tag = "3")]
    pub state: i32,
    /// The time of its creation, in nanoseconds.
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    /// The label [`POD_UID`].
    #[prost(message, required, tag = "5")]
    pub labels: KnownEntries,
    /// The annotations of the pod that bindguard reads.
    #[prost(message, required, tag = "6")]
    pub annotations: KnownEntries,
    /// The handler; empty for the node's default, and from CRI-O.
    #[prost(string, tag = "7")]
    pub runtime_handler: String,
}

/// The names of a pod.
#[derive(PartialEq, prost::Message)]
pub struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub namespace: String,
}

/// A container of a pod.
#[derive(Clone, prost::Message)]
pub struct Container {
    #[prost(string, tag = "1")]
    pub id: String,
    /// The sandbox of its pod.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    #[prost(message, required, tag = "3")]
    pub metadata: ContainerMetadata,
    #[prost(enumeration = "ContainerState", tag = "6")]
    pub state: i32,
}

/// The name of a container.
#[derive(Clone, prost::Message)]
pub struct ContainerMetadata {
    /// Its name in the pod.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The number of times that it was created again.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
}

/// A list of messages.
#[derive(prost::Message)]
pub struct ListOf<M: Message + Default + Debug> {
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<M>,
}

/// A request with a filter or an object, or an answer with a status, as its first field.
#[derive(prost::Message)]
pub struct With<M: Message + Default + Debug> {
    #[prost(message, required, tag = "1")]
    pub first: M,
}

/// The verbose part of an answer.
#[derive(prost::Message)]
pub struct VerboseAnswer {
    #[prost(message, required, tag = "2")]
    pub info: KnownEntries,
}

/// The mounts in the status of a container.
#[derive(prost::Message)]
pub struct MountList {
    #[prost(message, repeated, tag = "14")]
    pub mounts: Vec<Mount>,
}

/// A mount, by the kubelet's request.
#[derive(prost::Message)]
pub struct Mount {
    #[prost(bytes = "bytes", tag = "2")]
    pub host_path: Bytes,
    #[prost(bool, tag = "3")]
    pub readonly: bool,
}

#[derive(prost::Message)]
pub struct SandboxFilter {
    #[prost(message, optional, tag = "2")]
    pub state: Option<i32>,
    #[prost(map = "string, string", tag = "3")]
    pub label_selector: HashMap<String, String>,
}

#[derive(prost::Message)]
pub struct ContainerFilter {
    #[prost(message, optional, tag = "2")]
    pub state: Option<i32>,
    #[prost(string, tag = "3")]
    pub pod_sandbox_id: String,
    #[prost(map = "string, string", tag = "4")]
    pub label_selector: HashMap<String, String>,
}

/// A request for the status of a container or a sandbox.
#[derive(prost::Message)]
pub struct StatusOfId {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

/// A request to run a sandbox.
#[derive(prost::Message)]
pub struct RunSandbox {
    #[prost(message, required, tag = "1")]
    pub config: SandboxConfig,
    #[prost(string, tag = "2")]
    pub runtime_handler: String,
}

#[derive(prost::Message)]
pub struct SandboxConfig {
    #[prost(message, required, tag = "1")]
    pub metadata: PodSandboxMetadata,
    #[prost(map = "string, string", tag = "6")]
    pub labels: HashMap<String, String>,
    #[prost(message, required, tag = "8")]
    pub linux: LinuxSandbox,
}

#[derive(prost::Message)]
pub struct LinuxSandbox {
    #[prost(string, tag = "1")]
    pub cgroup_parent: String,
    /// The security context, whose first field has the namespaces, whose first field is the network.
    #[prost(message, required, tag = "2")]
    pub security_context: With<i32>,
}

/// `None` if the image is not on the node.
#[derive(prost::Message)]
pub struct ImageAnswer {
    #[prost(message, optional, tag = "1")]
    pub image: Option<()>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use k8s_cri::v1;
    use prost::Message;

    use super::*;

    fn map(entries: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = entries
            .iter()
            .map(|(key, value)| (key.to_string(), value.to_string()));
        owned.collect()
    }

    /// The messages of `k8s_cri` are generated from the published protocol.
    #[test]
    fn the_fields_are_those_of_the_published_messages() {
        let many: Vec<String> = (0..1000).map(|key| key.to_string()).collect();
        let mut annotations = map(&[(REFRESH, "true"), (MODE, "")]);
        annotations.extend(many.into_iter().map(|key| (key, "x".to_owned())));
        let sandbox = v1::PodSandbox {
            id: "s-1".to_owned(),
            metadata: Some(v1::PodSandboxMetadata {
                name: "web".to_owned(),
                uid: "u-1".to_owned(),
                namespace: "default".to_owned(),
                attempt: 3,
            }),
            state: v1::PodSandboxState::SandboxNotready.into(),
            created_at: 7,
            labels: map(&[(POD_UID, "u-1"), ("app", "web")]),
            annotations,
            runtime_handler: "bindguard".to_owned(),
        };
        let list = v1::ListPodSandboxResponse {
            items: vec![sandbox; 2],
        };
        let list = ListOf::<PodSandbox>::decode(Bytes::from(list.encode_to_vec())).unwrap();
        let [first, second] = list.items.as_slice() else {
            panic!("{list:?}")
        };
        assert_eq!((&first.id, &first.metadata), (&second.id, &second.metadata));
        assert_eq!((first.id.as_str(), first.created_at), ("s-1", 7));
        let PodSandboxMetadata {
            name,
            uid,
            namespace,
        } = &first.metadata;
        assert_eq!([name, uid, namespace], ["web", "u-1", "default"]);
        assert_eq!(first.state, 1);
        assert_eq!(first.runtime_handler, "bindguard");
        assert_eq!(first.labels.get(POD_UID), Some("u-1"));
        assert_eq!(first.annotations.get(REFRESH), Some("true"));
        assert_eq!(first.annotations.get(MODE), Some(""));
        assert_eq!(first.annotations.get(NOTIFY), None);
        assert_eq!(
            (first.labels.entries.len(), first.annotations.entries.len()),
            (1, 2)
        );
    }
}
