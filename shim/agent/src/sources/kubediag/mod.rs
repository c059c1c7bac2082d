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

mod diagnoser;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::{Actor, BindReport, RebindLine, Report};
use bindguard_kubernetes::{Access, ApiClient, ApiError};
use bindguard_operator::pods::Pods;
use bindguard_operator::{NotASubpath, RepairAct, exact_subpath, repair_node};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use serde::Deserialize;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Duration, timeout};

use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;

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
    Pod(#[from] NoPod),
    #[error("read the mount table")]
    MountInfo(#[source] std::io::Error),
    #[error("diagnose the pod")]
    Diagnosis(#[from] diagnoser::NotDiagnosed),
    #[error("repair the subpath")]
    Recovery(#[from] NotRecovered),
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
        let line = recover(Path::new(target), &self.policy, &self.places)?;
        self.metrics.rebound(&line);
        self.reporting.journal.rebound(line);
        Ok(Strings::from([(RECOVERY.to_owned(), recovered(target))]))
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
    let text = short_mount_info(String::from_utf8_lossy(&bytes).into_owned());
    Ok(Strings::from([(MOUNT_INFO.to_owned(), text)]))
}

// The paths, keys and texts that kubediag v0.3.1 defines: `pkg/processors` and `pkg/executor` of
// kubediag/kubediag.

/// The folder of all processors.
pub const FOLDER: &str = "/processor/";

/// The parameters that name a pod.
pub const POD_NAMESPACE: &str = "pod.namespace";
pub const POD_NAME: &str = "pod.name";

/// The result of podDetailCollector: the Pod as JSON.
pub const POD_DETAIL: &str = "collector.kubernetes.pod.detail";
/// The result of mountInfoCollector: the text of a mount table.
pub const MOUNT_INFO: &str = "collector.system.mountinfo";
pub const DIAGNOSIS: &str = "diagnoser.kubernetes.subpath_remount.result";
pub const BUG_LINK: &str = "diagnoser.kubernetes.subpath_remount.bug_link";
pub const SOURCE: &str = "diagnoser.kubernetes.subpath_remount.original_source_path";
pub const TARGET: &str = "diagnoser.kubernetes.subpath_remount.original_destination_path";
pub const RECOVERY: &str = "recover.kubernetes.subpath_remount.result";

/// The text of a diagnosis.
pub const ENCOUNTERED: &str =
    "A kubernetes bug #68211 has been encountered on pod subpath remounting.";

/// Limit of an answer in bytes.
pub const MAX_BYTES: usize = 2 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    PodDetailCollector,
    MountInfoCollector,
    SubpathRemountDiagnoser,
    SubpathRemountRecover,
}

impl Processor {
    const ALL: [Self; 4] = [
        Self::PodDetailCollector,
        Self::MountInfoCollector,
        Self::SubpathRemountDiagnoser,
        Self::SubpathRemountRecover,
    ];

    /// The processor at a path.
    pub fn of_path(path: &str) -> Option<Self> {
        let name = path.strip_prefix(FOLDER)?;
        Self::ALL
            .into_iter()
            .find(|processor| processor.name() == name)
    }

    /// The processor's name, which is the last part of the path.
    pub fn name(self) -> &'static str {
        match self {
            Self::PodDetailCollector => "podDetailCollector",
            Self::MountInfoCollector => "mountInfoCollector",
            Self::SubpathRemountDiagnoser => "subpathRemountDiagnoser",
            Self::SubpathRemountRecover => "subpathRemountRecover",
        }
    }
}

/// The text of a recovery, spelled as kubediag spells it: its users may compare it.
pub fn recovered(target: &str) -> String {
    format!("Succeesfully umount {target} on host")
}

/// The whole table if it fits into an answer, else its lines about subpaths: the diagnoser reads
/// only these lines.
pub fn short_mount_info(text: String) -> String {
    // Each quote and backslash becomes two bytes.
    if text.len() <= MAX_BYTES / 2 {
        return text;
    }
    let subpaths = text
        .split_inclusive('\n')
        .filter(|line| line.contains("/volume-subpaths/"));
    subpaths.collect()
}

// subpathRemountRecover: re-binds a stale volume-subpath with the guard's re-bind.
//
// kubediag unmounts whatever path it is given. Here the path must be a volume-subpath of a
// kubelet's root, written without symlinks, `..` or doubled slashes, and its mount must be stale.
// Where no re-bind is possible the stale mount is detached, as kubediag does: then the kubelet
// binds the current file when it next starts the container.

/// Why a path is not repaired.
#[derive(Debug, thiserror::Error)]
pub enum NotRecovered {
    #[error(transparent)]
    NotASubpath(#[from] NotASubpath),
    #[error("no container of this node uses {}", .0.display())]
    Unknown(PathBuf),
    #[error("{} is {verdict}, and only a stale mount is replaced", path.display())]
    NotStale {
        path: PathBuf,
        /// Its verdict and the reason.
        verdict: String,
    },
    #[error("{}: {outcome}", path.display())]
    Failed {
        path: PathBuf,
        /// The outcome of the last try.
        outcome: String,
    },
}

/// Repairs the subpath at a path, until it is current or its stale mount is gone. It may wait for a
/// filesystem.
pub fn recover(path: &Path, policy: &Policy, places: &Places) -> Result<RebindLine, NotRecovered> {
    let start = Instant::now();
    let subpath = exact_subpath(path, places)?;
    let rebound = repaired(&subpath, RepairAct::Rebind, policy, places)?;
    let bind = match rebound.outcome {
        Some(_) if rebound.is_repaired() => rebound,
        Some(_) => repaired(&subpath, RepairAct::Detach, policy, places)?,
        None => return Err(not_stale(path, &rebound)),
    };
    if !bind.is_repaired() {
        let outcome = bind
            .outcome
            .as_ref()
            .map_or_else(|| "left as it is".to_owned(), ToString::to_string);
        return Err(NotRecovered::Failed {
            path: path.to_owned(),
            outcome,
        });
    }
    let mut report = Report {
        binds: vec![bind],
        ..Report::default()
    };
    report.set_duration(start.elapsed());
    let (pod_uid, volume) = (subpath.pod_uid(), subpath.volume());
    Ok(RebindLine::new(Actor::Agent, pod_uid, volume, &report))
}

fn repaired(
    subpath: &VolumeSubpath,
    act: RepairAct,
    policy: &Policy,
    places: &Places,
) -> Result<BindReport, NotRecovered> {
    let report = repair_node(policy, places, &Pods::default(), act, |other| {
        other == subpath
    });
    let bind = report.binds.into_iter().next().map(|bind| bind.bind);
    bind.ok_or_else(|| NotRecovered::Unknown(subpath.path()))
}

fn not_stale(path: &Path, bind: &BindReport) -> NotRecovered {
    let reason = bind
        .reason()
        .map(|reason| format!(": {reason}"))
        .unwrap_or_default();
    NotRecovered::NotStale {
        path: path.to_owned(),
        verdict: format!("{}{reason}", bind.verdict()),
    }
}

// podDetailCollector: the Pod object, from the API server. Only pods of this node: the processors
// are reachable without credentials, and must not show more of the cluster than the node's own
// pods.

/// Reads pods of this node.
#[derive(Debug)]
pub struct PodReader {
    /// `None` without credentials.
    client: Option<Mutex<ApiClient>>,
    node: String,
}

/// Why there is no Pod.
#[derive(Debug, thiserror::Error)]
pub enum NoPod {
    #[error(
        "the request does not name a pod: {POD_NAMESPACE} and {POD_NAME} are the names of Kubernetes objects"
    )]
    NotNamed,
    #[error("there are no credentials for the API server; set [agent.kubernetes] kubeconfig")]
    NoAccess,
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("the API server's answer is no Pod")]
    Json(#[from] serde_json::Error),
    #[error("it runs on node {found:?}, and this is node {node:?}")]
    OtherNode { found: String, node: String },
}

