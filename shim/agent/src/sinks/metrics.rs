//! The agent's figures in OpenMetrics: base units, few labels, none that grows with pods.
//!
//! The name of a variant is the name of a figure, and its comment is the figure's help text.

use std::collections::{BTreeMap, HashSet};
use std::ops::Index;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bindguard_core::judge::VerdictName;
use bindguard_core::report::{
    Actor, JournalLine, MountResult, Outcome, RebindLine, ReleaseResult, Report, Unchecked,
    UnreadLine,
};
use bindguard_guard::refresh::{Abandoned, RefreshError};
use bindguard_operator::agent_status::HangingChild;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};
use strum::{EnumIter, EnumMessage, IntoEnumIterator, IntoStaticStr, VariantNames};

/// Counters without a label.
#[derive(Debug, Clone, Copy, EnumIter, EnumMessage, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Total {
    /// Updates of volumes with subpaths
    AgentVolumeUpdates,
    /// Surveys because events were lost
    AgentWatchInterruptions,
    /// Directories that could not be watched
    AgentWatchErrors,
    /// Surveys of the node
    AgentSurveys,
    /// Restarts of a thread that failed
    AgentThreadRestarts,
    /// Creates that the shim tried again
    AdmissionRetries,
    /// Errors of the guard itself
    AdmissionProblems,
    /// Creates that policy refused
    AdmissionRefused,
    /// Binds whose mounts in the container were not compared with the spec
    UnprovenBinds,
    /// Requests for events that failed
    EventRequestFailures,
    /// Accepted registrations of the plugin
    NriRegistrations,
    /// Lines of the agent that were dropped
    JournalUnwrittenLines,
}

/// A counter for each value of a label.
#[derive(Debug, Clone, Copy, EnumIter, EnumMessage, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum TotalBy {
    /// Stale subpaths on the host, by outcome
    SubpathRebinds,
    /// Stale mounts of running containers, by outcome
    Refreshes,
    /// Copies for `bindguard release`, by outcome
    Releases,
    /// Creates that no guard checked, by reason
    UncheckedCreates,
    /// Checked binds, by verdict and outcome
    AdmissionBinds,
    /// Lines that are not counted
    JournalUnreadLines,
    /// Kubernetes events, by result
    Events,
    // The creates of the plugin are counted here and not from the journal: the shim may count the
    // same create there.
    /// Creates that the plugin answered, by answer
    NriCreates,
    /// Starts that the plugin answered, by answer
    NriStarts,
    /// Binds that the plugin checked, by outcome
    NriBinds,
}

/// Gauges without a label.
#[derive(Debug, Clone, Copy, EnumIter, EnumMessage, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Level {
    /// Kubelet roots that do not answer
    AgentSilentRoots,
    /// Children that a server or daemon of a container keeps waiting; `doctor` names process and container
    AgentHangingChildren,
    /// 1 while the runtime accepts the NRI plugin
    NriConnected,
    /// Mounts that the host has unmounted and containers keep
    PinnedMounts,
    /// Mounts of the host whose files the kubelet removes, or which keep pods Terminating
    MountsBelowEmptydir,
    /// Pods whose annotations for refreshes have no effect
    RefreshRequestsIgnored,
    /// Pods for which an uninstall left the handler
    HandlerKeptForPods,
    /// Pods for which an uninstall left the programs
    ProgramsKeptForPods,
    /// Runtimes of the running containerd that call the guard; 0: the node is not guarded
    GuardedRuntimes,
    /// Daemons that have not read their changed files
    RestartsOwed,
    /// Files of the installation that are gone
    MissingFiles,
    /// Mistakes in the node's config.toml
    ConfigMistakes,
}

/// A gauge for each set of labels. A gauge that is not set is absent.
#[derive(Debug, Clone, Copy, EnumIter, EnumMessage, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum LevelBy {
    /// Volumes with a watch
    AgentWatchedVolumes,
    /// Subpaths, volumes and host-root binds of the last survey, by verdict
    Sources,
    /// The installed version
    Installed,
    /// Parts of the installation that other tools changed; none: no installer's pod checks the node
    NodeDrift,
}

/// The result of an event, as a label.
#[derive(Debug, Clone, Copy, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum EventResult {
    /// The API server has it.
    Written,
    /// The API server refuses it.
    Refused,
    /// Too many events waited.
    QueueFull,
    /// It waited too long.
    Expired,
    /// Its pod has no sandbox, or the CRI did not answer.
    NoPod,
}

/// The answer to the create of a container, as a label.
#[derive(Debug, Clone, Copy, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum NriAnswer {
    /// No change of the spec; stale subpaths may have been re-bound on the host.
    Unchanged,
    Adjusted,
    /// Policy refused the container.
    Refused,
    /// No change: the check took too long, or earlier checks still hang.
    TimedOut,
    /// No change: the check panicked, or the request could not be read.
    Failed,
}

