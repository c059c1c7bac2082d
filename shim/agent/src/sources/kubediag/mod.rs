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
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bindguard_core::error_chain;
use bindguard_core::report::{Actor, RebindLine, Report};
use bindguard_kubernetes::{Access, ApiClient, node_name};
use bindguard_operator::pods::Pods;
use bindguard_operator::{RepairAct, exact_subpath, repair_node};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use serde::Deserialize;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Duration, timeout};

use crate::sinks::AgentLine;
use crate::work::Node;

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

// The paths, keys and texts that kubediag v0.3.1 defines: `pkg/processors` and `pkg/executor` of
// kubediag/kubediag.

/// The folder of all processors.
pub const FOLDER: &str = "/processor/";

/// The parameters that name a pod.
const POD_NAMESPACE: &str = "pod.namespace";
const POD_NAME: &str = "pod.name";

/// The result of podDetailCollector: the Pod as JSON.
const POD_DETAIL: &str = "collector.kubernetes.pod.detail";
/// The result of mountInfoCollector: the text of a mount table.
const MOUNT_INFO: &str = "collector.system.mountinfo";
const DIAGNOSIS: &str = "diagnoser.kubernetes.subpath_remount.result";
const BUG_LINK: &str = "diagnoser.kubernetes.subpath_remount.bug_link";
const SOURCE: &str = "diagnoser.kubernetes.subpath_remount.original_source_path";
const TARGET: &str = "diagnoser.kubernetes.subpath_remount.original_destination_path";
const RECOVERY: &str = "recover.kubernetes.subpath_remount.result";

/// The text of a diagnosis.
const ENCOUNTERED: &str = "A kubernetes bug #68211 has been encountered on pod subpath remounting.";

/// Limit of an answer in bytes.
const MAX_BYTES: usize = 2 << 20;

/// A JSON object of strings.
type Strings = BTreeMap<String, String>;

/// The last part of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "camelCase")]
enum Processor {
    PodDetailCollector,
    MountInfoCollector,
    SubpathRemountDiagnoser,
    SubpathRemountRecover,
}

/// The processor at a path, and its name.
fn processor_at(path: &str) -> Option<(Processor, &str)> {
    let name = path.strip_prefix(FOLDER)?;
    Some((name.parse().ok()?, name))
}

/// Answers requests.
#[derive(Debug)]
pub struct Kubediag {
    node: &'static Node,
    /// `None` without credentials.
    api: Option<Mutex<ApiClient>>,
    working: Arc<Semaphore>,
}

impl Kubediag {
    /// The processors of this node, which the config may disable.
    pub fn new(node: &'static Node, access: Option<Arc<Access>>) -> Self {
        Self {
            node,
            api: access.map(|access| Mutex::new(ApiClient::new(access))),
            working: Arc::new(Semaphore::new(MAX_PROCESSORS)),
        }
    }

    /// The status and the text of the answer; `None` if kubediag has no such processor.
    pub async fn answer(&'static self, request: Request<Incoming>) -> Option<(StatusCode, String)> {
        let (processor, name) = processor_at(request.uri().path())?;
        if self.node.config.agent().kubediag.is_none() {
            let text = format!("{name} is disabled: set enabled = true in [agent.kubediag]\n");
            return Some((StatusCode::UNPROCESSABLE_ENTITY, text));
        }
        if request.method() != Method::POST {
            let text = format!("method {} is not supported\n", request.method());
            return Some((StatusCode::METHOD_NOT_ALLOWED, text));
        }
        Some(match self.result(processor, request.into_body()).await {
            Ok(json) => (StatusCode::OK, json),
            Err(error) => {
                let text = format!("{}\n", error_chain(&*error));
                (StatusCode::INTERNAL_SERVER_ERROR, text)
            }
        })
    }

    async fn result(&'static self, processor: Processor, body: Incoming) -> Result<String> {
        let (turn, posted) = self.body(body).await?;
        let parse = || -> Result<Strings> {
            serde_json::from_slice(&posted)
                .context("parse the request: expected a JSON object of strings")
        };
        let result = match processor {
            Processor::PodDetailCollector => {
                let detail = self.pod_detail(&parse()?).await;
                result_of(POD_DETAIL, detail.context("read the pod")?)
            }
            Processor::MountInfoCollector => blocking(turn, mount_info).await?,
            Processor::SubpathRemountDiagnoser => {
                let posted = parse()?;
                let (pod, mounts) = (value(&posted, POD_DETAIL)?, value(&posted, MOUNT_INFO)?);
                diagnoser::diagnose(pod, mounts).context("diagnose the pod")?
            }
            Processor::SubpathRemountRecover => {
                let target = value(&parse()?, TARGET)?.to_owned();
                blocking(turn, move || recover_subpath(self.node, &target)).await?
            }
        };
        let json = serde_json::to_string(&result).context("write the result as JSON")?;
        ensure!(
            json.len() <= MAX_BYTES,
            "the result has {} bytes, and kubediag accepts {MAX_BYTES}",
            json.len()
        );
        Ok(json)
    }

