//! The verbose answer about a container, as far as containerd and CRI-O both write it.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;

/// The runtime's own facts about a container.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerInfo {
    #[serde(default)]
    pid: u32,
    runtime_spec: Option<Box<RawValue>>,
}

impl ContainerInfo {
    pub(super) fn in_answer(info: &HashMap<String, String>) -> Option<Self> {
        serde_json::from_str(info.get("info")?).ok()
    }

    /// The pid of the container's init; `None` if the container does not run, or has no such
    /// process on the node, as with a virtual machine.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid).filter(|pid| *pid > 0)
    }

    /// The spec that the runtime recorded.
    pub fn spec(&self) -> Option<&[u8]> {
        let spec = self.runtime_spec.as_deref()?;
        Some(spec.get().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> Option<ContainerInfo> {
        ContainerInfo::in_answer(&HashMap::from([("info".to_owned(), text.to_owned())]))
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