/// The answer to the start of a container, as a label.
#[derive(Debug, Clone, Copy, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum StartAnswer {
    /// It shows no old file.
    Current,
    /// The plugin replaced all old files of the container.
    Refreshed,
    /// Policy refused the container: a mount differs from its spec.
    Refused,
    /// It starts as it is: the check took too long, or earlier checks still hang.
    TimedOut,
    /// It starts as it is: an old file could not be replaced, or the check failed.
    Failed,
}

/// The counted results of releases: a dry run keeps each mount.
const RELEASES: [ReleaseResult; 3] = [
    ReleaseResult::Released,
    ReleaseResult::Busy,
    ReleaseResult::Refused,
];
const REBINDS: [&str; 4] = ["rebound", "already-current", REPORTED, "failed"];
const REFRESHES: [&str; 10] = [
    "replaced",
    REPORTED,
    "key-gone",
    "hidden",
    "occupied",
    "missing",
    "restless",
    "refused",
    "failed",
    NOT_NOTIFIED,
];
const REPORTED: &str = "reported";
pub const NOT_NOTIFIED: &str = "not-notified";

impl TotalBy {
    /// The label, and its first values: an alert on an increase needs the zero before the first
    /// event.
    fn label(self) -> (&'static str, Vec<&'static str>) {
        match self {
            Self::SubpathRebinds => ("outcome", REBINDS.into()),
            Self::Refreshes => ("outcome", REFRESHES.into()),
            Self::Releases => ("outcome", RELEASES.map(|result| result.into_str()).into()),
            Self::UncheckedCreates => {
                let reasons = Unchecked::ALL.iter().map(|reason| reason.into_str());
                ("reason", reasons.collect())
            }
            Self::JournalUnreadLines => ("reason", Vec::new()),
            Self::Events => ("result", EventResult::VARIANTS.into()),
            Self::NriCreates => ("answer", NriAnswer::VARIANTS.into()),
            Self::NriStarts => ("answer", StartAnswer::VARIANTS.into()),
            Self::AdmissionBinds | Self::NriBinds => ("outcome", Vec::new()),
        }
    }
}

type Labels = Vec<(&'static str, String)>;

/// Upper bounds of the buckets for a re-bind or a refresh, in seconds.
const BUCKETS: [f64; 10] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0,
];
/// Upper bounds of the buckets for an admission, in seconds.
const ADMISSION_BUCKETS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5];

/// All figures of the agent. Shared by all threads that count.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    totals: Vec<Counter>,
    totals_by: Vec<Family<Labels, Counter>>,
    levels: Vec<Gauge>,
    levels_by: Vec<Family<Labels, Gauge>>,
    /// In seconds since 1970.
    pub last_survey: Gauge<f64, AtomicU64>,
    rebind_seconds: Histogram,
    pub refresh_seconds: Histogram,
    admission_seconds: Histogram,
    pub hanging_children: HangingChildren,
}

/// Registers all figures of a kind.
fn registered<F, M>(registry: &mut Registry) -> Vec<M>
where
    F: IntoEnumIterator + EnumMessage + Into<&'static str>,
    M: Metric + Clone + Default,
{
    let mut metrics = Vec::new();
    for figure in F::iter() {
        let help = figure.get_documentation().unwrap_or_default();
        let (name, metric): (&str, _) = (figure.into(), M::default());
        registry.register(name, help, metric.clone());
        metrics.push(metric);
    }
    metrics
}

impl Metrics {
    /// Registers every figure, for as long as the process lives.
    pub fn new() -> &'static Self {
        let mut registry = Registry::with_prefix("bindguard");
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The running agent", build);
        let mut metrics = Self {
            totals: registered::<Total, _>(&mut registry),
            totals_by: registered::<TotalBy, _>(&mut registry),
            levels: registered::<Level, _>(&mut registry),
            levels_by: registered::<LevelBy, _>(&mut registry),
            last_survey: Gauge::default(),
            rebind_seconds: Histogram::new(BUCKETS),
            refresh_seconds: Histogram::new(BUCKETS),
            admission_seconds: Histogram::new(ADMISSION_BUCKETS),
            hanging_children: HangingChildren::default(),
            registry,
        };
        let (survey, name) = (metrics.last_survey.clone(), "agent_last_survey_timestamp");
        let in_seconds = &mut metrics.registry;
        in_seconds.register_with_unit(name, "Time of the last survey", Unit::Seconds, survey);
        for (name, help, histogram) in [
            (
                "subpath_rebind",
                "Time to re-bind a volume's subpaths",
                &metrics.rebind_seconds,
            ),
            (
                "refresh",
                "Time to refresh a running container",
                &metrics.refresh_seconds,
            ),
            (
                "admission",
                "Time of the guard in a create",
                &metrics.admission_seconds,
            ),
        ] {
            in_seconds.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        for figure in TotalBy::iter() {
            for value in figure.label().1 {
                metrics.count_by(figure, value, 0);
            }
        }
        metrics.count_bind(TotalBy::AdmissionBinds, VerdictName::Wrong, None, 0);
        Box::leak(Box::new(metrics))
    }

