//! The verbose answer about a container, as far as containerd and CRI-O both write it.

use prost::bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

/// The runtime's own facts about a container.
#[derive(Debug, Default)]
pub struct ContainerInfo {
    pid: u32,
    /// A part of the answer: the spec of a container with many mounts has megabytes.
    spec: Option<Bytes>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Info<'a> {
    #[serde(default)]
    pid: u32,
    #[serde(borrow)]
    runtime_spec: Option<&'a RawValue>,
}

impl ContainerInfo {
    pub(super) fn from_json(json: &Bytes) -> Option<Self> {
        let info: Info<'_> = serde_json::from_slice(json).ok()?;
        let spec = info.runtime_spec;
        Some(Self {
            pid: info.pid,
            spec: spec.map(|spec| json.slice_ref(spec.get().as_bytes())),
        })
    }

    /// The pid of the container's init; `None` if the container does not run, or has no such
    /// process on the node, as with a virtual machine.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid).filter(|pid| *pid > 0)
    }

    /// The spec that the runtime recorded.
    pub fn spec(&self) -> Option<&[u8]> {
        self.spec.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &'static str) -> Option<ContainerInfo> {
        ContainerInfo::from_json(&Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn a_container_that_ended_has_no_pid() {
        let running = info(r#"{"pid": 7, "runtimeSpec": {"hostname": "a"}}"#).unwrap();
        assert_eq!(running.pid(), Some(7));
        assert_eq!(running.spec(), Some(&br#"{"hostname": "a"}"#[..]));
        assert_eq!(info(r#"{"pid": 0}"#).unwrap().pid(), None);
        assert_eq!(info(r#"{"sandboxID": "x"}"#).unwrap().pid(), None);
        assert!(info("{").is_none());
    }
}
