//! The agent's figures in OpenMetrics: base units, few labels, none that grows with pods.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bindguard_core::judge::VerdictName;
use bindguard_core::report::{
    Actor, CreateLine, JournalLine, MountResult, Outcome, RebindLine, ReleaseResult, Report,
    Unchecked, UnreadLine,
};
use bindguard_guard::refresh::RefreshError;
use prometheus_client::encoding::EncodeLabelValue;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::sinks::reporting::HangingChildren;

/// Upper bounds of the buckets for a re-bind or a refresh, in seconds.
const BUCKETS: [f64; 10] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0,
];
/// Upper bounds of the buckets for an admission, in seconds.
const ADMISSION_BUCKETS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5];

/// The counted results of releases: a dry run keeps each mount.
const RELEASES: [ReleaseResult; 3] = [
    ReleaseResult::Released,
    ReleaseResult::Busy,
    ReleaseResult::Refused,
];
const REBINDS: [&str; 4] = ["rebound", "already_current", "reported", "failed"];
const REFRESHES: [&str; 10] = [
    "replaced",
    "reported",
    "key_gone",
    "hidden",
    "occupied",
    "missing",
    "restless",
    "refused",
    "failed",
    NOT_NOTIFIED,
];
const NOT_NOTIFIED: &str = "not_notified";

