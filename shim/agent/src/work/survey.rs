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
use bindguard_operator::cri::of_node::query;
use bindguard_operator::drift_count::DRIFT_COUNT;
use bindguard_operator::guarded_runtimes::GuardedRuntimes;
use bindguard_operator::ignored_requests::ignored_requests;
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::pods::Pods;
use bindguard_operator::root_program::open_of_root;
use bindguard_operator::{drift_count, survey_node};
use bindguard_sys::process_files::{ProcessFile, contents};
use bindguard_sys::read_file;
use serde::Deserialize;
use tracing::{info, warn};

use crate::host::since_epoch;
use crate::pods::PodLookup;
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
    failure: Option<String>,
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
        !last.has_no_pods && last.failure.is_none()
    }

    /// The report as JSON, at most some seconds old. It blocks, as [`Surveyor::survey`].
    ///
    /// # Errors
    /// If the report cannot be written as JSON.
    pub fn json(&self) -> serde_json::Result<Arc<str>> {
        // Held during the survey: of several requests at once, one surveys and the others get its
        // report.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = last
            .report
            .as_ref()
            .filter(|(when, _)| when.elapsed() < FRESH)
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
        let mounts = pods
            .as_ref()
            .ok()
            .and_then(|pods| self.container_mounts(pods, last));
        if let Ok(pods) = &pods {
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

    /// Not a part of the report: `diagnose` reports sources, and the doctor every mount namespace.
    fn container_mounts(&self, pods: &Pods, last: &mut Last) -> Option<ContainerMounts> {
        let found = container_mounts(pods, &self.places, self.policy.host_root_scope);
        let failure = found.as_ref().err().map(|error| error_chain(error));
        if let Some(failure) = failure
            .as_ref()
            .filter(|failure| last.failure.as_ref() != Some(failure))
        {
            warn!("survey the mounts of containers: {failure}; trying again");
        }
        last.failure = failure;
        found.ok()
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
        let places: BTreeSet<_> = found
            .keepers
            .iter()
            .flat_map(|keeper| &keeper.places)
            .collect();
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
    let record = match open_of_root(Path::new(RECORD)) {
        Ok(Some(_)) => read_file(Path::new(RECORD), MAX_SIZE)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok()),
        Ok(None) => Some(Record::default()),
        Err(_) => None,
    };
    if let Some(record) = record {
        count_record(metrics, &record);
    }
    metrics.drift.clear();
    if let Some(count) = drift_count::recent(Path::new(DRIFT_COUNT)) {
        metrics.drift.get_or_create(&[]).set(count.into());
    }
    let mistakes = bindguard_config::load().remarks().len();
    metrics.config_mistakes.set(mistakes as i64);
    let active = query(cri, async |cri| cri.active_config().await);
    if let Some(active) = active
        .ok()
        .and_then(|config| serde_json::from_str(&config).ok())
    {
        let guarded = GuardedRuntimes::of_containerd(&active).runtimes.len();
        metrics.guarded_runtimes.set(guarded as i64);
    }
}

fn count_record(metrics: &Metrics, record: &Record) {
    let Removal {
        handler_kept_for_pods,
        programs_kept_for_pods,
    } = record.removal;
    metrics.handler_kept.set(handler_kept_for_pods);
    metrics.programs_kept.set(programs_kept_for_pods);
    let owed = record.owed.iter().filter_map(|owed| owed.daemon.as_ref());
    let owed = owed.filter(|daemon| daemon.runs()).count();
    metrics.restarts_owed.set(owed as i64);
    let is_missing = |file: &&File| fs::metadata(&file.path).is_err();
    let missing = record.files.iter().filter(is_missing).count();
    metrics.missing_files.set(missing as i64);
    metrics.installed.clear();
    let current = record
        .files
        .iter()
        .find(|file| file.path.ends_with(CURRENT));
    let target = current.and_then(|current| fs::read_link(&current.path).ok());
    let version = target.as_deref().and_then(Path::file_name);
    if let Some(version) = version {
        let label = [("version", version.to_string_lossy().into_owned())];
        metrics.installed.get_or_create(&label).set(1);
    }
}
