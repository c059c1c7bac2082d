//! The survey of the node: every subpath and volume with its verdict, as `bindguard diagnose`
//! prints it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::judge::VerdictName;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::process_stat::{START_TIME, number};
use bindguard_core::source::KindName;
use bindguard_operator::container_mounts::{ContainerMounts, container_mounts};
use bindguard_operator::cri::query;
use bindguard_operator::doctor::GuardedRuntimes;
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::pods::ignored_requests;
use bindguard_operator::root_program::{DRIFT_COUNT, open_of_root, recent_drift_count};
use bindguard_operator::survey_node;
use bindguard_sys::process_files::{ProcessFile, contents};
use bindguard_sys::read_file;
use serde::Deserialize;
use tracing::info;

use crate::host::since_epoch;
use crate::pods::PodLookup;
use crate::say_once::SayOnce;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::{Reporting, SurveyEvents};

/// The time for which a survey's text is served again: a survey reads every mount, and requests are
/// free.
const FRESH: Duration = Duration::from_secs(10);

/// Surveys the node on request, and keeps the last report.
#[derive(Debug)]
pub struct Surveyor {
    policy: Policy,
    places: Places,
    metrics: Arc<Metrics>,
    reporting: Reporting,
    pods: PodLookup,
    cri: PathBuf,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    report: Option<(Instant, Arc<str>)>,
    events: SurveyEvents,
    failures: SayOnce<String>,
    are_mounts_unread: bool,
    /// The runtime did not answer.
    has_no_pods: bool,
}

impl Surveyor {
    /// A surveyor without a report.
    pub fn new(
        config: &Config,
        metrics: Arc<Metrics>,
        reporting: Reporting,
        pods: PodLookup,
        cri: &Path,
    ) -> Self {
        let (policy, places) = (*config.policy(), config.places().clone());
        Self {
            policy,
            places,
            metrics,
            reporting,
            pods,
            cri: cri.to_owned(),
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
    pub fn json(&self) -> serde_json::Result<Arc<str>> {
        // Held during the survey: of several requests at once, one surveys and the others get its
        // report.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, text)) = &last.report
            && when.elapsed() < FRESH
        {
            return Ok(Arc::clone(text));
        }
        let report = self.report(&mut last);
        let text: Arc<str> = serde_json::to_string(&report)?.into();
        last.report = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }

    fn report(&self, last: &mut Last) -> NodeReport {
        let pods = self.pods.all();
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
            let found = container_mounts(pods, &self.places, self.policy.host_root_scope);
            last.are_mounts_unread = found.is_err();
            last.failures.warn(
                (),
                found.as_ref().err().map(|error| {
                    let why = error_chain(error);
                    format!("survey the mounts of containers: {why}; trying again")
                }),
            );
            mounts = found.ok();
            let ignored = self
                .reporting
                .ignored_requests(ignored_requests(pods), &mut last.events);
            self.metrics.ignored_requests.set(ignored as i64);
        }
        // Names are a convenience: a runtime that does not answer costs them, and no finding.
        let report = survey_node(
            &self.policy,
            &self.places,
            &pods.unwrap_or_default(),
            |_| true,
        );
        self.count(&report);
        count(&self.metrics, &self.cri);
        self.reporting.surveyed(&report, &mut last.events);
        if let Some(mounts) = mounts {
            self.count_mounts(&mounts);
            self.reporting
                .surveyed_containers(&mounts, &mut last.events);
        }
        report
    }

    fn count_mounts(&self, found: &ContainerMounts) {
        for (verdict, count) in [
            (VerdictName::Current, found.following_host),
            (VerdictName::Pinning, found.private),
        ] {
            let labels = source_labels(KindName::HostRoot, verdict);
            let figure = self.metrics.sources.get_or_create(&labels);
            figure.set(count as i64);
        }
        let mut places = BTreeSet::new();
        for keeper in &found.keepers {
            places.extend(&keeper.places);
        }
        self.metrics.pinned_mounts.set(places.len() as i64);
    }

    fn count(&self, report: &NodeReport) {
        let mut found = BTreeMap::<_, i64>::new();
        for bind in &report.binds {
            let labels = source_labels(bind.bind.kind(), bind.bind.verdict());
            *found.entry(labels).or_default() += 1;
        }
        self.metrics.sources.clear();
        for (labels, count) in found {
            self.metrics.sources.get_or_create(&labels).set(count);
        }
        let below = report.mounts_below_emptydir.len();
        self.metrics.mounts_below_emptydir.set(below as i64);
        self.metrics.surveys.inc();
        self.metrics.last_survey.set(since_epoch().as_secs_f64());
    }
}

fn source_labels(kind: KindName, verdict: VerdictName) -> [(&'static str, &'static str); 2] {
    [("kind", kind.as_str()), ("verdict", verdict.as_str())]
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
            number(&String::from_utf8_lossy(&stat), START_TIME)
        });
        boot.trim_end() == self.boot && started == Some(self.started)
    }
}

/// Sets the figures of the installation. It blocks.
pub fn count(metrics: &Metrics, cri: &Path) {
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
    metrics.drift.clear();
    if let Some(count) = recent_drift_count(Path::new(DRIFT_COUNT)) {
        metrics.drift.get_or_create(&[]).set(count.into());
    }
    let mistakes = bindguard_config::load().remarks().len();
    metrics.config_mistakes.set(mistakes as i64);
    let active = query(cri, async |cri| cri.active_config().await);
    if let Ok(active) = serde_json::from_str(&active.unwrap_or_default()) {
        let guarded = GuardedRuntimes::of_containerd(&active).runtimes.len();
        metrics.guarded_runtimes.set(guarded as i64);
    }
}

fn count_record(metrics: &Metrics, record: Record) {
    let removal = record.removal;
    metrics.handler_kept.set(removal.handler_kept_for_pods);
    metrics.programs_kept.set(removal.programs_kept_for_pods);
    let (mut owed, mut missing) = (0, 0);
    for daemon in record.owed.iter().filter_map(|owed| owed.daemon.as_ref()) {
        owed += i64::from(daemon.runs());
    }
    metrics.restarts_owed.set(owed);
    metrics.installed.clear();
    for file in record.files {
        missing += i64::from(fs::metadata(&file.path).is_err());
        if file.path.ends_with(CURRENT)
            && let Ok(target) = fs::read_link(&file.path)
            && let Some(version) = target.file_name()
        {
            let label = [("version", version.to_string_lossy().into_owned())];
            metrics.installed.get_or_create(&label).set(1);
        }
    }
    metrics.missing_files.set(missing);
}