    /// Counts in the counter of a label's value.
    pub fn count_by(&self, figure: TotalBy, value: impl Into<&'static str>, number: usize) {
        let label = (figure.label().0, value.into().replace('-', "_"));
        let counter = self.totals_by[figure as usize].get_or_create(&vec![label]);
        counter.inc_by(number as u64);
    }

    fn count_bind(
        &self,
        figure: TotalBy,
        verdict: VerdictName,
        outcome: Option<&Outcome>,
        number: u64,
    ) {
        let outcome = outcome.map_or("none", Into::into).replace('-', "_");
        let labels = vec![
            ("verdict", verdict.as_str().to_owned()),
            ("outcome", outcome),
        ];
        let counter = self.totals_by[figure as usize].get_or_create(&labels);
        counter.inc_by(number);
    }

    /// The text of `/metrics`.
    ///
    /// # Errors
    /// If a figure cannot be encoded.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let hanging = self.hanging_children.listed().len();
        self[Level::AgentHangingChildren].set(hanging as i64);
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Index<Total> for Metrics {
    type Output = Counter;

    fn index(&self, figure: Total) -> &Counter {
        &self.totals[figure as usize]
    }
}

impl Index<Level> for Metrics {
    type Output = Gauge;

    fn index(&self, figure: Level) -> &Gauge {
        &self.levels[figure as usize]
    }
}

impl Index<LevelBy> for Metrics {
    type Output = Family<Labels, Gauge>;

    fn index(&self, figure: LevelBy) -> &Family<Labels, Gauge> {
        &self.levels_by[figure as usize]
    }
}

// Reports as figures.

impl Metrics {
    /// Counts the outcomes of a volume's re-bind.
    pub fn rebound(&self, line: &RebindLine) {
        let mut is_any = false;
        for outcome in line.binds.iter().filter_map(|bind| bind.outcome.as_ref()) {
            let label = match outcome {
                Outcome::Planned { .. } => REPORTED,
                outcome => outcome.into(),
            };
            if REBINDS.contains(&label) {
                self.count_by(TotalBy::SubpathRebinds, label, 1);
                is_any = true;
            }
        }
        if is_any && line.by == Actor::Agent {
            self.rebind_seconds.observe(line.duration_us as f64 / 1e6);
        }
    }

    /// Counts the result for a mount of a running container.
    pub fn refreshed(&self, result: &MountResult) {
        let label = match result {
            MountResult::Stale => REPORTED,
            result => result.as_str(),
        };
        self.count_by(TotalBy::Refreshes, label, 1);
    }

    /// Counts a container that could not be refreshed at all.
    pub fn not_refreshed(&self, error: &RefreshError) {
        let label = match error {
            RefreshError::NoSpec
            | RefreshError::OldKernel(_)
            | RefreshError::Namespace(_)
            | RefreshError::MountsOfNode(_)
            | RefreshError::Sandbox(_) => "refused",
            RefreshError::Process(_) | RefreshError::Locked(_) | RefreshError::Compare(_) => {
                "failed"
            }
        };
        self.count_by(TotalBy::Refreshes, label, 1);
    }

    /// Counts the binds of a create that the NRI plugin checked.
    pub fn checked(&self, report: &Report) {
        for bind in &report.binds {
            let outcome = bind.outcome.as_ref();
            self.count_bind(TotalBy::NriBinds, bind.verdict(), outcome, 1);
        }
    }