/// A counter for each value of a label.
#[derive(Debug)]
pub struct Counters<V: Clone + Hash + Eq> {
    label: &'static str,
    family: Family<[(&'static str, V); 1], Counter>,
}

/// A counter for each verdict and outcome.
type BindCounters = Family<[(&'static str, &'static str); 2], Counter>;

/// All figures of the agent. Shared by all threads that count.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Updates of kubelet-written volumes with subpaths.
    pub volume_updates: Counter,
    /// Watched volumes of each kubelet `root`; roots are few.
    pub watched_volumes: Family<[(&'static str, String); 1], Gauge>,
    /// Surveys because events were lost, or the folder of the pods came or went.
    pub interruptions: Counter,
    /// Directories that could not be watched.
    pub watch_errors: Counter,
    pub surveys: Counter,
    /// The time of the last survey, in seconds since 1970.
    pub last_survey: Gauge<f64, AtomicU64>,
    /// Restarts of a thread that failed.
    pub restarts: Counter,
    /// Kubelet roots that do not answer.
    pub silent_roots: Gauge,
    /// Children that hang in containers.
    pub hanging_children: HangingChildren,
    hanging_count: Gauge,
    rebinds: Counters<&'static str>,
    rebind_seconds: Histogram,
    refreshes: Counters<&'static str>,
    releases: Counters<&'static str>,
    /// The time to refresh one container.
    pub refresh_seconds: Histogram,
    admission_seconds: Histogram,
    admission_retries: Counter,
    admission_problems: Counter,
    admission_refused: Counter,
    unchecked_creates: Counters<&'static str>,
    /// Binds of new containers that were not compared with their specs.
    pub unproven_binds: Counter,
    admission_binds: BindCounters,
    unread_lines: Counters<&'static str>,
    /// Kubernetes events.
    pub events: Counters<EventResult>,
    /// Requests for events that failed, or were answered with a request for a pause.
    pub event_failures: Counter,
    pub nri: NriMetrics,
    /// Lines that the agent left out of the journal.
    pub unwritten_lines: Counter,
    /// Subpaths, volumes and host-root binds of the last survey, by `kind` and `verdict`.
    pub sources: Family<[(&'static str, &'static str); 2], Gauge>,
    /// Mounts that the host has unmounted and containers keep.
    pub pinned_mounts: Gauge,
    /// Mounts of the host below emptyDirs.
    pub mounts_below_emptydir: Gauge,
    /// Pods whose annotations for live refresh have no effect, in the last survey.
    pub ignored_requests: Gauge,
    /// Pods for which an uninstall left the handler.
    pub handler_kept: Gauge,
    /// Pods for which an uninstall left the programs.
    pub programs_kept: Gauge,
    /// 1 for the installed `version`.
    pub installed: Family<[(&'static str, String); 1], Gauge>,
    /// Runtimes of the running containerd that call the guard.
    pub guarded_runtimes: Gauge,
    /// Daemons that have not read their changed files.
    pub restarts_owed: Gauge,
    /// Files of the installation that are gone.
    pub missing_files: Gauge,
    /// Parts of the installation that other tools changed, without labels. Empty if this is unknown.
    pub drift: Family<[(&'static str, &'static str); 0], Gauge>,
    /// Mistakes in the node's config.
    pub config_mistakes: Gauge,
}

/// The figures of the NRI plugin. Its creates are counted here and not from the journal: the shim may
/// count the same create there.
#[derive(Debug)]
pub struct NriMetrics {
    /// 1 while the runtime accepts the plugin.
    pub connected: Gauge,
    /// Registrations that the runtime accepted.
    pub registrations: Counter,
    creates: Counters<NriAnswer>,
    starts: Counters<StartAnswer>,
    binds: BindCounters,
}

/// The result of an event, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum EventResult {
    /// The API server has it.
    written,
    /// The API server refuses it.
    refused,
    /// Too many events waited.
    queue_full,
    /// It waited too long.
    expired,
    /// Its pod has no sandbox, or the CRI did not answer.
    no_pod,
}

/// The answer to the create of a container, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum NriAnswer {
    /// No change of the spec; stale subpaths may have been re-bound on the host.
    unchanged,
    adjusted,
    /// Policy refused the container.
    refused,
    /// No change: the check took too long, or earlier checks still hang.
    timed_out,
    /// No change: the check panicked, or the request could not be read.
    failed,
}

/// The answer to the start of a container, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum StartAnswer {
    /// It shows no old file.
    current,
    /// The plugin replaced all old files of the container.
    refreshed,
    /// Policy refused the container: a mount differs from its spec.
    refused,
    /// It starts as it is: the check took too long, or earlier checks still hang.
    timed_out,
    /// It starts as it is: an old file could not be replaced, or the check failed.
    failed,
}

impl<V> Counters<V>
where
    V: Clone + Hash + Eq + EncodeLabelValue + std::fmt::Debug + Send + Sync + 'static,
{
    /// An alert on an increase needs the zero before the first event, for each of these values.
    fn new(
        registry: &mut Registry,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        let family = new(registry, name, help);
        let counters = Self { label, family };
        for value in values {
            counters.add(value, 0);
        }
        counters
    }

    pub fn add(&self, value: V, number: usize) {
        let counter = self.family.get_or_create(&[(self.label, value)]);
        counter.inc_by(number as u64);
    }
}

/// A new figure of the registry.
fn new<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Adds a figure in seconds to the registry.
fn in_seconds<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
    metric
}

impl Metrics {
    /// Registers every figure.
    pub fn new() -> Arc<Self> {
        let mut registry = Registry::with_prefix("bindguard");
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The running agent", build);
        let figures = &mut registry;
        let metrics = Self {
            volume_updates: new(
                figures,
                "agent_volume_updates",
                "Updates of volumes with subpaths",
            ),
            watched_volumes: new(figures, "agent_watched_volumes", "Volumes with a watch"),
            interruptions: new(
                figures,
                "agent_watch_interruptions",
                "Surveys because events were lost",
            ),
            watch_errors: new(
                figures,
                "agent_watch_errors",
                "Directories that could not be watched",
            ),
            surveys: new(figures, "agent_surveys", "Surveys of the node"),
            last_survey: in_seconds(
                figures,
                "agent_last_survey_timestamp",
                "Time of the last survey",
                Gauge::default(),
            ),
            restarts: new(
                figures,
                "agent_thread_restarts",
                "Restarts of a thread that failed",
            ),
            silent_roots: new(
                figures,
                "agent_silent_roots",
                "Kubelet roots that do not answer",
            ),
            hanging_children: HangingChildren::default(),
            hanging_count: new(
                figures,
                "agent_hanging_children",
                "Children that a server or daemon of a container keeps waiting; `doctor` names process and container",
            ),
            rebinds: Counters::new(
                figures,
                "subpath_rebinds",
                "Stale subpaths on the host, by outcome",
                "outcome",
                REBINDS,
            ),
            rebind_seconds: in_seconds(
                figures,
                "subpath_rebind",
                "Time to re-bind a volume's subpaths",
                Histogram::new(BUCKETS),
            ),
            refreshes: Counters::new(
                figures,
                "refreshes",
                "Stale mounts of running containers, by outcome",
                "outcome",
                REFRESHES,
            ),
            releases: Counters::new(
                figures,
                "releases",
                "Copies for `bindguard release`, by outcome",
                "outcome",
                RELEASES.map(|result| result.into_str()),
            ),
            refresh_seconds: in_seconds(
                figures,
                "refresh",
                "Time to refresh a running container",
                Histogram::new(BUCKETS),
            ),
            admission_seconds: in_seconds(
                figures,
                "admission",
                "Time of the guard in a create",
                Histogram::new(ADMISSION_BUCKETS),
            ),
            admission_retries: new(
                figures,
                "admission_retries",
                "Creates that the shim tried again",
            ),
            admission_problems: new(figures, "admission_problems", "Errors of the guard itself"),
            admission_refused: new(figures, "admission_refused", "Creates that policy refused"),
            unchecked_creates: Counters::new(
                figures,
                "unchecked_creates",
                "Creates that no guard checked, by reason",
                "reason",
                Unchecked::ALL.iter().map(|reason| reason.into_str()),
            ),
            unproven_binds: new(
                figures,
                "unproven_binds",
                "Binds whose mounts in the container were not compared with the spec",
            ),
            admission_binds: new(
                figures,
                "admission_binds",
                "Checked binds, by verdict and outcome",
            ),
            unread_lines: Counters::new(
                figures,
                "journal_unread_lines",
                "Lines that are not counted",
                "reason",
                [],
            ),
            events: Counters::new(
                figures,
                "events",
                "Kubernetes events, by result",
                "result",
                [
                    EventResult::written,
                    EventResult::refused,
                    EventResult::queue_full,
                    EventResult::expired,
                    EventResult::no_pod,
                ],
            ),
            event_failures: new(
                figures,
                "event_request_failures",
                "Requests for events that failed",
            ),
            nri: NriMetrics {
                connected: new(
                    figures,
                    "nri_connected",
                    "1 while the runtime accepts the NRI plugin",
                ),
                registrations: new(
                    figures,
                    "nri_registrations",
                    "Accepted registrations of the plugin",
                ),
                creates: Counters::new(
                    figures,
                    "nri_creates",
                    "Creates that the plugin answered, by answer",
                    "answer",
                    [
                        NriAnswer::unchanged,
                        NriAnswer::adjusted,
                        NriAnswer::refused,
                        NriAnswer::timed_out,
                        NriAnswer::failed,
                    ],
                ),
                starts: Counters::new(
                    figures,
                    "nri_starts",
                    "Starts that the plugin answered, by answer",
                    "answer",
                    [
                        StartAnswer::current,
                        StartAnswer::refreshed,
                        StartAnswer::refused,
                        StartAnswer::timed_out,
                        StartAnswer::failed,
                    ],
                ),
                binds: new(
                    figures,
                    "nri_binds",
                    "Binds that the plugin checked, by outcome",
                ),
            },
            unwritten_lines: new(
                figures,
                "journal_unwritten_lines",
                "Lines of the agent that were dropped",
            ),
            sources: new(
                figures,
                "sources",
                "Subpaths, volumes and host-root binds of the last survey, by verdict",
            ),
            pinned_mounts: new(
                figures,
                "pinned_mounts",
                "Mounts that the host has unmounted and containers keep",
            ),
            mounts_below_emptydir: new(
                figures,
                "mounts_below_emptydir",
                "Mounts of the host whose files the kubelet removes, or which keep pods Terminating",
            ),
            ignored_requests: new(
                figures,
                "refresh_requests_ignored",
                "Pods whose annotations for refreshes have no effect",
            ),
            handler_kept: new(
                figures,
                "handler_kept_for_pods",
                "Pods for which an uninstall left the handler",
            ),
            programs_kept: new(
                figures,
                "programs_kept_for_pods",
                "Pods for which an uninstall left the programs",
            ),
            installed: new(figures, "installed", "The installed version"),
            guarded_runtimes: new(
                figures,
                "guarded_runtimes",
                "Runtimes of the running containerd that call the guard; 0: the node is not guarded",
            ),
            restarts_owed: new(
                figures,
                "restarts_owed",
                "Daemons that have not read their changed files",
            ),
            missing_files: new(
                figures,
                "missing_files",
                "Files of the installation that are gone",
            ),
            drift: new(
                figures,
                "node_drift",
                "Parts of the installation that other tools changed; none: no installer's pod checks the node",
            ),
            config_mistakes: new(
                figures,
                "config_mistakes",
                "Mistakes in the node's config.toml",
            ),
            registry,
        };
        // As for the other counters, an alert needs the zero.
        count_bind(&metrics.admission_binds, VerdictName::Wrong, None, 0);
        Arc::new(metrics)
    }

