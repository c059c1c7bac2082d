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
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Code, context};

use crate::work::{lock, spawn};

/// The number of events that Go's shim keeps for a retry.
const MAX_EVENTS: usize = 2048;
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// containerd may reject the same event this many times.
const REJECTIONS: u32 = 8;

/// The sending end of the queue.
#[derive(Clone, Default)]
pub struct TaskEvents(Arc<Queue>);

#[derive(Default)]
struct Queue {
    items: Mutex<Items>,
    added: Notify,
    /// The queue may be empty and all events sent.
    sent: Notify,
}

#[derive(Default)]
struct Items {
    waiting: VecDeque<Envelope>,
    is_sending: bool,
    /// The number since the queue was last empty.
    dropped: u64,
}

impl TaskEvents {
    /// Starts the task that sends to containerd's ttrpc socket.
    pub fn publish_to(address: String, namespace: String) -> Self {
        let events = Self::default();
        let mut publisher = Publisher {
            address,
            namespace,
            client: None,
        };
        let queued = events.clone();
        spawn(async move {
            loop {
                publisher.deliver(&queued.next().await).await;
                lock(&queued.0.items).is_sending = false;
                queued.0.sent.notify_one();
            }
        });
        events
    }

    /// Puts an event in the queue.
    pub fn send<M: Message>(&self, topic: &'static str, event: &M) {
        match event.write_to_bytes() {
            Ok(value) => self.send_encoded(topic, M::NAME, value),
            Err(error) => log::error!(topic:%, error:%; "cannot encode an event"),
        }
    }

    fn send_encoded(&self, topic: &str, name: &str, value: Vec<u8>) {
        let any = Any {
            // Go's registry has the full name alone.
            type_url: format!("containerd.events.{name}"),
            value,
            ..Default::default()
        };
        self.add(Envelope {
            timestamp: timestamp(SystemTime::now()),
            topic: topic.to_owned(),
            event: MessageField::some(any),
            ..Default::default()
        });
    }

    /// The number of queued events, without the event that is being sent.
    pub fn waiting(&self) -> usize {
        lock(&self.0.items).waiting.len()
    }

    /// Waits until all events in the queue are sent, but not for ever: containerd may never return.
    pub async fn flush(&self, limit: Duration) {
        let is_busy = || {
            let items = lock(&self.0.items);
            items.is_sending || !items.waiting.is_empty()
        };
        let flushed = async {
            while is_busy() {
                self.0.sent.notified().await;
            }
        };
        if timeout(limit, flushed).await.is_err() {
            log::warn!("the last events did not reach containerd");
        }
    }

    /// Adds an event, and drops an older event if there are too many.
    fn add(&self, event: Envelope) {
        let mut items = lock(&self.0.items);
        if items.waiting.len() >= MAX_EVENTS {
            let is_kill = |event: &Envelope| event.topic == TASK_OOM_EVENT_TOPIC;
            let oldest = items.waiting.iter().position(is_kill).unwrap_or(0);
            if let Some(event) = items.waiting.remove(oldest)
                && items.dropped == 0
            {
                log::warn!(
                    topic:% = event.topic;
                    "containerd receives no events: dropping the oldest of {MAX_EVENTS}"
                );
            }
            items.dropped += 1;
        }
        items.waiting.push_back(event);
        drop(items);
        self.0.added.notify_one();
    }

    /// Waits for the next event, which is being sent from then on.
    async fn next(&self) -> Envelope {
        loop {
            let added = self.0.added.notified();
            if let Some(event) = lock(&self.0.items).take() {
                return event;
            }
            added.await;
        }
    }
}

/// A point in time in protobuf's form.
pub fn timestamp(at: SystemTime) -> MessageField<Timestamp> {
    MessageField::some(Timestamp::from(at))
}

