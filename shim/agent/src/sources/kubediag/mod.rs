//! The four subpath processors of kubediag v0.3.1, over HTTP.
//!
//! ```text
//! podDetailCollector ─► mountInfoCollector ─► subpathRemountDiagnoser ─► subpathRemountRecover
//! ```
//!
//! kubediag's executor posts a JSON object of strings: the parameters of the diagnosis and the
//! results so far. An answer of 200 with such an object is a result. 422 means disabled, 405 not a
//! POST, 500 a failure. Keys and results are kubediag's. Unlike kubediag's, this recoverer re-binds
//! instead of only unmounting, and accepts only a stale volume-subpath.

mod contract;
mod diagnoser;
mod pod_detail;
mod recoverer;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Duration, timeout};

use self::contract::{MAX_BYTES, MOUNT_INFO, POD_DETAIL, Processor, RECOVERY, TARGET};
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;

pub use self::contract::FOLDER;
pub use self::pod_detail::PodReader;

/// Limit of a request: it has the results of both collectors, each no longer than an answer.
const MAX_POSTED: usize = 2 * MAX_BYTES;

/// Limit of processors at a time: a request is in memory more than once while it is parsed.
const MAX_PROCESSORS: usize = 1;

/// Time limit for the body of a request: meanwhile further requests wait. kubediag runs on the same
/// node and has the whole body at hand. Clients that never end their bodies, on all connections,
/// must not outlast [`TURN_TIMEOUT`].
const BODY_TIMEOUT: Duration = Duration::from_millis(900);

/// Time limit of a request for its turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(30);

/// A JSON object of strings.
type Strings = BTreeMap<String, String>;

/// Answers requests.
#[derive(Debug)]
pub struct Kubediag {
    is_enabled: bool,
    policy: Policy,
    places: Places,
    pods: PodReader,
    metrics: Arc<Metrics>,
    reporting: Reporting,
    working: Arc<Semaphore>,
}

