//! The four subpath processors of kubediag v0.3.1, over HTTP.
//!
//! ```text
//! podDetailCollector ─► mountInfoCollector ─► subpathRemountDiagnoser ─► subpathRemountRecover
//! ```
//!
//! kubediag's executor posts a JSON object of strings: the parameters of the diagnosis and the results so far. An answer of 200
//! with such an object is a result. 422 means disabled, 405 another method, 500 a failure. Keys and results are kubediag's own.
//! The recoverer is not: it re-binds instead of only unmounting, and accepts nothing but a stale volume-subpath.

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
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use tokio::sync::Semaphore;

use self::contract::{MOST_BYTES, MOUNT_INFO, POD_DETAIL, Processor, RECOVERY, TARGET};
use crate::metrics::Metrics;
use crate::reporting::Reporting;

pub use self::contract::FOLDER;
pub use self::pod_detail::PodReader;

/// Limit of a request: it has all earlier results.
const MOST_POSTED: usize = 8 << 20;

/// Limit of processors at a time: each of them may wait for a filesystem.
const AT_A_TIME: usize = 4;

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
    working: Semaphore,
}

/// Why a processor has no result.
#[derive(Debug, thiserror::Error)]
enum NoResult {
    #[error("the request ended early, or is longer than {} bytes", MOST_POSTED)]
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
    #[error("the result has {0} bytes, and kubediag accepts {MOST_BYTES}")]
    TooLong(usize),
    #[error("the agent ends")]
    Ends,
}

impl Kubediag {
    /// Processors that are disabled, or that work on this node.
    pub fn new(config: &Config, pods: PodReader, metrics: Arc<Metrics>, reporting: Reporting) -> Arc<Self> {
        let (is_enabled, working) = (config.agent().kubediag.is_some(), Semaphore::new(AT_A_TIME));
        let (policy, places) = (*config.policy(), config.places().clone());
        Arc::new(Self { is_enabled, policy, places, pods, metrics, reporting, working })
    }

    /// The status and the text of the answer; `None` if kubediag has no such processor.
    pub async fn answer(self: &Arc<Self>, request: Request<Incoming>) -> Option<(StatusCode, String)> {
        let processor = Processor::of_path(request.uri().path())?;
        if !self.is_enabled {
            let text = format!("{} is disabled: set enabled = true in [agent.kubediag]\n", processor.name());
            return Some((StatusCode::UNPROCESSABLE_ENTITY, text));
        }
        if request.method() != Method::POST {
            let text = format!("method {} is not supported\n", request.method());
            return Some((StatusCode::METHOD_NOT_ALLOWED, text));
        }
        Some(match self.result(processor, request.into_body()).await {
            Ok(json) => (StatusCode::OK, json),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{}\n", error_chain(&error))),
        })
    }

    async fn result(self: &Arc<Self>, processor: Processor, body: Incoming) -> Result<String, NoResult> {
        let _turn = self.working.acquire().await.map_err(|_| NoResult::Ends)?;
        let posted = Limited::new(body, MOST_POSTED).collect().await.map_err(NoResult::Body)?.to_bytes();
        let result = match processor {
            Processor::PodDetailCollector => self.pods.detail(&parse(&posted)?).await?,
            Processor::MountInfoCollector => self.blocking(|_| mount_info()).await?,
            Processor::SubpathRemountDiagnoser => {
                let posted = parse(&posted)?;
                diagnoser::diagnose(value(&posted, POD_DETAIL)?, value(&posted, MOUNT_INFO)?)?.into()
            }
            Processor::SubpathRemountRecover => {
                let posted = parse(&posted)?;
                let target = value(&posted, TARGET)?.to_owned();
                self.blocking(move |this| this.recover(&target)).await?
            }
        };
        let json = serde_json::to_string(&result).map_err(NoResult::Json)?;
        if json.len() > MOST_BYTES { Err(NoResult::TooLong(json.len())) } else { Ok(json) }
    }

    /// Runs work that may wait for a filesystem.
    async fn blocking(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<Strings, NoResult> + Send + 'static,
    ) -> Result<Strings, NoResult> {
        let this = Arc::clone(self);
        tokio::task::spawn_blocking(move || work(&this)).await.map_err(|_| NoResult::Ends)?
    }

    fn recover(&self, target: &str) -> Result<Strings, NoResult> {
        let recovered = recoverer::recover(Path::new(target), &self.policy, &self.places)?;
        self.metrics.rebound(&recovered.report, recovered.took);
        self.reporting.journal.rebound(&recovered.pod_uid, &recovered.volume, recovered.report);
        Ok(Strings::from([(RECOVERY.to_owned(), contract::recovered(target))]))
    }
}

fn parse(posted: &Bytes) -> Result<Strings, NoResult> {
    serde_json::from_slice(posted).map_err(NoResult::NoStrings)
}

fn value<'p>(posted: &'p Strings, key: &'static str) -> Result<&'p str, NoResult> {
    posted.get(key).map(String::as_str).filter(|value| !value.is_empty()).ok_or(NoResult::Missing(key))
}

/// The mount table of the agent's namespace, which is the runtime's. On most nodes that is `/proc/1/mountinfo`.
fn mount_info() -> Result<Strings, NoResult> {
    let bytes = std::fs::read("/proc/thread-self/mountinfo").map_err(NoResult::MountInfo)?;
    let text = contract::short_mount_info(String::from_utf8_lossy(&bytes).into_owned());
    Ok(Strings::from([(MOUNT_INFO.to_owned(), text)]))
}