    /// Counts a line of the journal. The agent counted its own repairs, and its plugin's creates,
    /// when they happened.
    pub fn journaled(&self, line: &Result<JournalLine, UnreadLine>) {
        match line {
            Ok(JournalLine::Create(line)) => {
                let report = &line.report;
                self[Total::AdmissionRefused].inc_by(u64::from(line.refused.is_some()));
                if let Some(unchecked) = line.unchecked {
                    self.count_by(TotalBy::UncheckedCreates, unchecked.into_str(), 1);
                    return;
                }
                // A line with a pid is about a container after its create.
                if line.pid.is_none() {
                    let took = report.duration_us as f64 / 1e6;
                    self.admission_seconds.observe(took);
                    self[Total::AdmissionRetries].inc_by(u64::from(line.attempt > 0));
                }
                self[Total::UnprovenBinds].inc_by(report.unproven as u64);
                self[Total::AdmissionProblems].inc_by(report.problems.len() as u64);
                for bind in &report.binds {
                    let outcome = bind.outcome.as_ref();
                    self.count_bind(TotalBy::AdmissionBinds, bind.verdict, outcome, 1);
                }
            }
            Ok(JournalLine::NriCreate(_)) => {}
            Ok(JournalLine::Rebind(line)) if line.by == Actor::Operator => self.rebound(line),
            Ok(JournalLine::Refresh(line)) if line.by == Actor::Operator => {
                for mount in &line.mounts {
                    self.refreshed(&mount.outcome);
                }
            }
            // The agent releases nothing.
            Ok(JournalLine::Release(line)) => {
                for copy in &line.copies {
                    if RELEASES.contains(&copy.result) {
                        self.count_by(TotalBy::Releases, copy.result.into_str(), 1);
                    }
                }
            }
            Ok(JournalLine::Rebind(_) | JournalLine::Refresh(_)) => {}
            Err(UnreadLine::Newer) => self.count_by(TotalBy::JournalUnreadLines, "newer", 1),
            Err(UnreadLine::Foreign) => self.count_by(TotalBy::JournalUnreadLines, "foreign", 1),
        }
    }
}

// The children that hang in containers. No second child enters such a container.

/// The children that hang, by the ids of their containers, with the names of the containers.
#[derive(Debug, Default)]
pub struct HangingChildren(Mutex<BTreeMap<String, (String, Abandoned)>>);

impl HangingChildren {
    /// Remembers the child of a container until the child ends.
    pub fn add(&self, id: &str, container: &str, abandoned: Abandoned) {
        let child = (container.to_owned(), abandoned);
        self.alive().insert(id.to_owned(), child);
    }

    /// True if a child hangs in the container with this id.
    pub fn are_in(&self, id: &str) -> bool {
        self.alive().contains_key(id)
    }

    /// All of them.
    pub fn listed(&self) -> Vec<HangingChild> {
        let mut listed = Vec::new();
        for (id, (container, abandoned)) in &*self.alive() {
            listed.push(HangingChild {
                container: container.clone(),
                id: id.clone(),
                pid: abandoned.pid(),
            });
        }
        listed
    }

    fn alive(&self) -> MutexGuard<'_, BTreeMap<String, (String, Abandoned)>> {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        children.retain(|_, (_, abandoned)| abandoned.is_alive());
        children
    }
}

// Prometheus' text format, for clients that do not take OpenMetrics.
//
// The library writes OpenMetrics alone. The two differ in the declarations: the older format
// declares a counter by the name of its samples, and knows no units, no infos and no end.

/// The same figures in text format 0.0.4.
pub fn plain_text(open_metrics: &str) -> String {
    let mut samples = HashSet::new();
    for line in open_metrics.lines() {
        samples.extend(line.split(['{', ' ']).next());
    }
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        match Vec::from_iter(line.splitn(4, ' '))[..] {
            ["#", word, name, rest] => {
                let counter_or_info = ["_total", "_info"].map(|suffix| format!("{name}{suffix}"));
                let mut sampled = counter_or_info.iter().map(String::as_str);
                let sample = sampled.find(|sample| samples.contains(sample));
                let rest = if rest == "info" { "gauge" } else { rest };
                text += &format!("# {word} {} {rest}\n", sample.unwrap_or(name));
            }
            _ => text += &format!("{line}\n"),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use bindguard_core::judge::{Finding, Verdict};
    use bindguard_core::places::SourceKind;
    use bindguard_core::report::{BindReport, Report};

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
                is_counted(metrics, line),
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
        let owned = |labels: &[(&'static str, &str)]| -> Labels {
            let labels = labels.iter();
            labels
                .map(|(name, value)| (*name, (*value).to_owned()))
                .collect()
        };
        for (figure, labels) in [
            (LevelBy::AgentWatchedVolumes, owned(&[("root", "/k")])),
            (
                LevelBy::Sources,
                owned(&[("kind", "subpath"), ("verdict", "stale")]),
            ),
            (
                LevelBy::Installed,
                owned(&[("version", env!("CARGO_PKG_VERSION"))]),
            ),
            (LevelBy::NodeDrift, Vec::new()),
        ] {
            metrics[figure].get_or_create(&labels).set(1);
        }
        let line = r#"{"version":1,"time":null,"attempt":0,"binds":[{"source":"/s","kind":"subpath","verdict":"current"}],"foreign":0,"duration_us":1}"#;
        metrics.journaled(&JournalLine::parse(line));
        metrics.journaled(&JournalLine::parse("nonsense"));
        metrics.checked(&reported(Outcome::MadeRslave));
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
