//! The task that turns occurrences into requests to the API server, within the node's bound.
//!
//! In a pod the credentials are those of its service account, else those of a kubeconfig. The agent
//! writes events and patches its own pod. It watches nothing, and reads a pod only for kubediag's
//! processors.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bindguard_config::KubernetesConfig;
use bindguard_core::error_chain;
use bindguard_kubernetes::{Access, ApiClient, ApiError, node_name};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::pods::PodLookup;
use crate::sinks::events::{Event, EventKey, EventObjects, Moment, Occurrence};
use crate::sinks::metrics::{EventResult, Metrics, Total, TotalBy};
use crate::threads::{IdleMemory, since_epoch};

/// The limit of occurrences that wait for the recorder.
const WAITING: usize = 256;

/// The time without an event after which the connection is closed: an idle agent shall be small.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// Starts the recorder, which takes occurrences.
pub fn start(
    settings: &KubernetesConfig,
    access: Arc<Access>,
    pods: &'static PodLookup,
    metrics: &'static Metrics,
    memory: IdleMemory,
) -> Sender<Occurrence> {
    let api = ApiEvents {
        client: ApiClient::new(access),
        node: node_name(settings.node.as_deref()),
        memory,
    };
    let (sender, occurrences) = channel(WAITING);
    let recorder = Recorder::new(api, pods, settings.event_requests, metrics);
    tokio::spawn(recorder.run(occurrences));
    sender
}

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
    pods: &'static PodLookup,
    metrics: &'static Metrics,
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
    pub fn new(
        api: A,
        pods: &'static PodLookup,
        per_minute: u32,
        metrics: &'static Metrics,
    ) -> Self {
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

    fn count(&self, result: EventResult, number: usize) {
        self.metrics.count_by(TotalBy::Events, result, number);
    }

    fn now(&self) -> Moment {
        Moment {
            since_epoch: since_epoch(),
            uptime: self.started.elapsed(),
        }
    }

    async fn take(&mut self, occurrence: Occurrence) {
        let mut pod = occurrence.pod;
        let uid = pod.uid.take().unwrap_or_default();
        // `None` if it has no sandbox any more, or the CRI does not answer.
        if pod.names().is_none() {
            pod = self.pods.find_names(&uid).await.unwrap_or_default();
        }
        let (Some(namespace), Some(pod)) = (pod.namespace, pod.name) else {
            return self.count(EventResult::NoPod, 1);
        };
        let key = EventKey {
            namespace,
            pod,
            pod_uid: uid,
            container: occurrence.container,
            reason: occurrence.reason,
        };
        let now = self.now();
        if !self.objects.is_any_waiting() {
            self.pace.begin(now.uptime, fastrand::f64());
        }
        if self.objects.add(key, &occurrence.message, now) {
            self.count(EventResult::QueueFull, 1);
        }
    }

    /// Sends a request.
    async fn request(&mut self) {
        let now = self.now().uptime;
        let expired = self.objects.expire(now);
        self.count(EventResult::Expired, expired);
        let Some(event) = self.objects.next() else {
            return;
        };
        self.pace.requested(now);
        self.is_connected = true;
        match self.api.write(&event).await {
            Ok(count) => {
                self.pace.answered();
                self.objects.written(&event, count);
                self.count(EventResult::Written, 1);
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
                self.count(EventResult::Refused, 1);
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
                self.count(EventResult::Refused, 1);
                self.failed(None, &error);
            }
            Err(ref error @ EventWriteError::Unavailable { pause, .. }) => {
                self.failed(pause, error);
            }
        }
    }

    fn failed(&mut self, pause: Option<Duration>, error: &EventWriteError) {
        self.metrics[Total::EventRequestFailures].inc();
        self.pace.failed(self.now().uptime, pause, fastrand::f64());
        let text = error.to_string();
        if self.failing.as_ref() != Some(&text) {
            warn!("write an event: {text}; trying again, with pauses of up to 5 minutes");
            self.failing = Some(text);
        }
    }
}

// The bound on the requests of a node: plain data, with the time and random numbers passed in.
//
// | | with `requests-per-minute = 6` |
// |---|---|
// | the first request after a rest | after 0 to 5 s |
// | the next requests | every 10 s |
// | after a failure | 5 s, 10 s, ... 5 min, each times 0.5 to 1 |
//
// The random parts spread the requests of many nodes that notice the same thing at the same time.

const FIRST_PAUSE: Duration = Duration::from_secs(5);
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// Decides when the next request may be sent.
#[derive(Debug)]
pub struct Pace {
    interval: Duration,
    earliest: Duration,
    failures: u32,
}

impl Pace {
    /// A pace for this number of requests in a minute.
    pub fn new(per_minute: u32) -> Self {
        Self {
            interval: Duration::from_secs(60) / per_minute.max(1),
            earliest: Duration::ZERO,
            failures: 0,
        }
    }

    /// An event waits where none waited before.
    pub fn begin(&mut self, now: Duration, random: f64) {
        self.earliest = self.earliest.max(now + self.interval.mul_f64(random / 2.0));
    }

    /// The time until the next request may be sent.
    pub fn wait(&self, now: Duration) -> Duration {
        self.earliest.saturating_sub(now)
    }

    /// A request is sent, after the wait.
    pub fn requested(&mut self, now: Duration) {
        self.earliest = now + self.interval;
    }

