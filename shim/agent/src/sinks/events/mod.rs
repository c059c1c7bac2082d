//! Kubernetes events on the pods of this node.
//!
//! ```text
//! journal ─────┐
//! re-binds ────┼─► Events ─► recorder: names of the pod ─► objects ─► pace of the node ─► API server
//! refreshes ───┤   never     (CRI, cached)                (counted)                       create, patch
//! survey ──────┘   waits
//! ```
//!
//! Threads hand over occurrences and go on: an API server that is slow, down or hostile costs
//! events, and nothing else.

mod from_reports;
mod objects;
mod recorder;

use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use bindguard_config::EventMode;
use bindguard_core::identity::PodName;
use serde::Serialize;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::say_once::SayOnce;
use crate::sinks::metrics::{EventResult, Metrics};

pub use crate::sinks::events::from_reports::{
    from_ignored_request, from_journal, from_keeper, from_rebind, from_refresh, from_survey,
};
pub use crate::sinks::events::objects::Event;
pub use crate::sinks::events::recorder::{EventApi, EventWriteError, Recorder};

/// The limit of occurrences that wait for the recorder.
const WAITING: usize = 256;

/// Takes occurrences, from any thread.
#[derive(Debug, Clone)]
pub struct Events {
    /// `None` if no events are written.
    recorder: Option<Sender<Occurrence>>,
    mode: EventMode,
    metrics: Arc<Metrics>,
}

impl Events {
    /// Takes occurrences and drops them.
    pub fn off(metrics: Arc<Metrics>) -> Self {
        Self {
            recorder: None,
            mode: EventMode::Off,
            metrics,
        }
    }

    /// Both ends: the threads' and the recorder's.
    pub fn on(mode: EventMode, metrics: Arc<Metrics>) -> (Self, Receiver<Occurrence>) {
        let (recorder, occurrences) = channel(WAITING);
        let events = Self {
            recorder: Some(recorder),
            mode,
            metrics,
        };
        (events, occurrences)
    }

    /// True if an occurrence can become an event.
    pub fn are_on(&self) -> bool {
        self.recorder.is_some()
    }

    /// Hands over occurrences. It never waits.
    pub fn record(&self, occurrences: impl IntoIterator<Item = Occurrence>) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        for occurrence in occurrences {
            let is_wanted = match self.mode {
                EventMode::Off => false,
                EventMode::Warnings => occurrence.reason.event_type() == EventType::Warning,
                EventMode::All => true,
            };
            if is_wanted && recorder.try_send(occurrence).is_err() {
                self.metrics.events.add(EventResult::queue_full, 1);
            }
        }
    }
}

// An occurrence that is worth an event on a pod.

/// The reason of an event: `reason` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Reason {
    /// A bind mount was repaired before a create, or by the agent.
    BindMountRepaired,
    /// Policy refused the container.
    ContainerRefused,
    /// A bind mount is stale and stays so.
    BindMountNotRepaired,
    /// The file server or FUSE daemon of a volume does not answer.
    BindSourceDead,
    /// A volume that must be mounted is not.
    VolumeNotMounted,
    /// A container keeps the host's mounts alive.
    HostMountsPinned,
    /// The kubelet will remove files of the host with the pod, or cannot delete the pod.
    MountBelowEmptyDir,
    /// The runtime mounted something else than the spec says.
    BindMountWrong,
    /// A running container got the current file.
    BindMountRefreshed,
    /// A running container still shows an old file.
    BindMountNotRefreshed,
    /// A running container got the current file, and its application does not know.
    ApplicationNotNotified,
    /// An annotation for live refresh has no effect.
    RefreshRequestIgnored,
}

/// The type of an event: `type` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum EventType {
    /// Nothing is wrong any more.
    Normal,
    /// Something is.
    Warning,
}

impl Reason {
    /// The type of the event. True for what is over, false for a state: an event with an equal message
    /// later is a new occurrence.
    fn properties(self) -> (EventType, bool) {
        match self {
            Self::BindMountRepaired | Self::BindMountRefreshed => (EventType::Normal, true),
            Self::BindMountWrong | Self::ApplicationNotNotified | Self::ContainerRefused => {
                (EventType::Warning, true)
            }
            Self::BindMountNotRepaired
            | Self::BindSourceDead
            | Self::VolumeNotMounted
            | Self::HostMountsPinned
            | Self::BindMountNotRefreshed
            | Self::RefreshRequestIgnored
            | Self::MountBelowEmptyDir => (EventType::Warning, false),
        }
    }

    pub fn event_type(self) -> EventType {
        self.properties().0
    }
}

/// An occurrence on a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurrence {
    /// The pod, at least by its uid.
    pub pod: PodName,
    /// The container's name in the pod.
    pub container: Option<String>,
    pub reason: Reason,
    /// One or two sentences for the pod's owner.
    pub message: String,
}

/// The time since 1970, and a time that no step of the clock changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// For the API's objects.
    pub since_epoch: Duration,
    /// For intervals.
    pub uptime: Duration,
}

/// The occurrences of each place at its last check. Each survey finds them again.
pub type Standing<K> = SayOnce<Occurrence, K>;

/// The occurrences that a place did not have before. An occurrence that is over is news each time.
pub fn news<K: Hash + Eq>(
    standing: &mut Standing<K>,
    place: K,
    mut occurrences: Vec<Occurrence>,
) -> Vec<Occurrence> {
    let mut states = occurrences.clone();
    states.retain(|occurrence| !occurrence.reason.properties().1);
    occurrences.retain(|occurrence| occurrence.reason.properties().1);
    occurrences.extend(standing.news(place, states));
    occurrences
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

#[cfg(test)]
mod standing_tests {
    use bindguard_core::identity::PodName;

    use super::*;
    use Reason;

    fn dead(message: &str) -> Occurrence {
        Occurrence {
            pod: PodName::of_uid("u"),
            container: None,
            reason: Reason::BindSourceDead,
            message: message.to_owned(),
        }
    }

    #[test]
    fn only_a_change_is_new() {
        let mut standing = Standing::default();
        assert_eq!(news(&mut standing, 1, vec![dead("a")]), [dead("a")]);
        assert_eq!(
            news(&mut standing, 1, vec![dead("a"), dead("b")]),
            [dead("b")]
        );
        assert_eq!(news(&mut standing, 2, vec![dead("a")]), [dead("a")]);
        assert_eq!(news(&mut standing, 1, vec![dead("b")]), []);
        assert_eq!(
            news(&mut standing, 1, vec![dead("a")]),
            [dead("a")],
            "it was gone in between"
        );
        let repaired = Occurrence {
            reason: Reason::BindMountRepaired,
            ..dead("r")
        };
        assert!(
            (0..2).all(|_| news(&mut standing, 3, vec![repaired.clone()]).len() == 1),
            "a repair is new each time"
        );
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