    /// The turn and the whole body of a request.
    async fn body<B>(&self, body: B) -> Result<(OwnedSemaphorePermit, Bytes)>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>,
    {
        let turn = self.turn().await?;
        Ok((turn, posted(body).await?))
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit> {
        let turn = Arc::clone(&self.working).acquire_owned();
        let turn = timeout(TURN_TIMEOUT, turn).await;
        turn.map_err(|_| anyhow!("other requests are processed"))?
            .map_err(|_| anyhow!("the agent ends"))
    }

    /// podDetailCollector: the Pod object that the parameters name, from the API server. Only pods of
    /// this node: the processors are reachable without credentials, and must not show more of the
    /// cluster than the node's own pods.
    async fn pod_detail(&self, parameters: &Strings) -> Result<String> {
        let name = |key: &str| match parameters.get(key) {
            Some(name) if is_object_name(name) => Ok(name),
            _ => bail!(
                "the request does not name a pod: {POD_NAMESPACE} and {POD_NAME} are the names of Kubernetes objects"
            ),
        };
        let (namespace, pod) = (name(POD_NAMESPACE)?, name(POD_NAME)?);
        let Some(api) = &self.api else {
            bail!("there are no credentials for the API server; set [agent.kubernetes] kubeconfig");
        };
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}");
        let text = api.lock().await.get(&path).await?;
        let PodPlace { spec } =
            serde_json::from_str(&text).context("the API server's answer is no Pod")?;
        let found = spec.node_name;
        let node = node_name(self.node.config.agent().kubernetes.node.as_deref());
        ensure!(
            found == node,
            "it runs on node {found:?}, and this is node {node:?}"
        );
        Ok(text)
    }
}

/// The field of a Pod that tells its node. A tenant chooses how many other fields the Pod has, and as a
/// `Value` they would need more memory than the agent may use.
#[derive(Deserialize)]
struct PodPlace {
    #[serde(default)]
    spec: PlaceInSpec,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PlaceInSpec {
    node_name: String,
}

/// Runs work that may wait for a filesystem. The turn ends with the work: the work goes on if the
/// client hangs up.
async fn blocking(
    turn: OwnedSemaphorePermit,
    work: impl FnOnce() -> Result<Strings> + Send + 'static,
) -> Result<Strings> {
    let work = move || {
        let result = work();
        drop(turn);
        result
    };
    spawn_blocking(work)
        .await
        .map_err(|_| anyhow!("the agent ends"))?
}

/// The whole body of a request.
async fn posted<B>(body: B) -> Result<Bytes>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>,
{
    let Ok(collected) = timeout(BODY_TIMEOUT, Limited::new(body, MAX_POSTED).collect()).await
    else {
        let limit = BODY_TIMEOUT.as_millis();
        bail!("the request has no end after {limit} ms");
    };
    let collected = collected.map_err(|error| anyhow!(error)).with_context(|| {
        format!("the request ended early, or is longer than {MAX_POSTED} bytes")
    })?;
    Ok(collected.to_bytes())
}

fn result_of(key: &str, text: String) -> Strings {
    Strings::from([(key.to_owned(), text)])
}

fn value<'p>(posted: &'p Strings, key: &str) -> Result<&'p str> {
    match posted.get(key) {
        Some(value) if !value.is_empty() => Ok(value),
        _ => bail!("the request has no {key}"),
    }
}

/// The mount table of the agent's namespace, which is the runtime's. On most nodes that is
/// `/proc/1/mountinfo`.
fn mount_info() -> Result<Strings> {
    let bytes = std::fs::read("/proc/thread-self/mountinfo").context("read the mount table")?;
    let text = short_mount_info(String::from_utf8_lossy(&bytes).into_owned());
    Ok(result_of(MOUNT_INFO, text))
}

/// The whole table if it fits into an answer, else its lines about subpaths: the diagnoser reads
/// only these lines.
fn short_mount_info(text: String) -> String {
    // Each quote and backslash becomes two bytes.
    if text.len() <= MAX_BYTES / 2 {
        return text;
    }
    let lines = text.split_inclusive('\n');
    lines
        .filter(|line| line.contains("/volume-subpaths/"))
        .collect()
}

/// subpathRemountRecover: repairs the subpath at a path with the guard's re-bind, until it is
/// current or its stale mount is gone. It may wait for a filesystem.
///
/// kubediag unmounts whatever path it is given. Here the path must be a volume-subpath of a
/// kubelet's root, written without symlinks, `..` or doubled slashes, and its mount must be stale.
/// Where no re-bind is possible the stale mount is detached, as kubediag does: then the kubelet
/// binds the current file when it next starts the container.
fn recover_subpath(node: &Node, target: &str) -> Result<Strings> {
    let line = recover(node, Path::new(target)).context("repair the subpath")?;
    node.metrics.rebound(&line);
    node.reporting.journal(AgentLine::Rebind(line));
    // Spelled as kubediag spells it: its users may compare it.
    let text = format!("Succeesfully umount {target} on host");
    Ok(result_of(RECOVERY, text))
}