    /// The API server answered it.
    pub fn answered(&mut self) {
        self.failures = 0;
    }

    /// It did not, or demands a pause.
    pub fn failed(&mut self, now: Duration, requested_pause: Option<Duration>, random: f64) {
        let pause = FIRST_PAUSE
            .saturating_mul(1 << self.failures.min(10))
            .min(MAX_PAUSE);
        self.failures = self.failures.saturating_add(1);
        let pause = pause.mul_f64((1.0 + random) / 2.0);
        let pause = pause.max(requested_pause.unwrap_or_default().min(MAX_PAUSE));
        self.earliest = self.earliest.max(now + pause);
    }
}

// Events as objects of the API: created once, then patched (`core/v1`, as the kubelet's recorder
// does).

const COMPONENT: &str = "bindguard-agent";

/// Writes events to the API server.
#[derive(Debug)]
struct ApiEvents {
    client: ApiClient,
    node: String,
    memory: IdleMemory,
}

impl EventApi for ApiEvents {
    async fn write(&mut self, event: &Event) -> Result<u32, EventWriteError> {
        let events = format!("/api/v1/namespaces/{}/events", event.key.namespace);
        let mut patch = json!({ "lastTimestamp": time(event.last), "message": event.message });
        if event.exists {
            patch["count"] = event.count.into();
        } else {
            let object = object(event, &self.node);
            match self.client.create(&events, &object).await {
                Ok(_) => return Ok(event.count),
                // An earlier start of the agent created the object.
                Err(ApiError::Status(status)) if status.code == 409 => {}
                Err(error) => return Err(failure(&error, false)),
            }
        }
        let place = format!("{events}/{}", event.name);
        let patched = self.client.patch(&place, &patch).await;
        let patched = patched.map_err(|error| failure(&error, true))?;
        let patched: Value = serde_json::from_str(&patched).unwrap_or_default();
        let count = patched["count"].as_u64().map(u32::try_from);
        Ok(count.and_then(Result::ok).unwrap_or(event.count))
    }

    fn disconnect(&mut self) {
        self.client.disconnect();
        self.memory.worked();
    }
}

fn object(event: &Event, node: &str) -> Value {
    let reason = event.key.reason;
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "name": event.name, "namespace": event.key.namespace },
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": event.key.namespace,
            "name": event.key.pod,
            "uid": event.key.pod_uid,
        },
        "type": reason.event_type(),
        "reason": reason,
        "message": event.message,
        "count": event.count,
        "firstTimestamp": time(event.first),
        "lastTimestamp": time(event.last),
        "source": { "component": COMPONENT, "host": node },
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    });
    if let Some(container) = &event.key.container {
        object["involvedObject"]["fieldPath"] = format!("spec.containers{{{container}}}").into();
    }
    object
}

/// The API's times have whole seconds.
fn time(since_epoch: Duration) -> Option<String> {
    let seconds = i64::try_from(since_epoch.as_secs()).ok()?;
    OffsetDateTime::from_unix_timestamp(seconds)
        .ok()?
        .format(&Rfc3339)
        .ok()
}

fn failure(error: &ApiError, was_patch: bool) -> EventWriteError {
    let why = error_chain(error);
    let ApiError::Status(status) = error else {
        return EventWriteError::Unavailable { why, pause: None };
    };
    let mut causes = status.details.causes.iter();
    let is_terminating = causes.any(|cause| cause.reason == "NamespaceTerminating");
    match status.code {
        404 if was_patch => EventWriteError::Gone,
        403 if is_terminating => EventWriteError::Refused(why),
        401 | 403 => EventWriteError::Forbidden(why),
        400..=428 | 430..=499 => EventWriteError::Refused(why),
        _ => {
            let seconds = status.details.retry_after_seconds;
            EventWriteError::Unavailable {
                why,
                pause: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
            }
        }
    }
}
#[cfg(test)]
mod pace_tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// The number of requests that a node which always has an event sends in an hour.
    fn requests_in_an_hour(fails: bool) -> u32 {
        let (mut pace, mut now, mut requests) = (Pace::new(6), Duration::ZERO, 0);
        pace.begin(now, 0.5);
        loop {
            now += pace.wait(now);
            if now >= HOUR {
                return requests;
            }
            pace.requested(now);
            requests += 1;
            match fails {
                true => pace.failed(now, None, 0.0),
                false => pace.answered(),
            }
        }
    }

    #[test]
    fn the_bound_is_kept() {
        assert_eq!(requests_in_an_hour(false), 360);
    }

    #[test]
    fn an_hour_without_an_api_server_costs_few_requests() {
        let requests = requests_in_an_hour(true);
        assert!((12..=32).contains(&requests), "{requests}");
    }

    #[test]
    fn a_requested_pause_is_kept_up_to_the_longest() {
        let mut pace = Pace::new(600);
        pace.failed(Duration::ZERO, Some(Duration::from_secs(60)), 0.0);
        assert_eq!(pace.wait(Duration::ZERO), Duration::from_secs(60));
        pace.failed(Duration::ZERO, Some(Duration::from_secs(100_000)), 0.0);
        assert_eq!(pace.wait(Duration::ZERO), MAX_PAUSE);
    }
}

#[cfg(test)]
mod tests;
