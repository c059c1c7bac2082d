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

use std::collections::{BTreeMap, HashSet};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bindguard_core::error_chain;
use bindguard_core::report::{Actor, RebindLine, Report};
use bindguard_kubernetes::{Access, ApiClient, node_name};
use bindguard_operator::node_report::ISSUE;
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
                diagnose(pod, mounts).context("diagnose the pod")?
            }
            Processor::SubpathRemountRecover => {
                let target = value(&parse()?, TARGET)?.to_owned();
                blocking(turn, move || {
                    let line = recover(self.node, Path::new(&target));
                    let line = line.context("repair the subpath")?;
                    self.node.metrics.rebound(&line);
                    self.node.reporting.journal(AgentLine::Rebind(line));
                    // Spelled as kubediag spells it: its users may compare it.
                    let text = format!("Succeesfully umount {target} on host");
                    Ok(result_of(RECOVERY, text))
                })
                .await?
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
        let pod = Pod::parse(&text).context("the API server's answer is no Pod")?;
        let found = pod.spec.node_name;
        let node = node_name(self.node.config.agent().kubernetes.node.as_deref());
        ensure!(
            found == node,
            "it runs on node {found:?}, and this is node {node:?}"
        );
        Ok(text)
    }
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

// subpathRemountDiagnoser: does the runtime's error name a subpath whose mount shows a deleted file?
// It reads the results of both collectors and nothing else.

/// The parts of the runtime's error, in order, all in the first line of the error: kubediag's
/// pattern `^.*mounting.*volume-subpaths.*to rootfs.*at.*no such file or directory.*`.
const PARTS: [&str; 5] = [
    "mounting",
    "volume-subpaths",
    "to rootfs",
    "at",
    "no such file or directory",
];

/// Diagnoses a pod by its object and a mount table: the mount of the subpath, with the kernel's
/// `/deleted` in its root.
///
/// # Errors
/// Why the pod does not have the fault.
fn diagnose(pod: &str, mount_info: &str) -> Result<Strings> {
    let pod = Pod::parse(pod).with_context(|| format!("parse the pod of {POD_DETAIL}"))?;
    let volumes = pod.spec.volumes.iter();
    let written = volumes.filter(|it| it.config_map.is_some() || it.secret.is_some());
    let written: HashSet<&str> = written.map(|it| &*it.name).collect();
    let mut mounts = pod.spec.containers.iter().flat_map(|it| &it.volume_mounts);
    let has_sub_path = mounts.any(|it| {
        (!it.sub_path.is_empty() || !it.sub_path_expr.is_empty()) && written.contains(&*it.name)
    });
    ensure!(
        has_sub_path,
        "no container of the pod mounts a subPath of a configMap or secret"
    );
    // The last error of a container that is not ready.
    let mut message = "";
    for status in &pod.status.container_statuses {
        let (last, state) = (&status.last_state, &status.state);
        let states = [&last.terminated, &state.waiting, &state.terminated];
        if let Some(text) = states.into_iter().flatten().next()
            && !status.ready
        {
            message = &text.message;
            break;
        }
    }
    let mut rest = message.lines().next().unwrap_or_default();
    for part in PARTS {
        let Some((_, behind)) = rest.split_once(part) else {
            bail!(
                "no container that is not ready has the error of a subPath that cannot be mounted"
            );
        };
        rest = behind;
    }
    let Some(source) = source_of(message) else {
        bail!("the error of the container names no source");
    };
    for line in mount_info.lines().filter(|line| line.contains(source)) {
        let mut fields = line.split(' ').skip(3);
        if let (Some(root), Some(target)) = (fields.next(), fields.next())
            && root.ends_with("/deleted")
        {
            let keys = [
                (DIAGNOSIS, ENCOUNTERED),
                (BUG_LINK, ISSUE),
                (SOURCE, root),
                (TARGET, target),
            ];
            return Ok(keys
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into());
        }
    }
    bail!("the mount table has no mount of {source} that shows a deleted file")
}

/// The quoted path between `mounting` and `to rootfs`. A runtime may quote the whole error again,
/// which escapes the quotes.
fn source_of(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("mounting")?;
    let (between, _) = rest.split_once("to rootfs")?;
    let mut quoted = between.splitn(3, '"').skip(1);
    let (source, _) = (quoted.next()?, quoted.next()?);
    Some(source.trim_matches('\\')).filter(|source| !source.is_empty())
}