fn recover(node: &Node, path: &Path) -> Result<RebindLine> {
    let (policy, places) = (node.config.policy(), node.config.places());
    let start = Instant::now();
    let subpath = exact_subpath(path, places)?;
    let repaired = |act| {
        let report = repair_node(policy, places, &Pods::default(), act, |other| {
            *other == subpath
        });
        let Some(bind) = report.binds.into_iter().next() else {
            let path = subpath.path();
            bail!("no container of this node uses {}", path.display());
        };
        Ok(bind.bind)
    };
    let mut bind = repaired(RepairAct::Rebind)?;
    if bind.outcome.is_none() {
        let reason = bind.reason().map(|reason| format!(": {reason}"));
        bail!(
            "{} is {}{}, and only a stale mount is replaced",
            path.display(),
            bind.verdict(),
            reason.unwrap_or_default()
        );
    }
    if !bind.is_repaired() {
        bind = repaired(RepairAct::Detach)?;
    }
    if !bind.is_repaired() {
        let outcome = bind.outcome.map(|outcome| outcome.to_string());
        let left = outcome.as_deref().unwrap_or("left as it is");
        bail!("{}: {left}", path.display());
    }
    let mut report = Report {
        binds: vec![bind],
        ..Report::default()
    };
    report.set_duration(start.elapsed());
    let (pod_uid, volume) = (subpath.pod_uid(), subpath.volume());
    Ok(RebindLine::new(Actor::Agent, pod_uid, volume, &report))
}

/// A name that is one part of a path: RFC 1123, as all names of pods and namespaces.
fn is_object_name(name: &str) -> bool {
    let is_part = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.'
    };
    !name.is_empty() && name.len() <= 253 && name.bytes().all(is_part) && !name.starts_with('.')
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

    fn enabled() -> &'static Kubediag {
        let node = Node::silent("[agent.kubediag]\nenabled = true\n");
        Box::leak(Box::new(Kubediag::new(node, None)))
    }

    /// A client posts, hangs up, and posts again: each request would add a thread.
    #[tokio::test]
    async fn work_keeps_its_turn_when_the_client_hangs_up() {
        let kubediag = enabled();
        let (begins, begun) = channel();
        let (ends, end) = channel::<()>();
        let work = move || {
            begins.send(()).unwrap();
            let _ = end.recv();
            Ok(Strings::new())
        };
        let turn = kubediag.turn().await.unwrap();
        let request = tokio::spawn(blocking(turn, work));
        spawn_blocking(move || begun.recv().unwrap()).await.unwrap();
        request.abort();
        assert!(request.await.is_err_and(|error| error.is_cancelled()));
        assert!(kubediag.working.try_acquire().is_err());
        drop(ends);
        drop(kubediag.turn().await.unwrap());
    }

    /// A tenant chooses how many fields its pod has, and the agent may use 64 MiB.
    #[test]
    fn a_pod_with_many_fields_needs_little_memory() {
        let peak = || -> u64 {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let mut words = status.split_whitespace();
            words.find(|word| *word == "VmHWM:").unwrap();
            words.next().unwrap().parse().unwrap()
        };
        let env = r#"{"name":"a"},"#.repeat(240_000);
        let pod = format!(r#"{{"spec":{{"nodeName":"n","containers":[{{"env":[{env}null]}}]}}}}"#);
        // The peak begins anew.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = peak();
        let place: PodPlace = serde_json::from_str(&pod).unwrap();
        assert_eq!(place.spec.node_name, "n");
        diagnoser::diagnose(&pod, "").unwrap_err();
        let kib = peak() - before;
        assert!(kib < 20 << 10, "{kib} KiB");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_without_an_end_ends() {
        let error = posted(WithoutEnd).await.unwrap_err();
        assert_eq!(error.to_string(), "the request has no end after 900 ms");
    }

    /// A listener has at most 32 connections (`http.rs`), and 31 clients were first.
    #[tokio::test(start_paused = true)]
    async fn bodies_without_end_do_not_outlast_a_request() {
        let kubediag = enabled();
        for _ in 1..32 {
            tokio::spawn(async move { kubediag.body(WithoutEnd).await.map(drop) });
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
        let error = of(2 * MAX_BYTES + 1).await.unwrap_err().to_string();
        assert!(error.contains("is longer than 4194304 bytes"), "{error}");
    }
}

#[cfg(test)]
mod contract_tests {
    use super::*;

    #[test]
    fn a_path_names_a_processor_exactly() {
        let (processor, name) =
            processor_at("/processor/podDetailCollector").unwrap_or_else(|| panic!());
        assert_eq!(processor, Processor::PodDetailCollector);
        assert_eq!(name, "podDetailCollector");
        for path in [
            "/processor/",
            "/processor/poddetailcollector",
            "/podDetailCollector",
            "/processor/nodeCordon",
        ] {
            assert_eq!(processor_at(path), None, "{path}");
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