    /// Counts the outcomes of a volume's re-bind.
    pub fn rebound(&self, line: &RebindLine) {
        if self.count_rebinds(line) {
            let took = Duration::from_micros(line.duration_us);
            self.rebind_seconds.observe(took.as_secs_f64());
        }
    }

    /// Returns false if no outcome is that of a re-bind.
    fn count_rebinds(&self, line: &RebindLine) -> bool {
        let mut is_any = false;
        for outcome in line.binds.iter().filter_map(|bind| bind.outcome.as_ref()) {
            let label = match outcome {
                Outcome::Planned { .. } => "reported",
                outcome => name_of(Some(outcome)),
            };
            if REBINDS.contains(&label) {
                self.rebinds.add(label, 1);
                is_any = true;
            }
        }
        is_any
    }

    /// Counts the result for a mount of a running container.
    pub fn refreshed(&self, result: &MountResult) {
        let label = match result {
            MountResult::Stale => "reported",
            MountResult::KeyGone => "key_gone",
            result => result.as_str(),
        };
        self.refreshes.add(label, 1);
    }

    /// Counts a container that could not be refreshed at all.
    pub fn not_refreshed(&self, error: &RefreshError) {
        let label = match error {
            RefreshError::NoSpec | RefreshError::OldKernel(_) | RefreshError::Namespace(_) => {
                "refused"
            }
            RefreshError::MountsOfNode(_) | RefreshError::Sandbox(_) => "refused",
            RefreshError::Process(_) | RefreshError::Locked(_) => "failed",
        };
        self.refreshes.add(label, 1);
    }

