//! The events for containerd, in order.
//!
//! Each event enters a queue when it happens, and a single task sends the events in order. No
//! caller waits for containerd. If containerd is restarting, an event is sent again until it
//! arrives: a lost exit leaves a dead container "running" for ever.
//!
//! The queue is bounded: while containerd is down, a container with repeated out-of-memory kills
//! makes events all the time. Beyond the bound the oldest report of such a kill is dropped or,
//! without one, the oldest event. A containerd that returns queries states and exits itself.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::EventsClient;
use containerd_shim_protos::topics::TASK_OOM_EVENT_TOPIC;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{Message, MessageField};
use tokio::net::UnixStream;
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Code, context};

use crate::blocking::lock;

/// The number of events that Go's shim keeps for a retry.
const MAX_EVENTS: usize = 2048;
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// containerd may reject the same event this many times.
const REJECTIONS: u32 = 8;

/// The sending end of the queue.
#[derive(Debug, Clone)]
pub struct TaskEvents {
    queue: Arc<Queue>,
}

impl TaskEvents {
    /// Starts the task that sends to containerd's ttrpc socket.
    pub fn publish_to(address: String, namespace: String) -> Self {
        let queue = Arc::new(Queue::default());
        let mut publisher = Publisher {
            address,
            namespace,
            client: None,
        };
        let items = Arc::clone(&queue);
        tokio::spawn(async move {
            loop {
                match items.next().await {
                    Item::Event(event) => publisher.deliver(&event).await,
                    Item::Flush(done) => drop(done.send(())),
                }
            }
        });
        Self { queue }
    }

    /// Puts an event in the queue.
    pub fn send<M: Message>(&self, topic: &'static str, event: &M) {
        match encode(topic, event) {
            Ok(event) => self.queue.add(Item::Event(event)),
            Err(error) => tracing::error!(topic, %error, "cannot encode an event"),
        }
    }