/// The fields of a Pod that are read. A tenant chooses how many other fields the Pod has, and as a
/// `Value` they would need more memory than the agent may use.
#[derive(Debug, Deserialize)]
struct Pod {
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

/// Limit of objects and lists in a Pod: serde takes a list for a struct, too. An empty one, of three
/// bytes, can need a hundred bytes.
const MAX_OBJECTS: usize = 256 << 10;

impl Pod {
    fn parse(json: &str) -> Result<Self> {
        let objects = json.matches(['{', '[']).count();
        ensure!(objects <= MAX_OBJECTS, "it has {objects} objects and lists");
        Ok(serde_json::from_str(json)?)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    node_name: String,
    containers: Vec<Container>,
    volumes: Vec<Volume>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Container {
    volume_mounts: Vec<VolumeMount>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct VolumeMount {
    name: String,
    sub_path: String,
    sub_path_expr: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Volume {
    name: String,
    config_map: Option<serde::de::IgnoredAny>,
    secret: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Status {
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerStatus {
    ready: bool,
    last_state: State,
    state: State,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct State {
    waiting: Option<StateText>,
    terminated: Option<StateText>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StateText {
    message: String,
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
        let mounts = "[],".repeat(1_300_000);
        let hostile = format!(r#"{{"spec":{{"containers":[{{"volumeMounts":[{mounts}{{}}]}}]}}}}"#);
        // The peak is of the whole process: other tests may add to some rounds, but not to all.
        let rounds = (0..8).map(|_| {
            // The peak begins anew.
            std::fs::write("/proc/self/clear_refs", "5").unwrap();
            let before = peak();
            assert_eq!(Pod::parse(&pod).unwrap().spec.node_name, "n");
            diagnose(&pod, "").unwrap_err();
            diagnose(&hostile, "").unwrap_err();
            peak() - before
        });
        let kib = rounds.min().unwrap();
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

#[cfg(test)]
mod diagnosis_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use serde_json::{Value, json};

    use super::*;

    const SUBPATH: &str = "/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0";
    const ROOT: &str = "/kubelet/pods/u/volumes/kubernetes.io~configmap/conf/..2021_06_02_06_01_21.2/app.conf//deleted";

    fn pod(statuses: &Value) -> Value {
        json!({
            "spec": {
                "containers": [{"name": "app", "volumeMounts": [{"name": "conf", "mountPath": "/etc/app.conf", "subPath": "app.conf"}]}],
                "volumes": [{"name": "conf", "configMap": {"name": "app"}}],
            },
            "status": {"containerStatuses": statuses},
        })
    }

    /// The messages of runc 1.0 under dockerd, and of runc 1.3 under containerd.
    fn messages() -> [String; 2] {
        [
            format!(
                "OCI runtime create failed: rootfs_linux.go:58: mounting \\\"{SUBPATH}\\\" to rootfs \\\"/o/merged\\\" at \\\"/o/merged/etc/app.conf\\\" caused \\\"no such file or directory\\\"\": unknown"
            ),
            format!(
                "failed to create containerd task: error mounting \"{SUBPATH}\" to rootfs at \"/etc/app.conf\": mount src={SUBPATH}, dst=/etc/app.conf: no such file or directory: unknown"
            ),
        ]
    }

    fn fails(diagnosed: Result<Strings>, why: &str) -> bool {
        diagnosed.is_err_and(|error| error.to_string().contains(why))
    }

    fn table() -> String {
        format!(
            "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 20 8:1 {ROOT} {SUBPATH} rw shared:1 - ext4 /dev/sda1 rw\n"
        )
    }

    fn waiting(message: &str) -> Value {
        json!([{"name": "app", "ready": false, "state": {"waiting": {"reason": "CreateContainerError", "message": message}}}])
    }

    #[test]
    fn the_error_of_a_runtime_leads_to_the_deleted_mount() {
        for message in messages() {
            let found = diagnose(&pod(&waiting(&message)).to_string(), &table()).unwrap();
            let keys = found;
            assert_eq!(
                keys[DIAGNOSIS],
                "A kubernetes bug #68211 has been encountered on pod subpath remounting."
            );
            assert_eq!(
                keys[BUG_LINK],
                "https://github.com/kubernetes/kubernetes/issues/68211"
            );
            assert_eq!(
                (keys[SOURCE].as_str(), keys[TARGET].as_str(), keys.len()),
                (ROOT, SUBPATH, 4),
                "{message}"
            );
        }
    }

    /// As kubediag chooses: the first container that is not ready; its last end takes precedence
    /// over its present state.
    #[test]
    fn the_message_is_that_of_the_first_container_that_is_not_ready() {
        let [message, _] = messages();
        let ended = json!({"terminated": {"message": message}});
        let other = json!({"waiting": {"message": "back-off 40s restarting failed container"}});
        for (statuses, is_found) in [
            (
                json!([{"ready": false, "lastState": ended, "state": other}]),
                true,
            ),
            (
                json!([{"ready": false, "lastState": other, "state": ended}]),
                true,
            ),
            (
                json!([{"ready": false, "lastState": {"terminated": {"message": ""}}, "state": ended}]),
                false,
            ),
            (json!([{"ready": false, "state": ended}]), true),
            (json!([{"ready": true, "lastState": ended}]), false),
            (
                json!([{"ready": true}, {"ready": false, "state": ended}]),
                true,
            ),
            (
                json!([{"ready": false, "state": other}, {"ready": false, "state": ended}]),
                false,
            ),
            (json!([]), false),
        ] {
            assert_eq!(
                diagnose(&pod(&statuses).to_string(), &table()).is_ok(),
                is_found,
                "{statuses}"
            );
        }
    }

    #[test]
    fn anything_else_is_no_such_fault() {
        let [_, message] = messages();
        let good = pod(&waiting(&message));
        let mut other_volume = good.clone();
        other_volume["spec"]["volumes"] = json!([{"name": "conf", "emptyDir": {}}]);
        let mut whole_volume = good.clone();
        whole_volume["spec"]["containers"][0]["volumeMounts"][0]["subPath"] = "".into();
        for pod in [&other_volume, &whole_volume] {
            assert!(fails(
                diagnose(&pod.to_string(), &table()),
                "mounts a subPath of"
            ));
        }
        let split = pod(&waiting(&message.replace("to rootfs", "\nto rootfs")));
        assert!(fails(
            diagnose(&split.to_string(), &table()),
            "has the error of a subPath"
        ));
        let unquoted = pod(&waiting(&message.replace('"', "")));
        assert!(fails(
            diagnose(&unquoted.to_string(), &table()),
            "names no source"
        ));
        let current = table().replace("//deleted", "");
        for table in ["", "no table", &current] {
            assert!(
                fails(diagnose(&good.to_string(), table), "shows a deleted file"),
                "{table}"
            );
        }
        for text in ["", "7", "{\"spec\":7}"] {
            assert!(
                fails(diagnose(text, &table()), "parse the pod of collector"),
                "{text}"
            );
        }
    }
}
