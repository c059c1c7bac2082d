//! Writes the state to the agent's own pod: at most once a minute, and only if it changed.

use std::env;
use std::future::Future;
use std::time::Duration;

use bindguard_operator::guarded_runtimes::GuardedRuntimes;
use serde_json::json;
use tokio::sync::watch::Receiver;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use super::{Annotations, NodeState};
use crate::idle_memory::IdleMemory;
use crate::kubernetes::{ApiClient, ApiError};
use crate::pods::Cri;

const INTERVAL: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Time limit of one request, its connection included.
const PATIENCE: Duration = Duration::from_secs(10);

/// Sets annotations of one pod. The agent patches its own, tests count.
pub trait AnnotationApi {
    /// Sets them; others stay.
    fn annotate(
        &mut self,
        annotations: &Annotations,
    ) -> impl Future<Output = Result<(), ApiError>> + Send;
}

/// The pod of this process.
pub struct OwnPod {
    client: ApiClient,
    namespace: String,
    name: String,
}

impl OwnPod {
    /// The pod that the environment names. `None` without `POD_NAMESPACE` and `POD_NAME`.
    pub fn of_environment(client: ApiClient) -> Option<Self> {
        let named = |variable| {
            env::var(variable)
                .ok()
                .filter(|value: &String| !value.is_empty())
        };
        Some(Self {
            client,
            namespace: named("POD_NAMESPACE")?,
            name: named("POD_NAME")?,
        })
    }

    async fn patch(&mut self, annotations: &Annotations) -> Result<(), ApiError> {
        let path = format!("/api/v1/namespaces/{}/pods/{}", self.namespace, self.name);
        let patched = self
            .client
            .patch(
                &path,
                &json!({ "metadata": { "annotations": annotations } }),
            )
            .await;
        // The next one follows in a minute or much later.
        self.client.disconnect();
        patched.map(drop)
    }
}

impl AnnotationApi for OwnPod {
    async fn annotate(&mut self, annotations: &Annotations) -> Result<(), ApiError> {
        self.patch(annotations).await
    }
}

/// Publishes annotations.
pub struct Publisher<A> {
    api: A,
    published: Option<Annotations>,
    earliest: Instant,
    failures: u32,
}

impl<A: AnnotationApi> Publisher<A> {
    /// A publisher that has published nothing. Its first request comes within a minute: many nodes
    /// start at the same time.
    pub fn new(api: A) -> Self {
        let earliest = Instant::now() + INTERVAL.mul_f64(fastrand::f64());
        Self {
            api,
            published: None,
            earliest,
            failures: 0,
        }
    }

    /// Publishes each state with the guarded runtimes at that time, until no state can come any
    /// more.
    pub async fn run(mut self, mut states: Receiver<NodeState>, cri: Cri, memory: IdleMemory) {
        while states.changed().await.is_ok() {
            sleep_until(self.earliest).await;
            loop {
                let state = states.borrow_and_update().clone();
                let guarded = guarded_runtimes(&cri).await;
                let is_done = self.publish(state.annotations(guarded.as_ref())).await;
                memory.worked();
                if is_done {
                    break;
                }
                sleep_until(self.earliest).await;
            }
        }
    }

    /// Publishes what changed, and decides when the next request may follow. False if it has to be
    /// tried again.
    pub async fn publish(&mut self, annotations: Annotations) -> bool {
        if self.published.as_ref() == Some(&annotations) {
            return true;
        }
        let written = timeout(PATIENCE, self.api.annotate(&annotations)).await;
        let why = match written {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.for_people()),
            Err(_) => Some(format!("no answer within {PATIENCE:?}")),
        };
        match why {
            None => {
                if self.failures > 0 {
                    info!("the node's state is published again");
                }
                self.failures = 0;
                self.earliest = Instant::now() + INTERVAL;
                self.published = Some(annotations);
                true
            }
            Some(why) => {
                if self.failures == 0 {
                    warn!(
                        "annotate the own pod: {why}; trying again, with pauses of up to 10 minutes"
                    );
                }
                let pause = INTERVAL
                    .saturating_mul(1 << self.failures.min(5))
                    .min(LONGEST_PAUSE);
                self.failures = self.failures.saturating_add(1);
                self.earliest = Instant::now() + pause.mul_f64(1.0 + fastrand::f64() / 4.0);
                false
            }
        }
    }

    /// The time of the next request, at the earliest.
    pub fn earliest(&self) -> Instant {
        self.earliest
    }
}

/// The runtimes of containerd that call the guard. `None` if it does not answer, or another runtime
/// does.
async fn guarded_runtimes(cri: &Cri) -> Option<GuardedRuntimes> {
    let config = cri.config().await.ok()??;
    config
        .is_object()
        .then(|| GuardedRuntimes::of_containerd(&config))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use tokio::time::sleep;

    use super::super::StateSink;
    use super::*;
    use crate::kubernetes::AccessError;

    #[derive(Clone, Default)]
    struct Server(Arc<Mutex<Seen>>);

    #[derive(Default)]
    struct Seen {
        requests: Vec<Instant>,
        fails: bool,
    }

    impl AnnotationApi for Server {
        async fn annotate(&mut self, _: &Annotations) -> Result<(), ApiError> {
            let mut seen = self.0.lock().unwrap();
            seen.requests.push(Instant::now());
            if seen.fails {
                Err(AccessError::None.into())
            } else {
                Ok(())
            }
        }
    }

    impl Server {
        fn start(&self) -> StateSink {
            let (sink, states) = StateSink::on();
            let cri = Cri::of(Path::new("/nowhere.sock"));
            tokio::spawn(Publisher::new(self.clone()).run(states, cri, IdleMemory::default()));
            sink
        }

        fn requests(&self) -> Vec<Instant> {
            self.0.lock().unwrap().requests.clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn at_most_once_a_minute_and_only_if_it_changed() {
        let server = Server::default();
        let sink = server.start();
        let report = bindguard_operator::node_report::NodeReport::default();
        sink.surveyed(&report);
        sleep(Duration::from_secs(61)).await;
        assert_eq!(server.requests().len(), 1);
        for _ in 0..600 {
            sink.surveyed(&report);
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(server.requests().len(), 1, "nothing changed");
        for second in 0..600 {
            let sender = sink.0.as_ref().unwrap();
            sender.send_modify(|state| state.last_repair = Some(second));
            sleep(Duration::from_secs(1)).await;
        }
        let requests = server.requests();
        assert!(
            (10..=12).contains(&requests.len()),
            "{} requests in ten minutes",
            requests.len()
        );
        assert!(
            requests
                .windows(2)
                .all(|pair| pair[1] - pair[0] >= INTERVAL)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_hour_of_failures_costs_few_requests_and_the_state_arrives_afterwards() {
        let server = Server::default();
        server.0.lock().unwrap().fails = true;
        let sink = server.start();
        sink.repaired();
        sleep(Duration::from_secs(3600)).await;
        let during = server.requests().len();
        assert!((4..=12).contains(&during), "{during} requests");
        server.0.lock().unwrap().fails = false;
        sleep(Duration::from_secs(900)).await;
        assert_eq!(server.requests().len(), during + 1);
    }
}
