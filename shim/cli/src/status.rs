//! `bindguard status`: is this node guarded? One screen, from the running daemons, the record of
//! the installation, the pods and the journal.

use std::path::PathBuf;
use std::process::ExitCode;

use bindguard_config::Loaded;
use bindguard_core::error_chain;
use bindguard_installer::drift::drift;
use bindguard_installer::running::{guarded_runtimes, is_hidden};
use bindguard_operator::agent_status::AgentState;
use bindguard_operator::doctor::{RunningPods, describe_agent};
use bindguard_operator::guarded_runtimes::GuardedRuntimes;
use bindguard_operator::pods::{Pods, PodsOfVersion};
use bindguard_operator::survey_node;
use clap::Args;
use serde::Serialize;

use crate::agent;
use crate::config;
use crate::journal;
use crate::pods::{PodsFrom, running_pods};
use crate::show::{self, FAULTY, HEALTHY, Lines, OldFilesCount, counted};
use bindguard_installer::record::Removal;
use bindguard_installer::recorded;
use bindguard_installer::removal::pending;

const LAST_ADMISSIONS: usize = 3;

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusVerb {
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pods: PodsFrom,
}

/// The state of the node.
#[derive(Debug, Serialize)]
struct NodeStatus {
    version: &'static str,
    /// The running daemons, and their runtimes that call the guard.
    daemons: Vec<GuardedRuntimes>,
    /// Changes by other tools since the installation.
    drift: Vec<String>,
    /// True if programs of the installation are gone.
    #[serde(skip)]
    is_broken: bool,
    /// True if the guard is gone.
    #[serde(skip)]
    is_unguarded: bool,
    /// The commands that activate changes which the running daemons have not read.
    restart_owed: Vec<String>,
    /// An uninstall that is not complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    removal: Option<Removal>,
    config: ConfigStatus,
    pods: PodCount,
    /// The node agent, which is optional.
    agent: AgentState,
    last_admissions: Vec<String>,
    /// Subpaths and volumes that need attention now.
    findings: usize,
    old_files: OldFilesCount,
    /// Parts that could not be checked.
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ConfigStatus {
    path: PathBuf,
    /// False if every setting has its default.
    exists: bool,
    /// Why it is not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The parts of the config that are not used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Debug, Default, Serialize)]
struct PodCount {
    running: usize,
    /// Those under a shim without the guard.
    unguarded: usize,
    /// The pods under bindguard's shim, by version.
    versions: Vec<PodsOfVersion>,
}

impl StatusVerb {
    /// Runs it.
    pub fn run(self, loaded: &Loaded) -> anyhow::Result<ExitCode> {
        let status = NodeStatus::read(loaded, &self.pods.pods_under(&loaded.config));
        show::print_report(&status, self.json, NodeStatus::text)?;
        Ok(show::code(
            !status.problems.is_empty(),
            status.has_findings(),
        ))
    }
}

impl NodeStatus {
    fn read(loaded: &Loaded, pods: &Pods) -> Self {
        let mut problems = Vec::new();
        let mut daemons = Vec::new();
        for daemon in guarded_runtimes() {
            match daemon {
                Ok(daemon) => daemons.push(daemon),
                Err(error) => problems.push(format!("{error:#}")),
            }
        }
        if is_hidden("containerd") {
            problems.push("a containerd runs, and only root may read its arguments".to_owned());
        }
        let (drift, unchecked) = drift();
        problems.extend(unchecked);
        // `drift` has reported why a record cannot be read
        let record = recorded().unwrap_or_default();
        let admissions = journal::last_headlines(&loaded.config, LAST_ADMISSIONS);
        let survey = survey_node(loaded.config.policy(), loaded.config.places(), pods, |_| {
            true
        });
        problems.extend(survey.problems.iter().cloned());
        let path = config::in_force();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            daemons,
            is_broken: drift.iter().any(|drift| drift.breaks_pods),
            is_unguarded: drift.iter().any(|drift| drift.unguards),
            drift: drift.into_iter().map(|drift| drift.what).collect(),
            removal: pending(&record),
            restart_owed: record.owed().into_iter().map(|owed| owed.command).collect(),
            config: ConfigStatus {
                exists: path.symlink_metadata().is_ok(),
                path,
                problem: loaded.problem.as_ref().map(|problem| error_chain(problem)),
                warnings: loaded.warnings.iter().map(ToString::to_string).collect(),
            },
            pods: PodCount::of(pods),
            agent: agent::state(&loaded.config),
            last_admissions: admissions
                .map_err(|error| problems.push(format!("{error:#}")))
                .unwrap_or_default(),
            old_files: OldFilesCount::of(&survey),
            findings: survey.without_healthy().binds.len(),
            problems,
        }
    }

    fn is_guarded(&self) -> bool {
        !self.is_broken
            && !self.is_unguarded
            && self
                .daemons
                .iter()
                .any(|daemon| !daemon.runtimes.is_empty())
    }

    fn has_findings(&self) -> bool {
        !self.is_guarded()
            || !self.restart_owed.is_empty()
            || !self.drift.is_empty()
            || self.removal.is_some()
            || self.config.problem.is_some()
            || !self.config.warnings.is_empty()
            || self.findings > 0
            || self.old_files.opted_in > 0
            || matches!(self.agent, AgentState::Silent { .. })
    }

    fn text(&self) -> Lines {
        let mut lines = Lines::default();
        let mark = |good: bool| if good { HEALTHY } else { FAULTY };
        lines.headed("version", mark(true), self.version);
        for daemon in &self.daemons {
            let reach = if daemon.default {
                "for every new pod"
            } else {
                "for new pods that select it"
            };
            let names = daemon.runtimes.join(", ");
            match daemon.runtimes.is_empty() {
                true => lines.headed(
                    "unguarded",
                    mark(false),
                    &format!("{} has no runtime of bindguard's", daemon.daemon),
                ),
                false if self.is_broken => lines.headed(
                    "broken",
                    mark(false),
                    &format!("{} runs {names}, and its programs are gone", daemon.daemon),
                ),
                false if self.is_unguarded => lines.headed(
                    "unguarded",
                    mark(false),
                    &format!("{} runs {names}, and the guard is gone", daemon.daemon),
                ),
                false => lines.headed(
                    "guarded",
                    mark(true),
                    &format!("{} runs {names}, {reach}", daemon.daemon),
                ),
            }
        }
        if self.daemons.is_empty() {
            lines.headed(
                "unguarded",
                mark(false),
                "no containerd, dockerd or CRI-O with pods was found",
            );
        }
        self.drift
            .iter()
            .for_each(|drift| lines.headed("drift", mark(false), drift));
        self.restart_owed.iter().for_each(|command| {
            lines.headed(
                "restart",
                mark(false),
                "a daemon has not read its changed file",
            );
            lines.run(command);
        });
        if let Some(removal) = self.removal {
            lines.headed("removal", mark(false), &describe_removal(removal));
        }
        let path = self.config.path.display();
        match (&self.config.problem, self.config.exists) {
            (Some(problem), _) => lines.headed("config", mark(false), problem),
            (None, true) => lines.headed(
                "config",
                mark(self.config.warnings.is_empty()),
                &path.to_string(),
            ),
            (None, false) => lines.headed(
                "config",
                mark(true),
                &format!("no {path}: every setting has its default"),
            ),
        }
        self.config
            .warnings
            .iter()
            .for_each(|warning| lines.below(warning));
        lines.headed(
            "pods",
            mark(true),
            &format!(
                "{} run, {} of them under another shim",
                self.pods.running, self.pods.unguarded
            ),
        );
        if self.pods.unguarded > 0 {
            let is_default = self.daemons.iter().any(|daemon| daemon.default);
            lines.below(if is_default {
                "these keep it until they are created anew; `bindguard repair` reaches them now"
            } else {
                "these do not select bindguard's runtime; `bindguard repair` reaches them now"
            });
        }
        self.pods
            .versions
            .iter()
            .for_each(|pods| lines.below(&pods.summary()));
        match &self.agent {
            AgentState::Absent => lines.headed("agent", mark(true), "not running; it is optional"),
            AgentState::Silent { problem } => lines.headed("agent", mark(false), problem),
            AgentState::Running(status) => {
                lines.headed("agent", mark(true), &describe_agent(status))
            }
        }
        self.last_admissions
            .iter()
            .for_each(|admission| lines.headed("last create", mark(true), admission));
        lines.headed(
            "findings",
            mark(self.findings == 0),
            &self.findings.to_string(),
        );
        let OldFilesCount {
            containers,
            opted_in,
        } = self.old_files;
        if containers > 0 {
            let text = format!(
                "read by {}, {opted_in} of them opted in to live refresh",
                counted(containers, "running container", "running containers")
            );
            lines.headed("old files", mark(opted_in == 0), &text);
        }
        if self.findings + containers > 0 {
            lines.run("bindguard diagnose --all");
        }
        self.problems
            .iter()
            .for_each(|problem| lines.problem(problem));
        lines
    }
}

fn describe_removal(removal: Removal) -> String {
    if removal.handler_kept_for_pods + removal.programs_kept_for_pods == 0 {
        return "not complete, and no pod needs the rest; run bindguard uninstall".to_owned();
    }
    let counted = |pods: usize| format!("{pods} {}", if pods == 1 { "pod" } else { "pods" });
    format!(
        "handler kept for {}, programs kept for {}",
        counted(removal.handler_kept_for_pods),
        counted(removal.programs_kept_for_pods)
    )
}

impl PodCount {
    fn of(pods: &Pods) -> Self {
        let RunningPods { all, unguarded } = running_pods(pods);
        Self {
            running: all,
            unguarded,
            versions: pods.by_shim_version(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_config::RefreshMode;
    use bindguard_core::identity::PodName;
    use bindguard_core::policy::Mode;
    use bindguard_operator::agent_status::{AgentStatus, HangingChild, NriState};
    use bindguard_testing::documented;

    #[test]
    fn json_matches_the_document() {
        let expected: serde_json::Value = serde_json::from_str(documented("`status`")).unwrap();
        let status = NodeStatus {
            version: "0.2.0",
            daemons: vec![GuardedRuntimes {
                daemon: "containerd",
                runtimes: vec!["bindguard".to_owned()],
                default: true,
            }],
            drift: Vec::new(),
            is_broken: false,
            is_unguarded: false,
            restart_owed: vec!["systemctl restart containerd".to_owned()],
            removal: Some(Removal {
                handler_kept_for_pods: 0,
                programs_kept_for_pods: 2,
            }),
            config: ConfigStatus {
                path: "/etc/bindguard/config.toml".into(),
                exists: true,
                problem: None,
                warnings: Vec::new(),
            },
            pods: PodCount {
                running: 12,
                unguarded: 3,
                versions: vec![PodsOfVersion {
                    version: "0.0.9".to_owned(),
                    pods: vec![PodName {
                        uid: Some("eea5c325".to_owned()),
                        namespace: Some("default".to_owned()),
                        name: Some("web".to_owned()),
                    }],
                }],
            },
            last_admissions: vec![
                "2026-11-21T05:10:00Z default/web app (0123456789ab, bindguard 0.2.0)".to_owned(),
            ],
            findings: 1,
            old_files: OldFilesCount {
                containers: 2,
                opted_in: 0,
            },
            agent: AgentState::Running(Box::new(AgentStatus {
                version: "0.2.0".to_owned(),
                pid: 812,
                since: "2026-11-21T05:00:00.5Z".to_owned(),
                ready: true,
                last_survey: Some("2026-11-21T05:10:00.25Z".to_owned()),
                stale_subpaths: Mode::Repair,
                refresh: RefreshMode::Annotated,
                nri: NriState::Connected,
                kubediag: false,
                silent_roots: 0,
                unserved: Vec::new(),
                hanging_children: vec![HangingChild {
                    container: "default/web container app".to_owned(),
                    id: "bb344d713010".to_owned(),
                    pid: 2214,
                }],
            })),
            problems: Vec::new(),
        };
        assert_eq!(serde_json::to_value(&status).unwrap(), expected);
    }
}
