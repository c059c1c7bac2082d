//! The events for containerd, in order.
//!
//! Each event enters a queue when it happens, and a single task sends the events in order. No
//! caller waits for containerd. If containerd is restarting, an event is sent again until it
//! arrives: a lost exit leaves a dead container "running" for ever. Events are lost only if
//! containerd is away for very long: see `queue`.

mod publish;
mod queue;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::events::task as proto;
use containerd_shim_protos::topics;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{Message, MessageField};
use tokio::sync::oneshot;

use queue::{Item, Queue};

/// An event of a task.
#[derive(Debug, Clone)]
pub(crate) enum TaskEvent {
    /// The container exists.
    Created(proto::TaskCreate),
    /// Its program runs.
    Started(proto::TaskStart),
    /// An exec is added.
    ExecAdded(proto::TaskExecAdded),
    /// An exec runs.
    ExecStarted(proto::TaskExecStarted),
    /// The kernel killed a process for lack of memory.
    OutOfMemory(proto::TaskOOM),
    /// An init or an exec has ended.
    Exited(proto::TaskExit),
    /// The container is gone.
    Deleted(proto::TaskDelete),
    /// The container is frozen.
    Paused(proto::TaskPaused),
    /// The container is thawed.
    Resumed(proto::TaskResumed),
}

/// A queued event.
#[derive(Debug)]
struct Queued {
    at: SystemTime,
    topic: &'static str,
    type_url: &'static str,
    value: Vec<u8>,
}

/// The sending end of the queue.
#[derive(Debug, Clone)]
pub(crate) struct TaskEvents {
    queue: Arc<Queue>,
}

impl TaskEvents {
    /// Starts the task that sends to containerd's ttrpc socket.
    pub(crate) fn publish_to(address: String, namespace: String) -> Self {
        let queue = Arc::new(Queue::default());
        tokio::spawn(publish::publish(address, namespace, Arc::clone(&queue)));
        Self { queue }
    }

    /// Puts an event in the queue.
    pub(crate) fn send(&self, event: &TaskEvent) {
        let (topic, type_url, value) = event.encode();
        match value {
            Ok(value) => {
                self.queue.add(Item::Event(Queued {
                    at: SystemTime::now(),
                    topic,
                    type_url,
                    value,
                }));
            }
            Err(error) => tracing::error!(topic, %error, "cannot encode an event"),
        }
    }

    /// The number of queued events, without the event that is being sent.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Waits until all events in the queue are sent, but not for ever: containerd may never return.
    pub(crate) async fn flush(&self, limit: Duration) {
        let (sent, flushed) = oneshot::channel();
        self.queue.add(Item::Flush(sent));
        if tokio::time::timeout(limit, flushed).await.is_err() {
            tracing::warn!("the last events did not reach containerd");
        }
    }
}

impl TaskEvent {
    /// Topic, type name in Go's registry, and bytes.
    fn encode(&self) -> (&'static str, &'static str, protobuf::Result<Vec<u8>>) {
        match self {
            Self::Created(e) => (
                topics::TASK_CREATE_EVENT_TOPIC,
                "containerd.events.TaskCreate",
                e.write_to_bytes(),
            ),
            Self::Started(e) => (
                topics::TASK_START_EVENT_TOPIC,
                "containerd.events.TaskStart",
                e.write_to_bytes(),
            ),
            Self::ExecAdded(e) => (
                topics::TASK_EXEC_ADDED_EVENT_TOPIC,
                "containerd.events.TaskExecAdded",
                e.write_to_bytes(),
            ),
            Self::ExecStarted(e) => (
                topics::TASK_EXEC_STARTED_EVENT_TOPIC,
                "containerd.events.TaskExecStarted",
                e.write_to_bytes(),
            ),
            Self::OutOfMemory(e) => (
                topics::TASK_OOM_EVENT_TOPIC,
                "containerd.events.TaskOOM",
                e.write_to_bytes(),
            ),
            Self::Exited(e) => (
                topics::TASK_EXIT_EVENT_TOPIC,
                "containerd.events.TaskExit",
                e.write_to_bytes(),
            ),
            Self::Deleted(e) => (
                topics::TASK_DELETE_EVENT_TOPIC,
                "containerd.events.TaskDelete",
                e.write_to_bytes(),
            ),
            Self::Paused(e) => (
                topics::TASK_PAUSED_EVENT_TOPIC,
                "containerd.events.TaskPaused",
                e.write_to_bytes(),
            ),
            Self::Resumed(e) => (
                topics::TASK_RESUMED_EVENT_TOPIC,
                "containerd.events.TaskResumed",
                e.write_to_bytes(),
            ),
        }
    }
}

/// A point in time in protobuf's form.
pub(crate) fn timestamp(at: SystemTime) -> MessageField<Timestamp> {
    MessageField::some(Timestamp::from(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_matches_containerds_expectation() {
        let exit = proto::TaskExit {
            container_id: "c".into(),
            id: "c".into(),
            pid: 7,
            exit_status: 137,
            ..Default::default()
        };
        let (topic, type_url, value) = TaskEvent::Exited(exit.clone()).encode();
        assert_eq!(
            (topic, type_url),
            ("/tasks/exit", "containerd.events.TaskExit")
        );
        assert_eq!(
            proto::TaskExit::parse_from_bytes(&value.unwrap()).unwrap(),
            exit
        );
    }
}
