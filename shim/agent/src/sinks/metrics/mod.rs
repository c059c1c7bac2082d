//! The agent's figures in OpenMetrics: base units, few labels, none that grows with pods.

mod outcomes;
mod plain_text;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bindguard_core::judge::VerdictName;
use bindguard_core::report::{Actor, JournalLine, Outcome, RebindLine, ReleaseResult, UnreadLine};
use prometheus_client::encoding::EncodeLabelValue;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::sinks::metrics::outcomes::AdmissionMetrics;
use crate::sinks::metrics::outcomes::RebindOutcome;
use crate::sinks::reporting::HangingChildren;

pub use crate::sinks::metrics::outcomes::RefreshResult;
pub use crate::sinks::metrics::outcomes::{NriAnswer, NriMetrics, StartAnswer};
pub use crate::sinks::metrics::plain_text::plain_text;

/// Upper bounds of the buckets for a re-bind or a refresh, in seconds.
const BUCKETS: [f64; 10] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0,
];

/// A counter for each value of a label.
type Counters<V> = Family<[(&'static str, V); 1], Counter>;

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
    rebinds: Counters<RebindOutcome>,
    rebind_seconds: Histogram,
    refreshes: Counters<RefreshResult>,
    releases: Counters<&'static str>,
    /// The time to refresh one container.
    pub refresh_seconds: Histogram,
    admissions: AdmissionMetrics,
    /// Kubernetes events.
    pub events: EventMetrics,
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

/// The counted results: a dry run keeps each mount.
const RELEASES: [ReleaseResult; 3] = [
    ReleaseResult::Released,
    ReleaseResult::Busy,
    ReleaseResult::Refused,
];

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
            rebinds: new(
                figures,
                "subpath_rebinds",
                "Stale subpaths on the host, by outcome",
            ),
            rebind_seconds: in_seconds(
                figures,
                "subpath_rebind",
                "Time to re-bind a volume's subpaths",
                Histogram::new(BUCKETS),
            ),
            refreshes: new(
                figures,
                "refreshes",
                "Stale mounts of running containers, by outcome",
            ),
            releases: new(
                figures,
                "releases",
                "Copies for `bindguard release`, by outcome",
            ),
            refresh_seconds: in_seconds(
                figures,
                "refresh",
                "Time to refresh a running container",
                Histogram::new(BUCKETS),
            ),
            admissions: AdmissionMetrics::new(figures),
            events: EventMetrics::new(figures),
            nri: NriMetrics::new(figures),
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
        // An alert on an increase needs the zero before the first event.
        for outcome in RebindOutcome::ALL {
            drop(metrics.rebinds.get_or_create(&[("outcome", outcome)]));
        }
        for outcome in RefreshResult::ALL {
            drop(metrics.refreshes.get_or_create(&[("outcome", outcome)]));
        }
        for outcome in RELEASES {
            drop(
                metrics
                    .releases
                    .get_or_create(&[("outcome", outcome.into_str())]),
            );
        }
        Arc::new(metrics)
    }

    /// Counts the outcomes of a volume's re-bind.
    pub fn rebound(&self, line: &RebindLine) {
        let outcomes = line.binds.iter().filter_map(|bind| bind.outcome.as_ref());
        if outcomes
            .filter(|outcome| self.count_rebind(outcome))
            .count()
            > 0
        {
            let took = Duration::from_micros(line.duration_us);
            self.rebind_seconds.observe(took.as_secs_f64());
        }
    }

    /// Returns false if the outcome is not a re-bind.
    fn count_rebind(&self, outcome: &Outcome) -> bool {
        let outcome = RebindOutcome::of(outcome);
        outcome
            .map(|outcome| self.rebinds.get_or_create(&[("outcome", outcome)]).inc())
            .is_some()
    }

    /// Counts binds of a new container that were not compared with its spec.
    pub fn unproven(&self, binds: usize) {
        self.admissions.count_unproven(binds);
    }

    /// Counts the outcome for a mount of a running container.
    pub fn refreshed(&self, outcome: RefreshResult) {
        self.refreshes.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Counts a line of the journal. The agent counted its own repairs, and its plugin's creates,
    /// when they happened.
    pub fn journaled(&self, line: &Result<JournalLine, UnreadLine>) {
        match line {
            Ok(JournalLine::Create(line)) => self.admissions.count(line),
            Ok(JournalLine::NriCreate(_)) => {}
            Ok(JournalLine::Rebind(line)) if line.by == Actor::Operator => {
                for outcome in line.binds.iter().filter_map(|bind| bind.outcome.as_ref()) {
                    self.count_rebind(outcome);
                }
            }
            Ok(JournalLine::Refresh(line)) if line.by == Actor::Operator => {
                line.mounts
                    .iter()
                    .for_each(|mount| self.refreshed(RefreshResult::of(&mount.outcome)));
            }
            // The agent releases nothing.
            Ok(JournalLine::Release(line)) => {
                let results = line.copies.iter().map(|copy| copy.result);
                for result in results.filter(|result| RELEASES.contains(result)) {
                    let label = [("outcome", result.into_str())];
                    self.releases.get_or_create(&label).inc();
                }
            }
            Ok(JournalLine::Rebind(_) | JournalLine::Refresh(_)) => {}
            Err(unread) => self.admissions.count_unread(*unread),
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

// Checked binds, by verdict and outcome.

/// A counter for each verdict and outcome.
type BindCounters = Family<[(&'static str, &'static str); 2], Counter>;

/// The labels of a bind.
fn bind_labels(
    verdict: VerdictName,
    outcome: Option<&Outcome>,
) -> [(&'static str, &'static str); 2] {
    [("verdict", verdict.as_str()), ("outcome", name_of(outcome))]
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

// Figures of the Kubernetes events that the agent writes.

/// The figures of all events.
#[derive(Debug)]
pub struct EventMetrics {
    results: Counters<EventResult>,
    /// Requests that failed, or were answered with a request for a pause.
    pub failures: Counter,
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

impl EventMetrics {
    const RESULTS: [EventResult; 5] = [
        EventResult::written,
        EventResult::refused,
        EventResult::queue_full,
        EventResult::expired,
        EventResult::no_pod,
    ];

    fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            results: new(registry, "events", "Kubernetes events, by result"),
            failures: new(
                registry,
                "event_request_failures",
                "Requests for events that failed",
            ),
        };
        // An alert on an increase needs the zero before the first event.
        Self::RESULTS
            .iter()
            .for_each(|result| metrics.count(*result, 0));
        metrics
    }

    /// Counts events with this result.
    pub fn count(&self, result: EventResult, number: usize) {
        self.results
            .get_or_create(&[("result", result)])
            .inc_by(number as u64);
    }
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
        let page = include_str!("../../../../../docs/agent.md");
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
                include_str!("../../../../../config/prometheus/rules.yaml"),
            ),
            (
                "rules_test.yaml",
                include_str!("../../../../../config/prometheus/rules_test.yaml"),
            ),
            (
                "dashboard.json",
                include_str!("../../../../../config/prometheus/dashboard.json"),
            ),
            ("agent.md", include_str!("../../../../../docs/agent.md")),
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
}
