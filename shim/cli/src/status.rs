//! `bindguard status`: is this node guarded? One screen, from the running daemons, the record of
//! the installation, the pods and the journal.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use bindguard_config::{Config, Loaded};
use bindguard_core::error_chain;
use bindguard_installer::drift::drift;
use bindguard_installer::record::Removal;
use bindguard_installer::removal::pending;
use bindguard_installer::running::{guarded_runtimes, unseen};
use bindguard_installer::{Owner, recorded};
use bindguard_operator::agent_status::{AgentState, STATUS_PATH, describe};
use bindguard_operator::doctor::{GuardedRuntimes, RunningPods};
use bindguard_operator::pods::PodsOfVersion;
use bindguard_operator::{survey_node, unix_http};
use clap::Args;
use serde::Serialize;

use crate::pods::PodsFrom;
use crate::show::{self, Lines, OldFilesCount, Output, UNCHECKED, counted};
use crate::{config, journal};

const LAST_ADMISSIONS: usize = 3;

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusVerb {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    pods: PodsFrom,
}

/// The state of the node.
#[derive(Debug, Serialize)]
struct NodeStatus {
    version: &'static str,
    /// The running daemons, and their runtimes that call the guard.
    daemons: Vec<GuardedRuntimes>,
    /// The problems of daemons that did not report their runtimes.
    #[serde(skip)]
    unknown: Vec<String>,
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
    /// True if one of them could not be checked.
    #[serde(skip)]
    is_incomplete: bool,
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

impl ConfigStatus {
    fn is_valid(&self) -> bool {
        self.problem.is_none() && self.warnings.is_empty()
    }
}

#[derive(Debug, Default, Serialize)]
struct PodCount {
    /// Absent if no CRI answered.
    #[serde(flatten)]
    running: Option<RunningPods>,
    /// The pods under bindguard's shim, by version.
    versions: Vec<PodsOfVersion>,
}

impl StatusVerb {
    pub fn run(self, loaded: &Loaded) -> anyhow::Result<ExitCode> {
        let status = NodeStatus::read(loaded, &self.pods);
        let is_incomplete = status.is_incomplete || !status.problems.is_empty();
        let is_guarded = !status.is_broken
            && !status.is_unguarded
            && status.daemons.iter().any(|it| !it.runtimes.is_empty());
        let has_findings = !is_guarded
            || !status.restart_owed.is_empty()
            || !status.drift.is_empty()
            || status.removal.is_some()
            || !status.config.is_valid()
            || status.findings > 0
            || status.old_files.opted_in > 0
            || matches!(status.agent, AgentState::Silent { .. });
        let text = status.text();
        show::finish(&status, self.output, text, is_incomplete, has_findings)
    }
}

/// The state of the agent. It is optional: without a socket it is absent.
pub fn agent_state(config: &Config) -> AgentState {
    let socket = &config.agent().socket;
    if let Err(error) = UnixStream::connect(socket)
        && error.kind() == io::ErrorKind::NotFound
    {
        return AgentState::Absent;
    }
    let status =
        unix_http::get(socket, STATUS_PATH).and_then(|text| Ok(serde_json::from_str(&text)?));
    match status {
        Ok(status) => AgentState::Running(status),
        Err(error) => AgentState::Silent {
            problem: format!("{error:#}"),
        },
    }
}

impl NodeStatus {
    fn read(loaded: &Loaded, pods: &PodsFrom) -> Self {
        let (policy, places) = (loaded.config.policy(), loaded.config.places());
        let (pods, counted) = pods.counted_under(&loaded.config);
        let (mut daemons, mut unknown) = (Vec::new(), Vec::new());
        for (_, daemon) in guarded_runtimes() {
            match daemon {
                Ok(daemon) => daemons.push(daemon),
                Err(error) => unknown.push(format!("{error:#}")),
            }
        }
        // `drift` reports why a record cannot be read
        let record = recorded().unwrap_or_default();
        for owner in [Owner::Containerd, Owner::Docker, Owner::Crio] {
            unknown.extend(unseen(owner, record.verified(owner).is_some()));
        }
        let mut problems = unknown.clone();
        let running = counted.unwrap_or_else(|error| {
            problems.push(format!("count the pods: {error:#}"));
            None
        });
        let (drift, unchecked) = drift();
        problems.extend(unchecked);
        let survey = survey_node(policy, places, &pods, |_| true);
        problems.extend(survey.problems.clone());
        let admissions = journal::last_headlines(&loaded.config, LAST_ADMISSIONS);
        let last_admissions = admissions.unwrap_or_else(|error| {
            problems.push(format!("{error:#}"));
            Vec::new()
        });
        let path = config::in_force();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            daemons,
            unknown,
            is_broken: drift.iter().any(|drift| drift.breaks_pods),
            is_unguarded: drift.iter().any(|drift| drift.unguards),
            drift: drift.into_iter().map(|drift| drift.what).collect(),
            removal: pending(&record),
            restart_owed: record.owed().into_iter().map(|owed| owed.command).collect(),
            config: ConfigStatus {
                exists: path.symlink_metadata().is_ok(),
                path,
                problem: loaded.problem.as_ref().map(|problem| error_chain(problem)),
                warnings: loaded.warnings.clone(),
            },
            pods: PodCount {
                running,
                versions: pods.by_shim_version(),
            },
            agent: agent_state(&loaded.config),
            last_admissions,
            is_incomplete: survey.is_incomplete(),
            old_files: OldFilesCount::of(&survey),
            findings: survey.without_healthy().binds.len(),
            problems,
        }
    }