    /// Counts a refresh of which the application was not notified.
    pub fn not_notified(&self) {
        self.refreshes.add(NOT_NOTIFIED, 1);
    }

    /// Counts a line of the journal. The agent counted its own repairs, and its plugin's creates,
    /// when they happened.
    pub fn journaled(&self, line: &Result<JournalLine, UnreadLine>) {
        match line {
            Ok(JournalLine::Create(line)) => self.created(line),
            Ok(JournalLine::NriCreate(_)) => {}
            Ok(JournalLine::Rebind(line)) if line.by == Actor::Operator => {
                self.count_rebinds(line);
            }
            Ok(JournalLine::Refresh(line)) if line.by == Actor::Operator => {
                for mount in &line.mounts {
                    self.refreshed(&mount.outcome);
                }
            }
            // The agent releases nothing.
            Ok(JournalLine::Release(line)) => {
                for copy in &line.copies {
                    if RELEASES.contains(&copy.result) {
                        self.releases.add(copy.result.into_str(), 1);
                    }
                }
            }
            Ok(JournalLine::Rebind(_) | JournalLine::Refresh(_)) => {}
            Err(UnreadLine::Newer) => self.unread_lines.add("newer", 1),
            Err(UnreadLine::Foreign) => self.unread_lines.add("foreign", 1),
        }
    }

