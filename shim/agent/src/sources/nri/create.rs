//! The guard's admission of a new container, before the runtime writes the bundle.
//!
//! The guard reads a spec, so this module writes the request as a spec. Stale subpaths are re-bound
//! on the host; edits of the spec become an adjustment.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use bindguard_config::Config;
use bindguard_core::report::{Report, Severity};
use bindguard_guard::{Admission, admit_spec};
use bindguard_sys::read_mount_table;
use serde_json::json;
use tracing::{info, warn};

use super::adjustment;
use super::deadline::{Deadline, NoResult};
use super::expected::ExpectedOfContainers;
use super::messages::{CreateContainerRequest, NriContainer, NriMount, PodSandbox};
use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::{Metrics, NriAnswer};
use crate::threads::spawn;

/// The runtime waits 2 s for a plugin, then closes its connection and creates the container without
/// it.
const LIMIT: Duration = Duration::from_millis(500);

/// Answers the requests.
#[derive(Debug)]
pub struct Creates {
    config: Arc<Config>,
    deadline: Deadline,
    reports: Sender<CreateReport>,
    metrics: Arc<Metrics>,
    expected: Arc<ExpectedOfContainers>,
}

/// The report on the container with this id.
#[derive(Debug)]
struct CreateReport {
    id: String,
    report: Report,
}

/// Policy refuses the container, for this reason.
#[derive(Debug, thiserror::Error)]
#[error("bindguard refuses the container: {0}")]
pub struct CreateRefused(pub(super) String);

impl Creates {
    /// Starts the thread that writes reports: a create waits neither for the log nor for the
    /// journal.
    pub fn new(
        config: &Config,
        metrics: Arc<Metrics>,
        journal: JournalWriter,
        expected: Arc<ExpectedOfContainers>,
    ) -> Self {
        let (reports, received) = channel();
        if let Err(error) = spawn("nri-reports", move || write_reports(&received, &journal)) {
            warn!("creates through NRI are not reported: {error:#}");
        }
        Self {
            config: Arc::new(config.clone()),
            deadline: Deadline::default(),
            reports,
            metrics,
            expected,
        }
    }

    /// The figures.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The adjusted mounts of a new container; none if it needs no adjustment, or could not be
    /// checked in time.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub fn adjust(&self, request: CreateContainerRequest) -> Result<Vec<NriMount>, CreateRefused> {
        let (pod, container) = (
            request.pod.unwrap_or_default(),
            request.container.unwrap_or_default(),
        );
        let (id, config) = (container.id.clone(), Arc::clone(&self.config));
        match self
            .deadline
            .within(LIMIT, move || admitted(&pod, &container, &config))
        {
            Ok((admission, mounts)) => {
                self.metrics.nri.checked(&admission.report);
                self.metrics
                    .nri
                    .answered(match (&admission.refusal, mounts.is_empty()) {
                        (Some(_), _) => NriAnswer::refused,
                        (None, false) => NriAnswer::adjusted,
                        (None, true) => NriAnswer::unchanged,
                    });
                // Without the thread there is no journal; its failure was reported.
                let _ = self.reports.send(CreateReport {
                    id: id.clone(),
                    report: admission.report,
                });
                if let Some(reason) = admission.refusal {
                    return Err(CreateRefused(reason));
                }
                self.expected.keep(id, admission.expected);
                Ok(mounts)
            }
            Err(no_result) => {
                self.metrics.nri.answered(match no_result {
                    NoResult::Late(_) | NoResult::Busy(_) => NriAnswer::timed_out,
                    NoResult::Panicked | NoResult::NoThread => NriAnswer::failed,
                });
                warn!("container {id} is created as it is: check its mounts: {no_result}");
                Ok(Vec::new())
            }
        }
    }
}

fn admitted(
    pod: &PodSandbox,
    container: &NriContainer,
    config: &Config,
) -> (Admission, Vec<NriMount>) {
    let spec = spec(pod, container).to_string();
    let mut accepted = Vec::new();
    let admission = admit_spec(
        spec.as_bytes(),
        config.policy(),
        config.places(),
        LIMIT,
        |_, edits| {
            let table = if edits.is_empty() {
                None
            } else {
                read_mount_table().ok()
            };
            accepted = adjustment::accepted(edits, &container.mounts, table.as_ref());
            accepted.clone()
        },
    );
    (admission, adjustment::mounts(&accepted, &container.mounts))
}

/// The request as a spec. The runtime itself makes the root rslave for every rslave mount, so the
/// spec has it already.
fn spec(pod: &PodSandbox, container: &NriContainer) -> serde_json::Value {
    let mut annotations = pod.annotations.clone();
    // The names are the runtime's, whatever the pod's annotations claim.
    annotations.extend(
        [
            ("io.kubernetes.cri.container-name", &container.name),
            ("io.kubernetes.cri.sandbox-name", &pod.name),
            ("io.kubernetes.cri.sandbox-namespace", &pod.namespace),
            ("io.kubernetes.cri.sandbox-uid", &pod.uid),
        ]
        .map(|(key, value)| (key.to_owned(), value.clone())),
    );
    let mount = |mount: &NriMount| {
        let NriMount {
            destination,
            r#type,
            source,
            options,
        } = mount;
        json!({"destination": destination, "type": r#type, "source": source, "options": options})
    };
    let mounts: Vec<_> = container.mounts.iter().map(mount).collect();
    json!({"annotations": annotations, "linux": {"rootfsPropagation": "rslave"}, "mounts": mounts})
}

fn write_reports(received: &Receiver<CreateReport>, journal: &JournalWriter) {
    for CreateReport { id, report } in received {
        for problem in &report.problems {
            warn!("container {id}: {problem}");
        }
        for (severity, message) in report.binds.iter().filter_map(|bind| bind.log_message()) {
            match severity {
                Severity::Info => info!("container {id}: {message}"),
                Severity::Warning => warn!("container {id}: {message}"),
            }
        }
        // The shim writes every create to the journal. A healthy create is not written twice.
        let has_finding = report
            .binds
            .iter()
            .any(|bind| bind.finding.verdict.is_finding());
        if has_finding || !report.problems.is_empty() {
            journal.nri_create(&id, None, report);
        }
    }
}