    fn text(&self) -> Lines {
        let mut lines = Lines::default();
        lines.marked("version", true, self.version);
        for daemon in &self.daemons {
            let (name, names) = (daemon.daemon, daemon.runtimes.join(", "));
            if names.is_empty() {
                let none = format!("{name} has no runtime of bindguard's");
                lines.marked("unguarded", false, &none);
                continue;
            }
            let (word, is_good, effect) = if self.is_broken {
                ("broken", false, "and its programs are gone")
            } else if self.is_unguarded {
                ("unguarded", false, "and the guard is gone")
            } else if daemon.default {
                ("guarded", true, "for every new pod")
            } else {
                ("guarded", true, "for new pods that select it")
            };
            lines.marked(word, is_good, &format!("{name} runs {names}, {effect}"));
        }
        for why in &self.unknown {
            lines.headed("unknown", UNCHECKED, why);
        }
        if self.daemons.is_empty() && self.unknown.is_empty() {
            let none = "no containerd, dockerd or CRI-O runs here";
            lines.marked("unguarded", false, none);
        }
        for drift in &self.drift {
            lines.marked("drift", false, drift);
        }
        for command in &self.restart_owed {
            lines.marked("restart", false, "a daemon has not read its changed file");
            lines.run(command);
        }
        if let Some(removal) = self.removal {
            let handler = removal.handler_kept_for_pods;
            let programs = removal.programs_kept_for_pods;
            if handler + programs == 0 {
                let rest = "not complete, and no pod needs the rest";
                lines.marked("removal", false, rest);
                lines.run("bindguard uninstall");
            } else {
                let kept = format!(
                    "handler kept for {}, programs kept for {}",
                    counted(handler, "pod", "pods"),
                    counted(programs, "pod", "pods")
                );
                lines.marked("removal", false, &kept);
            }
        }
        let path = self.config.path.display();
        let config = match &self.config.problem {
            Some(problem) => problem.clone(),
            None if self.config.exists => path.to_string(),
            None => format!("no {path}: every setting has its default"),
        };
        lines.marked("config", self.config.is_valid(), &config);
        for warning in &self.config.warnings {
            lines.below(warning);
        }
        if let Some(RunningPods { all, unguarded }) = self.pods.running {
            let pods = format!("{all} run, {unguarded} of them under another shim");
            lines.marked("pods", true, &pods);
            if unguarded > 0 {
                let is_default = self.daemons.iter().any(|daemon| daemon.default);
                lines.below(if is_default {
                    "these keep it until they are created anew; to repair their stale subPaths now:"
                } else {
                    "these do not select bindguard's runtime; to repair their stale subPaths now:"
                });
                lines.run("bindguard repair --all");
            }
        } else {
            lines.headed("pods", UNCHECKED, "unknown: no CRI answered");
        }
        for pods in &self.pods.versions {
            lines.below(&pods.summary());
        }
        match &self.agent {
            AgentState::Absent => lines.marked("agent", true, "not running; it is optional"),
            AgentState::Silent { problem } => lines.marked("agent", false, problem),
            AgentState::Running(status) => lines.marked("agent", true, &describe(status)),
        }
        for admission in &self.last_admissions {
            lines.marked("created", true, admission);
        }
        lines.marked("findings", self.findings == 0, &self.findings.to_string());
        let OldFilesCount {
            containers,
            opted_in,
        } = self.old_files;
        if containers > 0 {
            let text = format!(
                "read by {}, {opted_in} of them opted in to live refresh",
                counted(containers, "running container", "running containers")
            );
            lines.marked("old files", opted_in == 0, &text);
        }
        if self.findings + containers > 0 {
            lines.run("bindguard diagnose --all");
        }
        for problem in &self.problems {
            if !self.unknown.contains(problem) {
                lines.headed("problem", UNCHECKED, problem);
            }
        }
        lines
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
            unknown: Vec::new(),
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
                running: Some(RunningPods {
                    all: 12,
                    unguarded: 3,
                }),
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
            is_incomplete: false,
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
