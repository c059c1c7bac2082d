//! The survey of the node: every subpath and volume with its verdict, as `bindguard diagnose`
//! prints it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, mem};

use bindguard_core::error_chain;
use bindguard_core::identity::{START_TIME, stat_number};
use bindguard_core::judge::VerdictName;
use bindguard_core::places::KindName;
use bindguard_operator::cri::query;
use bindguard_operator::doctor::GuardedRuntimes;
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::old_binds::{ContainerMounts, UnreadContainer, container_mounts};
use bindguard_operator::pods::{IgnoredRequest, PodContainer, ignored_requests};
use bindguard_operator::root_program::{DRIFT_COUNT, open_of_root, recent_drift_count};
use bindguard_operator::survey_node;
use bindguard_sys::process_files::{ProcessFile, contents};
use bindguard_sys::read_file;
use serde::Deserialize;
use tracing::{info, warn};

use crate::limits::SayOnce;
use crate::limits::since_epoch;
use crate::sinks::events::{from_ignored_request, from_keeper, from_survey, news};
use crate::sinks::metrics::{Level, LevelBy, Metrics, Total};
use crate::work::Node;

/// The time for which a survey's text is served again: a survey reads every mount, and requests are
/// free.
const FRESH: Duration = Duration::from_secs(10);

/// Surveys the node on request, and keeps the last report.
#[derive(Debug)]
pub struct Surveyor {
    node: &'static Node,
    last: Mutex<Last>,
}

/// The findings of the last survey: only a new finding is an event.
#[derive(Debug, Default)]
struct Last {
    report: Option<(Instant, String)>,
    sources: SayOnce,
    /// The ids of the containers that keep mounts of the host.
    keepers: SayOnce,
    /// The ids of the containers whose mounts are unknown.
    unread: SayOnce,
    /// The pods whose annotations have no effect, and the events about them.
    ignored: Vec<IgnoredRequest>,
    ignored_events: SayOnce,
    failures: SayOnce,
    are_mounts_unread: bool,
    /// The runtime did not answer.
    has_no_pods: bool,
}

impl Surveyor {
    /// A surveyor without a report.
    pub fn new(node: &'static Node) -> Self {
        Self {
            node,
            last: Mutex::default(),
        }
    }

