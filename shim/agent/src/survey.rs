//! The survey of the node: every subpath and volume with its verdict, as `bindguard diagnose` prints it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::survey_node;

use crate::events::Standing;
use crate::metrics::{Metrics, SourceLabels};
use crate::pods::PodLookup;
use crate::reporting::Reporting;
use crate::wall_clock::since_epoch;

/// The time for which a survey's text is served again: a survey reads every mount, and requests are free.
const FRESH: Duration = Duration::from_secs(10);

/// Surveys the node on request, and keeps the last report.
#[derive(Debug)]
pub struct Surveyor {
    policy: Policy,
    places: Places,
    metrics: Arc<Metrics>,
    reporting: Reporting,
    pods: PodLookup,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    report: Option<(Instant, Arc<str>)>,
    occurrences: Standing<()>,
}

impl Surveyor {
    /// A surveyor without a report.
    pub fn new(config: &Config, metrics: Arc<Metrics>, reporting: Reporting, pods: PodLookup) -> Self {
        let (policy, places) = (*config.policy(), config.places().clone());
        Self { policy, places, metrics, reporting, pods, last: Mutex::default() }
    }

    /// Surveys the node for figures and events. It blocks: call it from a thread that may wait for a server.
    pub fn survey(&self) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // An idle agent keeps no text that was requested once.
        last.report = None;
        self.report(&mut last);
    }

    /// The report as JSON, at most some seconds old. It blocks, as [`Surveyor::survey`].
    pub fn json(&self) -> Arc<str> {
        // Held during the survey: of several requests at once, one surveys and the others get its report.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = last.report.as_ref().filter(|(when, _)| when.elapsed() < FRESH) {
            return Arc::clone(text);
        }
        let report = self.report(&mut last);
        let text: Arc<str> = serde_json::to_string(&report).unwrap_or_default().into();
        last.report = Some((Instant::now(), Arc::clone(&text)));
        text
    }

    fn report(&self, last: &mut Last) -> NodeReport {
        // Names are a convenience: a runtime that does not answer costs them, and no finding.
        let pods = self.pods.all().unwrap_or_default();
        let report = survey_node(&self.policy, &self.places, &pods, |_| true);
        self.count(&report);
        self.reporting.surveyed(&report, &mut last.occurrences);
        report
    }

    fn count(&self, report: &NodeReport) {
        let mut found = BTreeMap::<_, i64>::new();
        for bind in &report.binds {
            *found.entry((bind.bind.kind().as_str().to_owned(), bind.bind.verdict().to_string())).or_default() += 1;
        }
        self.metrics.sources.clear();
        for ((kind, verdict), count) in found {
            self.metrics.sources.get_or_create(&SourceLabels { kind, verdict }).set(count);
        }
        self.metrics.surveys.inc();
        self.metrics.last_survey.set(since_epoch().as_secs_f64());
    }
}