    fn created(&self, line: &CreateLine) {
        let report = &line.report;
        self.admission_refused
            .inc_by(u64::from(line.refused.is_some()));
        if let Some(unchecked) = line.unchecked {
            self.unchecked_creates.add(unchecked.into_str(), 1);
            return;
        }
        // A line with a pid is about a container after its create.
        if line.pid.is_none() {
            let took = report.duration_us as f64 / 1e6;
            self.admission_seconds.observe(took);
            self.admission_retries.inc_by(u64::from(line.attempt > 0));
        }
        self.unproven_binds.inc_by(report.unproven as u64);
        self.admission_problems.inc_by(report.problems.len() as u64);
        for bind in &report.binds {
            count_bind(
                &self.admission_binds,
                bind.verdict,
                bind.outcome.as_ref(),
                1,
            );
        }
    }

    /// The text of `/metrics`.
    ///
    /// # Errors
    /// If a figure cannot be encoded.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let hanging = self.hanging_children.listed().len();
        self.hanging_count.set(hanging as i64);
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl NriMetrics {
    /// Counts an answer to a create.
    pub fn answered(&self, answer: NriAnswer) {
        self.creates.add(answer, 1);
    }

    /// Counts an answer to a start.
    pub fn started(&self, answer: StartAnswer) {
        self.starts.add(answer, 1);
    }

    /// Counts the binds of a create.
    pub fn checked(&self, report: &Report) {
        for bind in &report.binds {
            count_bind(&self.binds, bind.verdict(), bind.outcome.as_ref(), 1);
        }
    }
}

fn count_bind(
    counters: &BindCounters,
    verdict: VerdictName,
    outcome: Option<&Outcome>,
    number: u64,
) {
    let labels = [("verdict", verdict.as_str()), ("outcome", name_of(outcome))];
    counters.get_or_create(&labels).inc_by(number);
}

fn name_of(outcome: Option<&Outcome>) -> &'static str {
    match outcome {
        None => "none",
        Some(Outcome::Rebound { .. }) => "rebound",
        Some(Outcome::AlreadyCurrent) => "already_current",
        Some(Outcome::Detached) => "detached",
        Some(Outcome::PointedAtVolume { .. }) => "pointed_at_volume",
        Some(Outcome::MadeRslave) => "made_rslave",
        Some(Outcome::NeedsSharedMount { .. }) => "needs_shared_mount",
        Some(Outcome::Planned { .. }) => "planned",
        Some(Outcome::Refused) => "refused",
        Some(Outcome::Failed { .. }) => "failed",
    }
}

// Prometheus' text format, for clients that do not take OpenMetrics.
//
// The library writes OpenMetrics alone. The two differ in the declarations: the older format
// declares a counter by the name of its samples, and knows no units, no infos and no end.

/// The same figures in text format 0.0.4.
pub fn plain_text(open_metrics: &str) -> String {
    let samples: HashSet<&str> = open_metrics
        .lines()
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        match declaration(line) {
            None => text.push_str(line),
            Some((word, name, rest)) => {
                let sample = ["_total", "_info"]
                    .map(|suffix| format!("{name}{suffix}"))
                    .into_iter()
                    .find(|sample| samples.contains(sample.as_str()));
                let rest = if rest == "info" { "gauge" } else { rest };
                let name = sample.as_deref().unwrap_or(name);
                text.push_str(&format!("# {word} {name} {rest}"));
            }
        }
        text.push('\n');
    }
    text
}