impl PodReader {
    /// A reader with these credentials, for the node of this name.
    pub fn new(access: Option<Arc<Access>>, node: String) -> Self {
        Self {
            client: access.map(|access| Mutex::new(ApiClient::new(access))),
            node,
        }
    }

    /// The Pod that the parameters name.
    ///
    /// # Errors
    /// If it cannot be read, or runs on another node.
    pub async fn detail(&self, parameters: &Strings) -> Result<Strings, NoPod> {
        let name = |key: &str| {
            parameters
                .get(key)
                .filter(|name| is_object_name(name))
                .ok_or(NoPod::NotNamed)
        };
        let (namespace, pod) = (name(POD_NAMESPACE)?, name(POD_NAME)?);
        let text = self
            .read(&format!("/api/v1/namespaces/{namespace}/pods/{pod}"))
            .await?;
        let PodPlace { spec } = serde_json::from_str(&text)?;
        if spec.node_name != self.node {
            return Err(NoPod::OtherNode {
                found: spec.node_name,
                node: self.node.clone(),
            });
        }
        Ok(Strings::from([(POD_DETAIL.to_owned(), text)]))
    }

    async fn read(&self, path: &str) -> Result<String, NoPod> {
        let mut client = self.client.as_ref().ok_or(NoPod::NoAccess)?.lock().await;
        Ok(client.get(path).await?)
    }
}

/// A name that is one part of a path: RFC 1123, as all names of pods and namespaces.
fn is_object_name(name: &str) -> bool {
    let is_part = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.'
    };
    !name.is_empty() && name.len() <= 253 && name.bytes().all(is_part) && !name.starts_with('.')
}

#[derive(Debug, Deserialize)]
struct PodPlace {
    #[serde(default)]
    spec: PlaceInSpec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PlaceInSpec {
    node_name: String,
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
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;
    use crate::threads::IdleMemory;

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

#[cfg(test)]
mod contract_tests {
    use super::*;

    #[test]
    fn a_path_names_a_processor_exactly() {
        assert_eq!(
            Processor::of_path("/processor/podDetailCollector"),
            Some(Processor::PodDetailCollector)
        );
        for path in [
            "/processor/",
            "/processor/poddetailcollector",
            "/podDetailCollector",
            "/processor/nodeCordon",
        ] {
            assert_eq!(Processor::of_path(path), None, "{path}");
        }
    }

    #[test]
    fn a_table_that_is_too_long_keeps_its_subpaths() {
        let other = "1 0 8:1 / /var/lib/containers/storage rw - ext4 /dev/sda1 rw\n".repeat(40_000);
        let subpath =
            "2 1 8:1 /x//deleted /k/pods/u/volume-subpaths/v/c/0 rw - ext4 /dev/sda1 rw\n";
        assert_eq!(short_mount_info(format!("{other}{subpath}")), subpath);
        assert_eq!(short_mount_info(subpath.repeat(2)), subpath.repeat(2));
    }
}

#[cfg(test)]
mod pod_detail_tests {
    use super::*;

    #[test]
    fn a_name_cannot_lead_to_another_object() {
        for name in ["web", "web-0.example", "0"] {
            assert!(is_object_name(name), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "a?watch=1",
            "Web",
            "a%2fb",
            &"x".repeat(254),
        ] {
            assert!(!is_object_name(name), "{name}");
        }
    }
}