    /// Surveys the node for figures and events. It blocks: call it from a thread that may wait for
    /// a server. Returns false if the runtime did not answer, or the mounts of containers could not be
    /// read.
    pub fn survey(&self) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // An idle agent keeps no text that was requested once.
        last.report = None;
        self.report(&mut last);
        !last.has_no_pods && !last.are_mounts_unread
    }

    /// The report as JSON, at most some seconds old. It blocks, as [`Surveyor::survey`].
    ///
    /// # Errors
    /// If the report cannot be written as JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        // Held during the survey: of several requests at once, one surveys and the others get its
        // report.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, text)) = &last.report
            && when.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let report = self.report(&mut last);
        let text = serde_json::to_string(&report)?;
        last.report = Some((Instant::now(), text.clone()));
        Ok(text)
    }

    fn report(&self, last: &mut Last) -> NodeReport {
        let (node, config) = (self.node, &self.node.config);
        let pods = node.pods.all();
        if let Err(error) = &pods
            && !last.has_no_pods
        {
            let why = error_chain(error);
            info!(
                "survey the pods: {why}; figures of containers keep their values until it answers"
            );
        }
        last.has_no_pods = pods.is_err();
        // If the runtime does not answer, its containers may still run: keep the last values about
        // them.
        let mut mounts = None;
        if let Ok(pods) = &pods {
            // Not a part of the report: `diagnose` reports sources, and the doctor every mount
            // namespace.
            let found = container_mounts(pods, config.places(), config.policy().host_root_scope);
            last.are_mounts_unread = found.is_err();
            let failure = found.as_ref().err().map(|error| error_chain(error));
            let failure = failure.map(|why| format!("survey the mounts of containers: {why}"));
            last.failures.warn_of_retry(failure);
            mounts = found.ok();
            let before = mem::replace(&mut last.ignored, ignored_requests(pods));
            let mut occurrences = Vec::new();
            for request in &last.ignored {
                let problems = request.confirmed_by(&before);
                if !problems.is_empty() {
                    occurrences.extend(from_ignored_request(&request.pod, &problems));
                }
            }
            node.metrics[Level::RefreshRequestsIgnored].set(occurrences.len() as i64);
            let new = news(&mut last.ignored_events, (), occurrences);
            for occurrence in &new {
                let pod = occurrence.pod.display_name().unwrap_or_default();
                warn!("pod {pod}: {}", occurrence.message);
            }
            node.reporting.record(new);
        }
        // Names are a convenience: a runtime that does not answer costs them, and no finding.
        let pods = pods.unwrap_or_default();
        let report = survey_node(config.policy(), config.places(), &pods, |_| true);
        let mut found = BTreeMap::<_, i64>::new();
        for bind in &report.binds {
            let labels = source_labels(bind.bind.kind(), bind.bind.verdict());
            *found.entry(labels).or_default() += 1;
        }
        let sources = &node.metrics[LevelBy::Sources];
        sources.clear();
        for (labels, count) in found {
            sources.get_or_create(&labels).set(count);
        }
        let below = report.mounts_below_emptydir.len();
        node.metrics[Level::MountsBelowEmptydir].set(below as i64);
        node.metrics[Total::AgentSurveys].inc();
        node.metrics.last_survey.set(since_epoch().as_secs_f64());
        count_installation(node.metrics, &node.cri);
        node.reporting
            .record_news(&mut last.sources, (), || from_survey(&report));
        if let Some(mounts) = mounts {
            self.take_mounts(&mounts, last);
        }
        report
    }

    /// Counts the mounts of running containers. A container that keeps mounts is reported once, also
    /// if the container keeps further mounts later.
    fn take_mounts(&self, found: &ContainerMounts, last: &mut Last) {
        let metrics = self.node.metrics;
        for (verdict, count) in [
            (VerdictName::Current, found.following_host),
            (VerdictName::Pinning, found.private),
        ] {
            let labels = source_labels(KindName::HostRoot, verdict);
            let figure = metrics[LevelBy::Sources].get_or_create(&labels);
            figure.set(count as i64);
        }
        let mut all_places = BTreeSet::new();
        let keepers = found.keepers.iter().map(|it| it.container.id.clone());
        let new_keepers = last.keepers.news((), keepers.collect());
        for keeper in &found.keepers {
            all_places.extend(&keeper.places);
            if new_keepers.contains(&keeper.container.id) {
                let places = keeper.places.iter();
                let places = places.map(|place| place.display().to_string());
                warn!(
                    "{} keeps mounts that the host has unmounted: {}",
                    name_of(&keeper.container),
                    Vec::from_iter(places).join(", ")
                );
                self.node.reporting.record(from_keeper(keeper));
            }
        }
        metrics[Level::PinnedMounts].set(all_places.len() as i64);
        let unread = found.unread.iter().map(|it| it.container.id.clone());
        let new_unread = last.unread.news((), unread.collect());
        for UnreadContainer { container, why } in &found.unread {
            if new_unread.contains(&container.id) {
                let why = error_chain(why);
                warn!("the mounts of {} are unknown: {why}", name_of(container));
            }
        }
    }
}

fn name_of(container: &PodContainer) -> String {
    let pod = container.pod.display_name().unwrap_or_default();
    let name = container.name.as_deref().unwrap_or(&container.id);
    format!("{pod} container {name}")
}

fn source_labels(kind: KindName, verdict: VerdictName) -> Vec<(&'static str, String)> {
    let labels = [("kind", kind.as_str()), ("verdict", verdict.as_str())];
    labels
        .map(|(label, value)| (label, value.to_owned()))
        .into()
}

