//! The events that containerd has not received yet, in order.
//!
//! The queue is bounded: while containerd is down, a container with repeated out-of-memory kills
//! makes events all the time. Beyond the bound the oldest report of such a kill is dropped or,
//! without one, the oldest event. A containerd that returns queries states and exits itself.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::topics::TASK_OOM_EVENT_TOPIC;
use tokio::sync::{Notify, oneshot};

use super::Queued;

/// The number of events that Go's shim keeps for a retry.
const MAX_EVENTS: usize = 2048;

/// An entry of the queue.
#[derive(Debug)]
pub(super) enum Item {
    Event(Queued),
    /// Answered when all earlier events have been sent.
    Flush(oneshot::Sender<()>),
}

/// The queue, shared by the senders and the publishing task.
#[derive(Debug, Default)]
pub(super) struct Queue {
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
    pub(super) fn add(&self, item: Item) {
        let mut items = self.items();
        if items.waiting.len() >= MAX_EVENTS {
            items.drop_one();
        }
        items.waiting.push_back(item);
        drop(items);
        self.added.notify_one();
    }

    /// Waits for the next item.
    pub(super) async fn next(self: &Arc<Self>) -> Item {
        loop {
            let added = self.added.notified();
            if let Some(item) = self.items().take() {
                return item;
            }
            added.await;
        }
    }

    /// The number of queued items.
    pub(super) fn len(&self) -> usize {
        self.items().waiting.len()
    }

    fn items(&self) -> MutexGuard<'_, Items> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
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
        let oldest = self
            .waiting
            .iter()
            .position(is_kill)
            .or_else(|| self.waiting.iter().position(is_event));
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use containerd_shim_protos::topics::TASK_EXIT_EVENT_TOPIC;

    use super::*;

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
