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

use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{Message, MessageField};
use tokio::sync::oneshot;

use queue::{Item, Queue};

/// A queued event.
#[derive(Debug)]
struct Queued {
    at: SystemTime,
    topic: &'static str,
    /// The message's name in `containerd.events`.
    name: &'static str,
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
    pub(crate) fn send<M: Message>(&self, topic: &'static str, event: &M) {
        match encode(topic, event) {
            Ok(event) => self.queue.add(Item::Event(event)),
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

fn encode<M: Message>(topic: &'static str, event: &M) -> protobuf::Result<Queued> {
    Ok(Queued {
        at: SystemTime::now(),
        topic,
        name: M::NAME,
        value: event.write_to_bytes()?,
    })
}

/// A point in time in protobuf's form.
pub(crate) fn timestamp(at: SystemTime) -> MessageField<Timestamp> {
    MessageField::some(Timestamp::from(at))
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::events::task::TaskExit;
    use containerd_shim_protos::topics::TASK_EXIT_EVENT_TOPIC;

    use super::*;

    #[test]
    fn an_exit_matches_containerds_expectation() {
        let exit = TaskExit {
            container_id: "c".into(),
            id: "c".into(),
            pid: 7,
            exit_status: 137,
            ..Default::default()
        };
        let queued = encode(TASK_EXIT_EVENT_TOPIC, &exit).unwrap();
        assert_eq!((queued.topic, queued.name), ("/tasks/exit", "TaskExit"));
        assert_eq!(TaskExit::parse_from_bytes(&queued.value).unwrap(), exit);
    }
}
