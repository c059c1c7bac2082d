//! The survey of the node: every subpath and volume with its verdict, as `bindguard diagnose`
//! prints it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::judge::VerdictName;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::source::KindName;
use bindguard_operator::container_mounts::{ContainerMounts, container_mounts};
use bindguard_operator::ignored_requests::ignored_requests;
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::pods::Pods;
use bindguard_operator::survey_node;
use tracing::{info, warn};

use crate::pods::PodLookup;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::{Reporting, SurveyEvents};
use crate::wall_clock::since_epoch;
use crate::work::installation;

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
        installation::count(&self.metrics, &self.cri);
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