/// The word, the name and the rest of a line that declares a figure.
fn declaration(line: &str) -> Option<(&str, &str, &str)> {
    let mut words = line.strip_prefix("# ")?.splitn(3, ' ');
    Some((words.next()?, words.next()?, words.next()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use bindguard_core::judge::{Finding, Verdict};
    use bindguard_core::report::{BindReport, Report};
    use bindguard_core::source::SourceKind;

    use super::*;

    /// A report on a single bind.
    fn reported(outcome: Outcome) -> Report {
        let finding = Finding {
            bind: None,
            source: "/s".into(),
            destination: None,
            kind: SourceKind::HostRoot,
            verdict: Verdict::Dead("why".to_owned()),
        };
        Report {
            binds: vec![BindReport {
                finding,
                outcome: Some(outcome),
            }],
            ..Report::default()
        }
    }

    fn is_counted(metrics: &Metrics, line: &str) -> bool {
        metrics
            .text()
            .unwrap()
            .lines()
            .any(|counted| counted == line)
    }

    /// The journal has the agent's own repairs, and a create that plugin and shim both checked,
    /// twice.
    #[test]
    fn a_line_is_counted_only_if_the_agent_did_not_count_it_before() {
        let metrics = Metrics::new();
        let binds = r#""binds":[{"source":"/s","kind":"subpath","verdict":"stale","reason":"r","outcome":{"result":"rebound","tries":1}}]"#;
        let create = |head: &str| {
            format!(r#"{{{head}"time":null,"attempt":0,{binds},"foreign":0,"duration_us":1}}"#)
        };
        let repair = |kind: &str, by: &str, more: &str| {
            format!(
                r#"{{"version":2,"kind":"{kind}","time":null,"by":"{by}",{more},"duration_us":1}}"#
            )
        };
        let rebind = format!(r#""container":{{"uid":"u"}},"volume":"conf",{binds}"#);
        let refresh = r#""id":"c","mounts":[{"destination":"/d","source":"/s","outcome":{"result":"replaced","method":"beneath"}}]"#;
        let release = r#""id":"c","copies":[{"mount_point":"/d","fs_type":"ext4","device":"8:16","result":"busy","error":"e"}]"#;
        for line in [
            create(r#""version":1,"#),
            create(r#""version":2,"kind":"nri-create","#),
            repair("rebind", "agent", &rebind),
            repair("rebind", "operator", &rebind),
            repair("refresh", "agent", refresh),
            repair("refresh", "operator", refresh),
            repair("release", "operator", release),
        ] {
            metrics.journaled(&Ok(JournalLine::parse(&line).unwrap()));
        }
        for line in [
            "bindguard_admission_binds_total{verdict=\"stale\",outcome=\"rebound\"} 1",
            "bindguard_admission_seconds_count 1",
            "bindguard_subpath_rebinds_total{outcome=\"rebound\"} 1",
            "bindguard_refreshes_total{outcome=\"replaced\"} 1",
            "bindguard_releases_total{outcome=\"busy\"} 1",
            "bindguard_releases_total{outcome=\"released\"} 0",
        ] {
            assert!(
                is_counted(&metrics, line),
                "{line} is not in\n{}",
                metrics.text().unwrap()
            );
        }
    }

    #[test]
    fn a_rebind_is_counted_once_by_its_outcome() {
        let metrics = Metrics::new();
        let mut report = reported(Outcome::Rebound { tries: 1 });
        report.binds.push(BindReport {
            outcome: None,
            ..report.binds[0].clone()
        });
        for report in [report, Report::default()] {
            metrics.rebound(&RebindLine::new(Actor::Agent, "u", "conf", &report));
        }
        let text = metrics.text().unwrap();
        for line in [
            "bindguard_subpath_rebinds_total{outcome=\"rebound\"} 1",
            "bindguard_subpath_rebind_seconds_count 1",
            concat!(
                "bindguard_build_info{version=\"",
                env!("CARGO_PKG_VERSION"),
                "\"} 1"
            ),
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    /// The text of `/metrics` with a sample of every figure.
    fn with_every_figure() -> String {
        let metrics = Metrics::new();
        metrics
            .watched_volumes
            .get_or_create(&[("root", "/k".to_owned())])
            .set(1);
        metrics
            .sources
            .get_or_create(&[("kind", "subpath"), ("verdict", "stale")])
            .set(1);
        let version = [("version", env!("CARGO_PKG_VERSION").to_owned())];
        metrics.installed.get_or_create(&version).set(1);
        metrics.drift.get_or_create(&[]).set(0);
        let line = r#"{"version":1,"time":null,"attempt":0,"binds":[{"source":"/s","kind":"subpath","verdict":"current"}],"foreign":0,"duration_us":1}"#;
        metrics.journaled(&JournalLine::parse(line));
        metrics.journaled(&JournalLine::parse("nonsense"));
        metrics.nri.checked(&reported(Outcome::MadeRslave));
        metrics.text().unwrap()
    }

    /// The lines of docs/agent.md: each figure with its labels, its text, and the values of a label
    /// that are counted from the start.
    fn documented(text: &str) -> String {
        let text = plain_text(text);
        let mut lines = String::new();
        for help in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
            let (name, help) = help.split_once(' ').unwrap();
            let mut labels: Vec<(&str, Vec<&str>)> = Vec::new();
            for sample in text.lines() {
                let Some((_, rest)) = sample.split_once('{').filter(|(it, _)| *it == name) else {
                    continue;
                };
                for label in rest.split('}').next().unwrap().split(',') {
                    // a figure without labels that can be absent has empty braces
                    let Some((label, value)) = label.split_once('=') else {
                        continue;
                    };
                    let known = labels.iter().position(|(it, _)| *it == label);
                    let known = known.unwrap_or_else(|| {
                        labels.push((label, Vec::new()));
                        labels.len() - 1
                    });
                    labels[known].1.push(value.trim_matches('"'));
                    labels[known].1.sort_unstable();
                }
            }
            let names: Vec<&str> = labels.iter().map(|(name, _)| *name).collect();
            let names = match names.is_empty() {
                true => String::new(),
                false => format!("{{{}}}", names.join(",")),
            };
            lines += &format!("* `{name}{names}`: {}", help.trim_end_matches('.'));
            if let [(_, values)] = &labels[..]
                && values.len() > 1
            {
                lines += &format!(": `{}`", values.join("`, `"));
            }
            lines.push('\n');
        }
        lines
    }

    #[test]
    fn the_page_has_the_figures_of_today() {
        let figures = documented(&with_every_figure());
        let page = include_str!("../../../../docs/agent.md");
        assert!(page.contains(&figures), "docs/agent.md lacks:\n{figures}");
    }

    /// Rules, dashboard and document name figures that the agent has.
    #[test]
    fn every_figure_that_is_named_is_there() {
        let text = with_every_figure();
        let is_there = |name: &str| {
            text.lines()
                .any(|line| line.split(['{', ' ']).next() == Some(name))
        };
        for (file, named) in [
            (
                "rules.yaml",
                include_str!("../../../../config/prometheus/rules.yaml"),
            ),
            (
                "rules_test.yaml",
                include_str!("../../../../config/prometheus/rules_test.yaml"),
            ),
            (
                "dashboard.json",
                include_str!("../../../../config/prometheus/dashboard.json"),
            ),
            ("agent.md", include_str!("../../../../docs/agent.md")),
        ] {
            let words = named.split(|c: char| !c.is_ascii_lowercase() && c != '_');
            let mut found = 0;
            for name in words.filter(|word| word.starts_with("bindguard_")) {
                found += 1;
                let is_histogram = || is_there(&format!("{name}_count"));
                assert!(is_there(name) || is_histogram(), "{file} names {name}");
            }
            assert!(found > 5, "{file} names only {found} figures");
        }
    }

    #[test]
    fn counters_and_infos_are_declared_by_their_samples() {
        let text = plain_text(
            "# HELP b_creates Creates.\n# TYPE b_creates counter\nb_creates_total{a=\"x\"} 1\n\
             # HELP b_build About.\n# TYPE b_build info\nb_build_info{version=\"1\"} 1\n\
             # HELP b_wait_seconds Time.\n# TYPE b_wait_seconds gauge\n# UNIT b_wait_seconds seconds\nb_wait_seconds 2\n# EOF\n",
        );
        assert_eq!(
            text,
            "# HELP b_creates_total Creates.\n# TYPE b_creates_total counter\nb_creates_total{a=\"x\"} 1\n\
             # HELP b_build_info About.\n# TYPE b_build_info gauge\nb_build_info{version=\"1\"} 1\n\
             # HELP b_wait_seconds Time.\n# TYPE b_wait_seconds gauge\nb_wait_seconds 2\n"
        );
    }
}
