//! The task that turns occurrences into requests to the API server, within the node's bound.
//!
//! In a pod the credentials are those of its service account, else those of a kubeconfig. The agent
//! writes events and patches its own pod. It watches nothing, and reads a pod only for kubediag's
//! processors.

use std::collections::HashSet;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use bindguard_config::KubernetesConfig;
use bindguard_core::error_chain;
use bindguard_core::text::cut;
use bindguard_kubernetes::{Access, ApiClient, ApiError, node_name};
use lru::LruCache;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::limits::{Backoff, IdleMemory, since_epoch, time_of};
use crate::pods::PodLookup;
use crate::sinks::events::{EventType, Occurrence, Reason};
use crate::sinks::metrics::{EventResult, Metrics, Total, TotalBy};

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
trait EventApi {
    /// Creates the event's object, or updates it if it exists. Returns the object's count.
    fn write(&mut self, event: &Event)
    -> impl Future<Output = Result<u32, EventWriteError>> + Send;

    /// Closes the connection. The next request connects again.
    fn disconnect(&mut self);
}

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
enum EventWriteError {
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
struct Recorder<A> {
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
    fn new(api: A, pods: &'static PodLookup, per_minute: u32, metrics: &'static Metrics) -> Self {
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
    async fn run(mut self, mut occurrences: Receiver<Occurrence>) {
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
        let written = self.api.write(&event).await;
        if let Ok(_) | Err(EventWriteError::Gone | EventWriteError::Refused(_)) = written {
            self.pace.answered();
        }
        match written {
            Ok(count) => {
                self.objects.written(&event, count);
                self.count(EventResult::Written, 1);
                if self.failing.take().is_some() {
                    info!("events are written again");
                }
            }
            Err(EventWriteError::Gone) => self.objects.gone(&event.key),
            Err(error @ EventWriteError::Refused(_)) => {
                self.objects.settle(&event.key);
                self.count(EventResult::Refused, 1);
                // Each reason once, and a bounded number of them.
                if self.refused.len() < 16 && self.refused.insert(error.to_string()) {
                    let EventKey { namespace, pod, .. } = &event.key;
                    warn!("an event on pod {namespace}/{pod} is lost: {error}");
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

// The event objects of this node's pods: plain data, with the time passed in.
//
// ```text
// occurrence ─► object of its container and reason: count, last time, last message ─► waits for a request
// ```
//
// A container that has the same trouble with ten files is one object with a count of ten and the
// newest message; `bindguard diagnose` names every file.

/// The time since 1970, and a time that no step of the clock changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moment {
    /// For the API's objects.
    since_epoch: Duration,
    /// For intervals.
    uptime: Duration,
}

/// The limit of objects. A node has some hundred pods. Beyond the limit, the object that had no
/// occurrence for the longest time is forgotten.
const MAX_OBJECTS: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The limit of a message in bytes: the API's.
const MAX_MESSAGE: usize = 1000;

/// The time without a further occurrence after which an event is no news any more.
const EXPIRY: Duration = Duration::from_secs(600);

/// Occurrences with the same key share an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct EventKey {
    /// The namespace of the pod.
    namespace: String,
    pod: String,
    pod_uid: String,
    container: Option<String>,
    reason: Reason,
}

/// An event as the API server is to have it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Event {
    /// The key of its object.
    key: EventKey,
    /// The name of its object.
    name: String,
    /// The message of the last occurrence.
    message: String,
    /// The number of occurrences.
    count: u32,
    /// The time of the first occurrence, since 1970.
    first: Duration,
    /// The time of the last occurrence, since 1970.
    last: Duration,
    /// True if the API server has the object.
    exists: bool,
    /// The uptime at the last occurrence.
    last_uptime: Duration,
    /// The uptime since which the API server lacks the newest state.
    waits_since: Option<Duration>,
}

/// All objects that had an occurrence lately.
#[derive(Debug)]
struct EventObjects(LruCache<EventKey, Event>);

impl Default for EventObjects {
    fn default() -> Self {
        Self(LruCache::new(MAX_OBJECTS))
    }
}

impl EventObjects {
    /// Counts an occurrence. Returns true if a waiting event was forgotten to make room.
    fn add(&mut self, key: EventKey, message: &str, now: Moment) -> bool {
        let message = cut(message, MAX_MESSAGE).into_owned();
        if let Some(event) = self.0.get_mut(&key) {
            event.count = event.count.saturating_add(1);
            (event.message, event.last) = (message, now.since_epoch);
            event.last_uptime = now.uptime;
            event.waits_since.get_or_insert(now.uptime);
            return false;
        }
        let event = Event {
            key: key.clone(),
            name: name(&key),
            message,
            count: 1,
            first: now.since_epoch,
            last: now.since_epoch,
            exists: false,
            last_uptime: now.uptime,
            waits_since: Some(now.uptime),
        };
        let forgotten = self.0.push(key, event);
        forgotten.is_some_and(|(_, event)| event.waits_since.is_some())
    }

    /// True if the API server lacks the newest state of an object.
    fn is_any_waiting(&self) -> bool {
        let mut events = self.0.iter();
        events.any(|(_, event)| event.waits_since.is_some())
    }

    /// The event to write next: warnings first, then the event that has waited longest.
    fn next(&self) -> Option<Event> {
        let events = self.0.iter().map(|(_, event)| event);
        let waiting = events.filter(|event| event.waits_since.is_some());
        let next = waiting.min_by_key(|event| {
            let is_normal = event.key.reason.event_type() == EventType::Normal;
            (is_normal, event.waits_since)
        });
        next.cloned()
    }

    /// Notes that an event waits no longer: the API server refuses it.
    fn settle(&mut self, key: &EventKey) {
        if let Some(event) = self.0.peek_mut(key) {
            event.waits_since = None;
        }
    }

    /// Notes that the API server has the object of an event, with this count. The count goes on from
    /// that of an earlier start of the agent.
    fn written(&mut self, written: &Event, count: u32) {
        if let Some(event) = self.0.peek_mut(&written.key) {
            event.exists = true;
            if count >= written.count {
                event.count = event.count.saturating_add(count - written.count);
                event.waits_since = None;
            }
        }
    }

    /// Notes that the API server lacks the object of an event.
    fn gone(&mut self, key: &EventKey) {
        if let Some(event) = self.0.peek_mut(key) {
            event.exists = false;
        }
    }

    /// Drops waiting events that are no news any more, and returns their number.
    fn expire(&mut self, now: Duration) -> usize {
        let mut expired = 0;
        for (_, event) in self.0.iter_mut() {
            let is_old = now.saturating_sub(event.last_uptime) > EXPIRY;
            if is_old && event.waits_since.take().is_some() {
                expired += 1;
            }
        }
        expired
    }
}

/// Every start of the agent finds the same name.
fn name(key: &EventKey) -> String {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    format!("{}.{:016x}", key.pod, hasher.finish())
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
struct Pace {
    interval: Duration,
    earliest: Duration,
    backoff: Backoff,
}

impl Pace {
    /// A pace for this number of requests in a minute.
    fn new(per_minute: u32) -> Self {
        Self {
            interval: Duration::from_secs(60) / per_minute.max(1),
            earliest: Duration::ZERO,
            backoff: Backoff::new(FIRST_PAUSE, MAX_PAUSE),
        }
    }

    /// An event waits where none waited before.
    fn begin(&mut self, now: Duration, random: f64) {
        self.earliest = self.earliest.max(now + self.interval.mul_f64(random / 2.0));
    }

    /// The time until the next request may be sent.
    fn wait(&self, now: Duration) -> Duration {
        self.earliest.saturating_sub(now)
    }

    /// A request is sent, after the wait.
    fn requested(&mut self, now: Duration) {
        self.earliest = now + self.interval;
    }

    /// The API server answered it.
    fn answered(&mut self) {
        self.backoff.reset();
    }

    /// It did not, or demands a pause.
    fn failed(&mut self, now: Duration, requested_pause: Option<Duration>, random: f64) {
        let pause = self.backoff.after(Duration::ZERO);
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
    time_of(Duration::from_secs(since_epoch.as_secs()))
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
mod object_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use proptest::prelude::*;

    use super::*;

    fn key(uid: &str, reason: Reason) -> EventKey {
        EventKey {
            namespace: "default".to_owned(),
            pod: "web".to_owned(),
            pod_uid: uid.to_owned(),
            container: Some("app".to_owned()),
            reason,
        }
    }

    fn at(seconds: u64) -> Moment {
        let uptime = Duration::from_secs(seconds);
        Moment {
            since_epoch: uptime + Duration::from_secs(1_800_000_000),
            uptime,
        }
    }

    fn add(objects: &mut EventObjects, uid: &str, reason: Reason, message: &str, now: Moment) {
        objects.add(key(uid, reason), message, now);
    }

    /// Takes what waits, as a recorder whose requests all succeed.
    fn write_all(objects: &mut EventObjects) -> Vec<Event> {
        let written = std::iter::from_fn(|| {
            let event = objects.next()?;
            objects.written(&event, event.count);
            Some(event)
        });
        written.collect()
    }

    #[test]
    fn a_container_has_one_object_for_each_reason() {
        let mut objects = EventObjects::default();
        for number in 0..200 {
            let message = format!("file {number}");
            let now = at(number);
            add(&mut objects, "u", Reason::BindMountRefreshed, &message, now);
        }
        let written = write_all(&mut objects);
        assert_eq!((written.len(), written[0].count), (1, 200));
        assert_eq!(written[0].message, "file 199");
        assert_eq!(written[0].last - written[0].first, Duration::from_secs(199));
        add(
            &mut objects,
            "u",
            Reason::BindMountRefreshed,
            "again",
            at(200),
        );
        add(&mut objects, "u", Reason::BindSourceDead, "dead", at(201));
        add(
            &mut objects,
            "v",
            Reason::BindMountRefreshed,
            "other",
            at(202),
        );
        let later = write_all(&mut objects);
        let counts: Vec<_> = later
            .iter()
            .map(|event| (event.count, event.exists))
            .collect();
        assert_eq!(counts, [(1, false), (201, true), (1, false)]);
        assert_eq!(later[1].name, written[0].name);
    }

    #[test]
    fn an_object_of_an_earlier_start_is_counted_on() {
        let mut objects = EventObjects::default();
        add(&mut objects, "u", Reason::BindSourceDead, "m", at(0));
        let first = objects.next().unwrap();
        let mut objects = EventObjects::default();
        add(&mut objects, "v", Reason::BindSourceDead, "m", at(9));
        add(&mut objects, "u", Reason::BindSourceDead, "m", at(10));
        let other = objects.next().unwrap();
        objects.settle(&key("v", Reason::BindSourceDead));
        let again = objects.next().unwrap();
        assert_eq!(again.name, first.name);
        assert_ne!(other.name, first.name);
        objects.written(&again, 7);
        assert!(!objects.is_any_waiting());
        add(&mut objects, "u", Reason::BindSourceDead, "m", at(11));
        assert_eq!(objects.next().unwrap().count, 8);
        // The answer to the create was lost.
        objects.written(&objects.next().unwrap(), 1);
        assert!(objects.next().unwrap().exists && objects.next().unwrap().count == 8);
    }

    #[test]
    fn warnings_go_first_then_the_oldest() {
        let mut objects = EventObjects::default();
        for (seconds, (uid, reason)) in [
            ("a", Reason::BindMountRepaired),
            ("b", Reason::BindMountRepaired),
            ("c", Reason::BindSourceDead),
            ("a", Reason::BindMountRepaired),
        ]
        .into_iter()
        .enumerate()
        {
            add(&mut objects, uid, reason, "m", at(seconds as u64));
        }
        let pods = write_all(&mut objects)
            .into_iter()
            .map(|event| event.key.pod_uid);
        assert_eq!(pods.collect::<Vec<_>>(), ["c", "a", "b"]);
        assert!(!objects.is_any_waiting());
    }

    #[test]
    fn an_event_without_news_for_ten_minutes_is_dropped() {
        let mut objects = EventObjects::default();
        add(&mut objects, "old", Reason::BindSourceDead, "m", at(0));
        add(&mut objects, "new", Reason::BindSourceDead, "m", at(0));
        add(&mut objects, "new", Reason::BindSourceDead, "m", at(60));
        let at = Duration::from_secs;
        assert_eq!((objects.expire(at(600)), objects.expire(at(601))), (0, 1));
        assert_eq!(objects.next().unwrap().key.pod_uid, "new");
    }

    /// The wall clock steps back and forth by an hour. Only the time stamps follow it.
    #[test]
    fn a_step_of_the_wall_clock_changes_no_order() {
        let mut objects = EventObjects::default();
        for (uptime, (uid, since_epoch)) in [("a", 7200), ("b", 3600), ("c", 10_800)]
            .into_iter()
            .enumerate()
        {
            let now = Moment {
                since_epoch: Duration::from_secs(since_epoch),
                uptime: Duration::from_secs(uptime as u64),
            };
            add(&mut objects, uid, Reason::BindSourceDead, "m", now);
        }
        let written = write_all(&mut objects);
        let seen = written
            .iter()
            .map(|event| (event.key.pod_uid.as_str(), event.last.as_secs()));
        let expected = [("a", 7200), ("b", 3600), ("c", 10_800)];
        assert_eq!(seen.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_long_message_is_cut_to_what_the_api_accepts() {
        let (mut objects, long) = (EventObjects::default(), "x".repeat(5000));
        add(&mut objects, "u", Reason::BindSourceDead, &long, at(0));
        assert!(objects.next().unwrap().message.len() <= 1024);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// No occurrence is lost or counted twice as long as its object is remembered, and no more
        /// objects are remembered than the limit.
        #[test]
        fn all_occurrences_are_counted(uids in prop::collection::vec(0_u32..600, 1..3000)) {
            let (mut objects, mut lost) = (EventObjects::default(), 0);
            for (seconds, uid) in uids.iter().enumerate() {
                let key = key(&uid.to_string(), Reason::BindSourceDead);
                let forgot = objects.add(key, "", at(seconds as u64));
                lost += usize::from(forgot);
            }
            let written = write_all(&mut objects);
            prop_assert!(written.len() <= MAX_OBJECTS.get());
            let counted: usize = written.iter().map(|event| event.count as usize).sum();
            prop_assert!(counted <= uids.len() && (lost > 0 || counted == uids.len()));
        }
    }
}

#[cfg(test)]
mod tests;