// The installation of this node, by the installer's record and the running containerd: is the node
// guarded, and what is left to do?
//
// `bindguard install` and `uninstall` write the record and remove it. A record that cannot be read,
// and a runtime that does not answer, change no figure. The installer counts the changes of files by
// other tools: only the installer evaluates containerd's files.

const RECORD: &str = "/var/lib/bindguard/install.json";
/// The end of the link to the installed version.
const CURRENT: &str = "lib/bindguard/current";

/// A record has some kilobytes.
const MAX_SIZE: u64 = 16 << 20;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Record {
    files: Vec<File>,
    owed: Vec<OwedRestart>,
    removal: Removal,
}

#[derive(Debug, Deserialize)]
struct File {
    path: PathBuf,
}

#[derive(Debug, Deserialize)]
struct OwedRestart {
    daemon: Option<Daemon>,
}

/// The process that has to be restarted.
#[derive(Debug, Deserialize)]
struct Daemon {
    pid: u32,
    started: u64,
    boot: String,
}

#[derive(Debug, Default, Deserialize)]
struct Removal {
    handler_kept_for_pods: i64,
    programs_kept_for_pods: i64,
}

impl Daemon {
    fn runs(&self) -> bool {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let stat = contents(&[ProcessFile::of(self.pid, "stat")]).pop();
        let started = stat.and_then(|stat| {
            let stat = stat.ok()?;
            stat_number(&String::from_utf8_lossy(&stat), START_TIME)
        });
        boot.trim_end() == self.boot && started == Some(self.started)
    }
}

/// Sets the figures of the installation. It blocks.
fn count_installation(metrics: &Metrics, cri: &Path) {
    match open_of_root(Path::new(RECORD)) {
        Ok(Some(_)) => {
            let bytes = read_file(Path::new(RECORD), MAX_SIZE).unwrap_or_default();
            if let Ok(record) = serde_json::from_slice(&bytes) {
                count_record(metrics, record);
            }
        }
        Ok(None) => count_record(metrics, Record::default()),
        Err(_) => {}
    }
    let drift = &metrics[LevelBy::NodeDrift];
    drift.clear();
    if let Some(count) = recent_drift_count(Path::new(DRIFT_COUNT)) {
        drift.get_or_create(&Vec::new()).set(count.into());
    }
    let mistakes = bindguard_config::load().remarks().len();
    metrics[Level::ConfigMistakes].set(mistakes as i64);
    let active = query(cri, async |cri| cri.active_config().await);
    if let Ok(active) = serde_json::from_str(&active.unwrap_or_default()) {
        let guarded = GuardedRuntimes::of_containerd(&active).runtimes.len();
        metrics[Level::GuardedRuntimes].set(guarded as i64);
    }
}

fn count_record(metrics: &Metrics, record: Record) {
    let removal = record.removal;
    metrics[Level::HandlerKeptForPods].set(removal.handler_kept_for_pods);
    metrics[Level::ProgramsKeptForPods].set(removal.programs_kept_for_pods);
    let (mut owed, mut missing) = (0, 0);
    for daemon in record.owed.iter().flat_map(|owed| &owed.daemon) {
        owed += i64::from(daemon.runs());
    }
    metrics[Level::RestartsOwed].set(owed);
    let installed = &metrics[LevelBy::Installed];
    installed.clear();
    for file in record.files {
        missing += i64::from(fs::metadata(&file.path).is_err());
        if file.path.ends_with(CURRENT)
            && let Ok(target) = fs::read_link(&file.path)
            && let Some(version) = target.file_name()
        {
            let label = ("version", version.to_string_lossy().into_owned());
            installed.get_or_create(&vec![label]).set(1);
        }
    }
    metrics[Level::MissingFiles].set(missing);
}