impl Items {
    fn take(&mut self) -> Option<Envelope> {
        let event = self.waiting.pop_front()?;
        self.is_sending = true;
        if self.waiting.is_empty() {
            // Frees the memory of a long queue.
            self.waiting = VecDeque::new();
            if self.dropped > 0 {
                log::warn!(
                    dropped:% = self.dropped;
                    "containerd receives events again; the oldest were dropped"
                );
            }
            self.dropped = 0;
        }
        Some(event)
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
    async fn deliver(&mut self, event: &Envelope) {
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
                        return log::error!(
                            topic:% = event.topic;
                            "containerd does not take an event: {}", status.message
                        );
                    }
                }
                Err(error) => {
                    let why = match error {
                        ttrpc::Error::Others(why) => why,
                        error => error.to_string(),
                    };
                    self.client = None;
                    log::debug!(topic:% = event.topic; "containerd cannot be reached: {why}");
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    async fn try_deliver(&mut self, event: &Envelope) -> ttrpc::Result<()> {
        let envelope = Envelope {
            namespace: self.namespace.clone(),
            ..event.clone()
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
        let events = TaskEvents::default();
        events.send(TASK_EXIT_EVENT_TOPIC, &exit);
        let queued = lock(&events.0.items).take().unwrap();
        assert_eq!(queued.topic, "/tasks/exit");
        assert_eq!(queued.event.type_url, "containerd.events.TaskExit");
        let value = &queued.event.value;
        assert_eq!(TaskExit::parse_from_bytes(value).unwrap(), exit);
    }

    fn event(topic: &str, number: usize) -> Envelope {
        let any = Any {
            value: number.to_le_bytes().to_vec(),
            ..Default::default()
        };
        Envelope {
            topic: topic.to_owned(),
            event: MessageField::some(any),
            ..Default::default()
        }
    }

    async fn topics_and_numbers(queue: &TaskEvents) -> Vec<(String, usize)> {
        let mut all = Vec::new();
        while queue.waiting() > 0 {
            let event = queue.next().await;
            all.push((
                event.topic,
                usize::from_le_bytes(event.event.value[..].try_into().unwrap()),
            ));
        }
        all
    }

    /// Issue 14: a containerd that is down for long must cost only a bounded amount of memory.
    #[tokio::test]
    async fn the_oldest_kills_are_dropped_first_and_then_the_oldest_events() {
        let queue = TaskEvents::default();
        queue.add(event(TASK_EXIT_EVENT_TOPIC, 0));
        (0..MAX_EVENTS * 2).for_each(|number| queue.add(event(TASK_OOM_EVENT_TOPIC, number)));
        queue.add(event(TASK_EXIT_EVENT_TOPIC, 1));
        let left = topics_and_numbers(&queue).await;
        assert_eq!(left.len(), MAX_EVENTS);
        assert_eq!(
            left[..2],
            [
                (TASK_EXIT_EVENT_TOPIC.to_owned(), 0),
                (TASK_OOM_EVENT_TOPIC.to_owned(), MAX_EVENTS + 2)
            ]
        );
        assert_eq!(left[MAX_EVENTS - 1], (TASK_EXIT_EVENT_TOPIC.to_owned(), 1));

        (0..MAX_EVENTS + 1).for_each(|number| queue.add(event(TASK_EXIT_EVENT_TOPIC, number)));
        assert_eq!(
            topics_and_numbers(&queue).await[0],
            (TASK_EXIT_EVENT_TOPIC.to_owned(), 1)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_event_that_is_being_sent_is_waited_for() {
        let events = TaskEvents::publish_to("/nonexistent".into(), "n".into());
        let begin = tokio::time::Instant::now();
        events.flush(ANSWER_LIMIT).await;
        assert_eq!(begin.elapsed(), Duration::ZERO);
        events.add(event(TASK_EXIT_EVENT_TOPIC, 0));
        sleep(FIRST_PAUSE).await;
        assert_eq!(events.waiting(), 0);
        events.flush(ANSWER_LIMIT).await;
        assert!(begin.elapsed() >= ANSWER_LIMIT);
    }

    #[tokio::test]
    async fn a_waiting_consumer_is_woken() {
        let queue = TaskEvents::default();
        let waiting = queue.clone();
        let next = tokio::spawn(async move { waiting.next().await });
        tokio::task::yield_now().await;
        queue.add(event(TASK_EXIT_EVENT_TOPIC, 7));
        assert_eq!(next.await.unwrap().topic, TASK_EXIT_EVENT_TOPIC);
    }
}
