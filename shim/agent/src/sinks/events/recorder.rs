//! The task that turns occurrences into requests, within the node's bound.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bindguard_core::identity::PodName;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::objects::{Event, EventKey, EventObjects};
use crate::host::since_epoch;
use crate::pods::PodLookup;
use crate::sinks::events::Pace;
use crate::sinks::events::{Moment, Occurrence};
use crate::sinks::metrics::{EventResult, Metrics};

/// The time without an event after which the connection is closed: an idle agent shall be small.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// Writes events, each within a time limit. The agent writes to the API server, tests count.
pub trait EventApi {
    /// Creates the event's object, or updates it if it exists. Returns the object's count.
    fn write(&mut self, event: &Event)
    -> impl Future<Output = Result<u32, EventWriteError>> + Send;

    /// Closes the connection. The next request connects again.
    fn disconnect(&mut self);
}

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
pub enum EventWriteError {
    /// It was to be updated, and there is no such object any more.
    #[error("there is no such event")]
    Gone,
    /// The API server refuses this event.
    #[error("the API server refuses it: {0}")]
    Refused(String),
    /// The API server refuses all events, or the namespace of this event is full.
    #[error("not allowed: {0}; apply the Role for events, or set [agent.events] mode = \"off\"")]
    Forbidden(String),
    /// The API server does not answer, or demands a pause.
    #[error("no answer from the API server: {why}")]
    Unavailable {
        why: String,
        /// The pause that it demands.
        pause: Option<Duration>,
    },
}

/// Records occurrences.
pub struct Recorder<A> {
    api: A,
    pods: PodLookup,
    metrics: Arc<Metrics>,
    objects: EventObjects,
    pace: Pace,
    started: Instant,
    is_connected: bool,
    /// The failure that was logged last.
    failing: Option<String>,
    /// The refusals that were logged.
    refused: HashSet<String>,
}

impl<A: EventApi> Recorder<A> {
    /// A recorder that sends this number of requests in a minute, in the long run.
    pub fn new(api: A, pods: PodLookup, per_minute: u32, metrics: Arc<Metrics>) -> Self {
        Self {
            api,
            pods,
            metrics,
            objects: EventObjects::default(),
            pace: Pace::new(per_minute),
            started: Instant::now(),
            is_connected: false,
            failing: None,
            refused: HashSet::new(),
        }
    }

    /// Records until no occurrence can come any more.
    pub async fn run(mut self, mut occurrences: Receiver<Occurrence>) {
        loop {
            // Without an event and a connection there is nothing to wait for, and no wake-up.
            let pause = self
                .objects
                .is_any_waiting()
                .then(|| self.pace.wait(self.now().uptime));
            tokio::select! {
                biased;
                () = sleep(pause.unwrap_or_default()), if pause.is_some() => self.request().await,
                () = sleep(IDLE_TIMEOUT), if pause.is_none() && self.is_connected => {
                    self.is_connected = false;
                    self.api.disconnect();
                }
                occurrence = occurrences.recv() => match occurrence {
                    Some(occurrence) => self.take(occurrence).await,
                    None => return,
                },
            }
        }
    }

    fn now(&self) -> Moment {
        Moment {
            since_epoch: since_epoch(),
            uptime: self.started.elapsed(),
        }
    }

    async fn take(&mut self, occurrence: Occurrence) {
        let Some((namespace, pod)) = self.names_of(&occurrence.pod).await else {
            return self.metrics.events.add(EventResult::no_pod, 1);
        };
        let key = EventKey {
            namespace,
            pod,
            pod_uid: occurrence.pod.uid.unwrap_or_default(),
            container: occurrence.container,
            reason: occurrence.reason,
        };
        let now = self.now();
        if !self.objects.is_any_waiting() {
            self.pace.begin(now.uptime, fastrand::f64());
        }
        if self.objects.add(key, &occurrence.message, now) {
            self.metrics.events.add(EventResult::queue_full, 1);
        }
    }

    /// The namespace and the name of a pod. `None` if it has no sandbox any more, or the CRI does
    /// not answer.
    async fn names_of(&self, pod: &PodName) -> Option<(String, String)> {
        if let Some((namespace, name)) = pod.names() {
            return Some((namespace.to_owned(), name.to_owned()));
        }
        let found = self.pods.find_names(pod.uid.as_ref()?).await?;
        Some((found.namespace?, found.name?))
    }

    /// Sends a request.
    async fn request(&mut self) {
        let now = self.now().uptime;
        let expired = self.objects.expire(now);
        self.metrics.events.add(EventResult::expired, expired);
        let Some(event) = self.objects.next() else {
            return;
        };
        self.pace.requested(now);
        self.is_connected = true;
        match self.api.write(&event).await {
            Ok(count) => {
                self.pace.answered();
                self.objects.written(&event, count);
                self.metrics.events.add(EventResult::written, 1);
                if self.failing.take().is_some() {
                    info!("events are written again");
                }
            }
            Err(EventWriteError::Gone) => {
                self.pace.answered();
                self.objects.gone(&event.key);
            }
            Err(error @ EventWriteError::Refused(_)) => {
                self.pace.answered();
                self.objects.settle(&event.key);
                self.metrics.events.add(EventResult::refused, 1);
                // Each reason once, and a bounded number of them.
                if self.refused.len() < 16 && self.refused.insert(error.to_string()) {
                    warn!(
                        "an event on pod {}/{} is lost: {error}",
                        event.key.namespace, event.key.pod
                    );
                }
            }
            Err(error @ EventWriteError::Forbidden(_)) => {
                self.objects.settle(&event.key);
                self.metrics.events.add(EventResult::refused, 1);
                self.failed(None, &error);
            }
            Err(ref error @ EventWriteError::Unavailable { pause, .. }) => {
                self.failed(pause, error);
            }
        }
    }

    fn failed(&mut self, pause: Option<Duration>, error: &EventWriteError) {
        self.metrics.event_failures.inc();
        self.pace.failed(self.now().uptime, pause, fastrand::f64());
        let text = error.to_string();
        if self.failing.as_ref() != Some(&text) {
            warn!("write an event: {text}; trying again, with pauses of up to 5 minutes");
            self.failing = Some(text);
        }
    }
}

#[cfg(test)]
mod tests;
