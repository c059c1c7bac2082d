//! `Exec`: adds a process to the container.
//!
//! `Exec` only registers the process; `Start` creates it. The process's description stays as
//! containerd sent it, except that the request decides whether there is a terminal.

use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::sync::Arc;

use bindguard_core::spec::RawObject;
use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;

use super::{Task, TaskError, TaskProcess};
use crate::io::Streams;

/// An added process.
#[derive(Debug)]
pub(super) struct Exec {
    /// The process.
    pub(super) process: Arc<TaskProcess>,
    /// The OCI process, as JSON.
    pub(super) spec: Vec<u8>,
    /// Held while it is being started or deleted.
    pub(super) turn: tokio::sync::Mutex<()>,
}

impl Task {
    /// Adds a process by name and queues the event for containerd.
    pub(crate) fn add_exec(&self, request: ExecProcessRequest) -> Result<(), TaskError> {
        let exec_id = request.exec_id;
        // The id becomes part of file names in the bundle.
        if exec_id.is_empty() || exec_id.contains('/') {
            return Err(TaskError::Invalid(format!(
                "exec id {exec_id:?} is no name"
            )));
        }
        self.init.state().admits_exec()?;
        let spec = with_terminal(&request.spec.value, request.terminal)
            .map_err(|why| TaskError::Invalid(format!("process of exec {exec_id}: {why}")))?;
        let streams = Streams {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let exec = Exec {
            process: Arc::new(TaskProcess::new(exec_id.clone(), streams)),
            spec,
            turn: tokio::sync::Mutex::new(()),
        };
        match self.execs().entry(exec_id.clone()) {
            Entry::Occupied(_) => return Err(TaskError::AlreadyExists(exec_id)),
            Entry::Vacant(free) => free.insert(Arc::new(exec)),
        };
        let added = proto::TaskExecAdded {
            container_id: self.id.clone(),
            exec_id,
            ..Default::default()
        };
        self.shared
            .events
            .send(topics::TASK_EXEC_ADDED_EVENT_TOPIC, &added);
        Ok(())
    }
}

/// The process as it was sent, with this `terminal` at the end. Keys may be escaped or repeated:
/// the runtime interprets them.
fn with_terminal(process: &[u8], terminal: bool) -> serde_json::Result<Vec<u8>> {
    // As Go does: bytes that are not UTF-8 are U+FFFD.
    let process = String::from_utf8_lossy(process);
    let fields: Option<RawObject<'_>> = serde_json::from_str(&process)?;
    let mut out = String::from("{");
    for (key, value) in fields
        .iter()
        .flat_map(RawObject::entries)
        .filter(|(key, _)| *key != "terminal")
    {
        let _ = write!(out, "{}:{},", serde_json::to_string(key)?, value.get());
    }
    let _ = write!(out, "\"terminal\":{terminal}}}");
    Ok(out.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_terminal_field_is_replaced() {
        let sent = br#"{"args":["sh"],"x-new":{"b":1,"a":1e400},"cwd":"/"}"#;
        let got = String::from_utf8(with_terminal(sent, true).unwrap()).unwrap();
        assert_eq!(
            got,
            r#"{"args":["sh"],"x-new":{"b":1,"a":1e400},"cwd":"/","terminal":true}"#
        );
        assert!(with_terminal(b"{}{", true).is_err());
    }

    #[test]
    fn bytes_that_are_not_utf_8_are_replaced() {
        let got =
            String::from_utf8(with_terminal(b"{\"env\":[\"A=\xe9\"]}", false).unwrap()).unwrap();
        assert_eq!(got, "{\"env\":[\"A=\u{fffd}\"],\"terminal\":false}");
    }

    #[test]
    fn keys_may_be_escaped_and_written_twice() {
        let sent = br#"{"\u0061rgs":["sh"],"terminal":false,"cwd":"/a","cwd":"/b"}"#;
        let got = String::from_utf8(with_terminal(sent, true).unwrap()).unwrap();
        assert_eq!(
            got,
            r#"{"args":["sh"],"cwd":"/a","cwd":"/b","terminal":true}"#
        );
    }
}