    /// The number of queued events, without the event that is being sent.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Waits until all events in the queue are sent, but not for ever: containerd may never return.
    pub async fn flush(&self, limit: Duration) {
        let (sent, flushed) = oneshot::channel();
        self.queue.add(Item::Flush(sent));
        if timeout(limit, flushed).await.is_err() {
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
pub fn timestamp(at: SystemTime) -> MessageField<Timestamp> {
    MessageField::some(Timestamp::from(at))
}

#[derive(Debug)]
struct Queued {
    at: SystemTime,
    topic: &'static str,
    /// The message's name in `containerd.events`.
    name: &'static str,
    value: Vec<u8>,
}

/// An entry of the queue.
#[derive(Debug)]
enum Item {
    Event(Queued),
    /// Answered when all earlier events have been sent.
    Flush(oneshot::Sender<()>),
}

/// The queue, shared by the senders and the publishing task.
#[derive(Debug, Default)]
struct Queue {
    items: Mutex<Items>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Items {
    waiting: VecDeque<Item>,
    /// The number since the queue was last empty.
    dropped: u64,
}

impl Queue {
    /// Adds an item, and drops an older item if there are too many.
    fn add(&self, item: Item) {
        let mut items = lock(&self.items);
        if items.waiting.len() >= MAX_EVENTS {
            items.drop_one();
        }
        items.waiting.push_back(item);
        drop(items);
        self.added.notify_one();
    }

    /// Waits for the next item.
    async fn next(&self) -> Item {
        loop {
            let added = self.added.notified();
            if let Some(item) = lock(&self.items).take() {
                return item;
            }
            added.await;
        }
    }

    fn len(&self) -> usize {
        lock(&self.items).waiting.len()
    }
}

impl Items {
    fn take(&mut self) -> Option<Item> {
        let item = self.waiting.pop_front();
        if self.waiting.is_empty() {
            // Frees the memory of a long queue.
            self.waiting = VecDeque::new();
            if self.dropped > 0 {
                tracing::warn!(
                    dropped = self.dropped,
                    "containerd receives events again; the oldest were dropped"
                );
            }
            self.dropped = 0;
        }
        item
    }

    fn drop_one(&mut self) {
        let is_event = |item: &Item| matches!(item, Item::Event(_));
        let is_kill =
            |item: &Item| matches!(item, Item::Event(event) if event.topic == TASK_OOM_EVENT_TOPIC);
        let kill = self.waiting.iter().position(is_kill);
        let oldest = kill.or_else(|| self.waiting.iter().position(is_event));
        let Some(Item::Event(event)) = oldest.and_then(|place| self.waiting.remove(place)) else {
            return;
        };
        if self.dropped == 0 {
            tracing::warn!(
                topic = event.topic,
                "containerd receives no events: dropping the oldest of {MAX_EVENTS}"
            );
        }
        self.dropped += 1;
    }
}

/// Calls containerd's event service.
///
/// It connects for the first event and keeps the connection. A transport failure (no socket, a
/// broken connection, no answer in time) is retried without end, with a growing pause. An event that
/// containerd rejects repeatedly is dropped with a log line: it would block all later events.
struct Publisher {
    address: String,
    namespace: String,
    client: Option<EventsClient>,
}

impl Publisher {
    async fn deliver(&mut self, event: &Queued) {
        let mut pause = FIRST_PAUSE;
        let mut rejections = 0;
        loop {
            match self.try_deliver(event).await {
                Ok(()) => return,
                Err(ttrpc::Error::RpcStatus(status))
                    if !matches!(status.code(), Code::UNAVAILABLE | Code::DEADLINE_EXCEEDED) =>
                {
                    rejections += 1;
                    if rejections >= REJECTIONS {
                        return tracing::error!(
                            topic = event.topic,
                            "containerd does not take an event: {}",
                            status.message
                        );
                    }
                }
                Err(error) => {
                    let why = match error {
                        ttrpc::Error::Others(why) => why,
                        error => error.to_string(),
                    };
                    self.client = None;
                    tracing::debug!(topic = event.topic, "containerd cannot be reached: {why}");
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    async fn try_deliver(&mut self, event: &Queued) -> ttrpc::Result<()> {
        let any = Any {
            // Go's registry has the full name alone.
            type_url: format!("containerd.events.{}", event.name),
            value: event.value.clone(),
            ..Default::default()
        };
        let envelope = Envelope {
            timestamp: timestamp(event.at),
            namespace: self.namespace.clone(),
            topic: event.topic.to_owned(),
            event: MessageField::some(any),
            ..Default::default()
        };
        let request = ForwardRequest {
            envelope: MessageField::some(envelope),
            ..Default::default()
        };
        let client = match self.client.take() {
            Some(client) => client,
            None => {
                let address = &self.address;
                let path = address.strip_prefix("unix://").unwrap_or(address);
                let stream = timeout(ANSWER_LIMIT, UnixStream::connect(path))
                    .await
                    .map_err(|elapsed| ttrpc::Error::Others(elapsed.to_string()))?
                    .map_err(|error| ttrpc::Error::Others(format!("connect to {path}: {error}")))?;
                EventsClient::new(Client::new(Socket::from(stream)))
            }
        };
        let client = self.client.insert(client);
        let limit = context::with_duration(ANSWER_LIMIT);
        client.forward(limit, &request).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

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

    fn event(topic: &'static str, number: usize) -> Item {
        let value = number.to_le_bytes().to_vec();
        Item::Event(Queued {
            at: SystemTime::now(),
            topic,
            name: "",
            value,
        })
    }

    async fn topics_and_numbers(queue: &Arc<Queue>) -> Vec<(&'static str, usize)> {
        let mut all = Vec::new();
        while queue.len() > 0 {
            if let Item::Event(event) = queue.next().await {
                all.push((
                    event.topic,
                    usize::from_le_bytes(event.value.try_into().unwrap()),
                ));
            }
        }
        all
    }

    /// Issue 14: a containerd that is down for long must cost only a bounded amount of memory.
    #[tokio::test]
    async fn the_oldest_kills_are_dropped_first_and_then_the_oldest_events() {
        let queue = Arc::new(Queue::default());
        queue.add(event(TASK_EXIT_EVENT_TOPIC, 0));
        (0..MAX_EVENTS * 2).for_each(|number| queue.add(event(TASK_OOM_EVENT_TOPIC, number)));
        queue.add(event(TASK_EXIT_EVENT_TOPIC, 1));
        let left = topics_and_numbers(&queue).await;
        assert_eq!(left.len(), MAX_EVENTS);
        assert_eq!(
            left[..2],
            [
                (TASK_EXIT_EVENT_TOPIC, 0),
                (TASK_OOM_EVENT_TOPIC, MAX_EVENTS + 2)
            ]
        );
        assert_eq!(left[MAX_EVENTS - 1], (TASK_EXIT_EVENT_TOPIC, 1));

        (0..MAX_EVENTS + 1).for_each(|number| queue.add(event(TASK_EXIT_EVENT_TOPIC, number)));
        assert_eq!(
            topics_and_numbers(&queue).await[0],
            (TASK_EXIT_EVENT_TOPIC, 1)
        );
    }

    #[tokio::test]
    async fn a_waiting_consumer_is_woken() {
        let queue = Arc::new(Queue::default());
        let waiting = Arc::clone(&queue);
        let next = tokio::spawn(async move { waiting.next().await });
        tokio::task::yield_now().await;
        queue.add(event(TASK_EXIT_EVENT_TOPIC, 7));
        assert!(matches!(next.await.unwrap(), Item::Event(_)));
    }
}