/// Why a processor has no result.
#[derive(Debug, thiserror::Error)]
enum NoResult {
    #[error("the request ended early, or is longer than {} bytes", MAX_POSTED)]
    Body(#[source] Box<dyn Error + Send + Sync>),
    #[error("parse the request: expected a JSON object of strings")]
    NoStrings(#[source] serde_json::Error),
    #[error("the request has no {0}")]
    Missing(&'static str),
    #[error("read the pod")]
    Pod(#[from] pod_detail::NoPod),
    #[error("read the mount table")]
    MountInfo(#[source] std::io::Error),
    #[error("diagnose the pod")]
    Diagnosis(#[from] diagnoser::NotDiagnosed),
    #[error("repair the subpath")]
    Recovery(#[from] recoverer::NotRecovered),
    #[error("write the result as JSON")]
    Json(#[source] serde_json::Error),
    #[error("the result has {0} bytes, and kubediag accepts {MAX_BYTES}")]
    TooLong(usize),
    #[error("the request has no end after {} ms", BODY_TIMEOUT.as_millis())]
    NoEnd,
    #[error("other requests are processed")]
    Busy,
    #[error("the agent ends")]
    Ends,
}

impl Kubediag {
    /// The processors of this node, which the config may disable.
    pub fn new(
        config: &Config,
        pods: PodReader,
        metrics: Arc<Metrics>,
        reporting: Reporting,
    ) -> Arc<Self> {
        let (is_enabled, working) = (
            config.agent().kubediag.is_some(),
            Arc::new(Semaphore::new(MAX_PROCESSORS)),
        );
        let (policy, places) = (*config.policy(), config.places().clone());
        Arc::new(Self {
            is_enabled,
            policy,
            places,
            pods,
            metrics,
            reporting,
            working,
        })
    }

    /// The status and the text of the answer; `None` if kubediag has no such processor.
    pub async fn answer(
        self: &Arc<Self>,
        request: Request<Incoming>,
    ) -> Option<(StatusCode, String)> {
        let processor = Processor::of_path(request.uri().path())?;
        if !self.is_enabled {
            let text = format!(
                "{} is disabled: set enabled = true in [agent.kubediag]\n",
                processor.name()
            );
            return Some((StatusCode::UNPROCESSABLE_ENTITY, text));
        }
        if request.method() != Method::POST {
            let text = format!("method {} is not supported\n", request.method());
            return Some((StatusCode::METHOD_NOT_ALLOWED, text));
        }
        Some(match self.result(processor, request.into_body()).await {
            Ok(json) => (StatusCode::OK, json),
            Err(error) => (
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("{}\n", error_chain(&error)),
            ),
        })
    }

    async fn result(
        self: &Arc<Self>,
        processor: Processor,
        body: Incoming,
    ) -> Result<String, NoResult> {
        let (turn, posted) = self.body(body).await?;
        let result = match processor {
            Processor::PodDetailCollector => self.pods.detail(&parse(&posted)?).await?,
            Processor::MountInfoCollector => self.blocking(turn, |_| mount_info()).await?,
            Processor::SubpathRemountDiagnoser => {
                let posted = parse(&posted)?;
                diagnoser::diagnose(value(&posted, POD_DETAIL)?, value(&posted, MOUNT_INFO)?)?
                    .into()
            }
            Processor::SubpathRemountRecover => {
                let posted = parse(&posted)?;
                let target = value(&posted, TARGET)?.to_owned();
                self.blocking(turn, move |this| this.recover(&target))
                    .await?
            }
        };
        let json = serde_json::to_string(&result).map_err(NoResult::Json)?;
        if json.len() > MAX_BYTES {
            Err(NoResult::TooLong(json.len()))
        } else {
            Ok(json)
        }
    }

    /// The turn and the whole body of a request.
    async fn body<B>(&self, body: B) -> Result<(OwnedSemaphorePermit, Bytes), NoResult>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>,
    {
        let turn = self.turn().await?;
        Ok((turn, posted(body).await?))
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit, NoResult> {
        let turn = Arc::clone(&self.working).acquire_owned();
        let turn = timeout(TURN_TIMEOUT, turn).await;
        turn.map_err(|_| NoResult::Busy)?
            .map_err(|_| NoResult::Ends)
    }

    /// Runs work that may wait for a filesystem. The turn ends with the work: the work goes on if
    /// the client hangs up.
    async fn blocking(
        self: &Arc<Self>,
        turn: OwnedSemaphorePermit,
        work: impl FnOnce(&Self) -> Result<Strings, NoResult> + Send + 'static,
    ) -> Result<Strings, NoResult> {
        let this = Arc::clone(self);
        let work = move || {
            let result = work(&this);
            drop(turn);
            result
        };
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|_| NoResult::Ends)?
    }

    fn recover(&self, target: &str) -> Result<Strings, NoResult> {
        let line = recoverer::recover(Path::new(target), &self.policy, &self.places)?;
        self.metrics.rebound(&line);
        self.reporting.journal.rebound(line);
        Ok(Strings::from([(
            RECOVERY.to_owned(),
            contract::recovered(target),
        )]))
    }
}

/// The whole body of a request.
async fn posted<B>(body: B) -> Result<Bytes, NoResult>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>,
{
    let collected = timeout(BODY_TIMEOUT, Limited::new(body, MAX_POSTED).collect()).await;
    Ok(collected
        .map_err(|_| NoResult::NoEnd)?
        .map_err(NoResult::Body)?
        .to_bytes())
}

fn parse(posted: &Bytes) -> Result<Strings, NoResult> {
    serde_json::from_slice(posted).map_err(NoResult::NoStrings)
}

fn value<'p>(posted: &'p Strings, key: &'static str) -> Result<&'p str, NoResult> {
    posted
        .get(key)
        .map(String::as_str)
        .filter(|value| !value.is_empty())
        .ok_or(NoResult::Missing(key))
}

/// The mount table of the agent's namespace, which is the runtime's. On most nodes that is
/// `/proc/1/mountinfo`.
fn mount_info() -> Result<Strings, NoResult> {
    let bytes = std::fs::read("/proc/thread-self/mountinfo").map_err(NoResult::MountInfo)?;
    let text = contract::short_mount_info(String::from_utf8_lossy(&bytes).into_owned());
    Ok(Strings::from([(MOUNT_INFO.to_owned(), text)]))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::convert::Infallible;
    use std::pin::Pin;
    use std::sync::mpsc::channel;
    use std::task::{Context, Poll};

    use http_body_util::Full;
    use hyper::body::Frame;

    use super::*;
    use crate::idle_memory::IdleMemory;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;

    /// A client that begins a body and sends nothing more.
    struct WithoutEnd;

    impl Body for WithoutEnd {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    fn enabled() -> Arc<Kubediag> {
        let config = Config::from_toml("[agent.kubediag]\nenabled = true\n").unwrap();
        let metrics = Metrics::new();
        let reporting = Reporting {
            events: Events::off(Arc::clone(&metrics)),
            journal: JournalWriter::off(Arc::clone(&metrics)),
            memory: IdleMemory::default(),
        };
        let pods = PodReader::new(None, String::new());
        Kubediag::new(&config, pods, metrics, reporting)
    }

    /// A client posts, hangs up, and posts again: each request would add a thread.
    #[tokio::test]
    async fn work_keeps_its_turn_when_the_client_hangs_up() {
        let kubediag = enabled();
        let (begins, begun) = channel();
        let (ends, end) = channel::<()>();
        let work = move |_: &Kubediag| {
            begins.send(()).unwrap();
            let _ = end.recv();
            Ok(Strings::new())
        };
        let turn = kubediag.turn().await.unwrap();
        let client = Arc::clone(&kubediag);
        let request = tokio::spawn(async move { client.blocking(turn, work).await });
        tokio::task::spawn_blocking(move || begun.recv().unwrap())
            .await
            .unwrap();
        request.abort();
        assert!(request.await.is_err_and(|error| error.is_cancelled()));
        assert!(kubediag.working.try_acquire().is_err());
        drop(ends);
        drop(kubediag.turn().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_without_an_end_ends() {
        assert!(matches!(posted(WithoutEnd).await, Err(NoResult::NoEnd)));
    }

    /// A listener has at most 32 connections (`http/connections.rs`), and 31 clients were first.
    #[tokio::test(start_paused = true)]
    async fn bodies_without_end_do_not_outlast_a_request() {
        let kubediag = enabled();
        for _ in 1..32 {
            let client = Arc::clone(&kubediag);
            tokio::spawn(async move { client.body(WithoutEnd).await.map(drop) });
        }
        tokio::task::yield_now().await;
        assert!(kubediag.working.try_acquire().is_err());
        let answered = kubediag.body(Full::new(Bytes::from("{}"))).await;
        assert!(answered.is_ok(), "{answered:?}");
    }

    #[tokio::test]
    async fn a_body_has_room_for_two_results_and_no_more() {
        let of = |length: usize| posted(Full::new(Bytes::from(vec![b' '; length])));
        assert_eq!(of(2 * MAX_BYTES).await.unwrap().len(), 2 * MAX_BYTES);
        assert!(matches!(
            of(2 * MAX_BYTES + 1).await,
            Err(NoResult::Body(_))
        ));
    }
}
