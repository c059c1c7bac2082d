//! `bindguard refresh`: a running container gets the current files of its subPaths, or of the single files that Docker or Podman
//! bound, once and by hand, without the agent.

mod engine;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::policy::Policy;
use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    HeldProcess, PodVolumes, RefreshAct, RefreshOutcome, Refreshed, VolumeOfPod, rebind_volume, refresh_container,
};
use bindguard_operator::kubelets_here;
use bindguard_operator::node::init_of;
use bindguard_operator::pods::{ContainerState, PodContainer, PodSelector, Pods};
use clap::{ArgGroup, Args};
use serde::Serialize;

use crate::pods::{PodsFrom, uids};
use crate::show::{self, FAULTY, HEALTHY, Lines};

/// Arguments of `refresh`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("target").args(["pod", "container"]).required(true)))]
pub struct Refresh {
    /// Refresh every running container of this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Refresh this container of a pod, of Docker or of Podman, by its id.
    #[arg(long, value_name = "ID")]
    container: Option<String>,
    /// Notify the application afterwards: `none`, `touch` or `signal:NAME` with HUP, USR1, USR2 or WINCH.
    #[arg(long, value_name = "HOW", default_value = "none", value_parser = notify)]
    notify: Notify,
    /// Print the stale files and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pods: PodsFrom,
}

/// A value of `--notify` that is none.
#[derive(Debug, thiserror::Error)]
#[error("expected none, touch or signal:NAME with HUP, USR1, USR2 or WINCH")]
struct InvalidNotify;

fn notify(text: &str) -> Result<Notify, InvalidNotify> {
    Notify::from_text(text).ok_or(InvalidNotify)
}

/// One file or folder of a running container.
#[derive(Debug, Serialize)]
struct RefreshedFile {
    container: String,
    destination: PathBuf,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// The report of a refresh.
#[derive(Debug, Default, Serialize)]
struct RefreshReport {
    /// Stale files and folders; current ones are only counted.
    files: Vec<RefreshedFile>,
    /// The number of all files and folders that the containers show by a subPath, or that an engine bound.
    subpaths: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

impl Refresh {
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let report = match self.container.as_deref().map(engine::container_with_id).transpose()?.flatten() {
            Some(container) => engine::refresh(&container, self.act())?,
            None => self.refresh_pods(config)?,
        };
        if self.json {
            show::print_json(&report)?;
        } else {
            show::print_text(text(&report).text())?;
        }
        let is_left = |line: &RefreshedFile| line.outcome != "replaced";
        Ok(show::code(!report.problems.is_empty(), report.files.iter().any(is_left)))
    }

    fn refresh_pods(&self, config: &Config) -> anyhow::Result<RefreshReport> {
        let pods = self.pods.pods();
        let mut report = RefreshReport::default();
        for container in self.containers(&pods)? {
            if let Err(error) = self.refresh(container, config, &mut report) {
                report.problems.push(format!("{error:#}"));
            }
        }
        Ok(report)
    }

    fn act(&self) -> RefreshAct {
        if self.dry_run { RefreshAct::Look } else { RefreshAct::Replace(self.notify) }
    }

    /// The running containers that are meant, without sandboxes.
    fn containers<'p>(&self, pods: &'p Pods) -> anyhow::Result<Vec<&'p PodContainer>> {
        let is_running =
            |container: &&PodContainer| container.state.is_none_or(|state| state == ContainerState::Running);
        let all = pods.containers.iter().filter(|container| container.name.is_some()).filter(is_running);
        let found: Vec<_> = match (&self.pod, &self.container) {
            (Some(pod), _) => {
                let uids = uids(pods, &PodSelector::from_argument(pod))?;
                all.filter(|it| it.pod.uid.as_ref().is_some_and(|uid| uids.contains(uid))).collect()
            }
            (None, Some(id)) => all.filter(|container| container.id.starts_with(id.as_str())).collect(),
            (None, None) => Vec::new(),
        };
        ensure!(!found.is_empty(), "nothing to refresh: this node has no such running container");
        ensure!(self.pod.is_some() || found.len() == 1, "more than one container has an id that begins so");
        Ok(found)
    }

    fn refresh(&self, container: &PodContainer, config: &Config, report: &mut RefreshReport) -> anyhow::Result<()> {
        let name = [container.pod.for_people(), container.name.clone()].into_iter().flatten().collect::<Vec<_>>();
        let name = name.join("/");
        let uid = container.pod.uid.as_deref().with_context(|| format!("refresh {name}: its pod's uid is unknown"))?;
        let pid = init_of(&container.id).with_context(|| format!("refresh {name}: it has no process"))?;
        let process = HeldProcess::open(pid).with_context(|| format!("refresh {name}"))?;
        let (here, problems) = kubelets_here(config.places());
        report.problems.extend(problems);
        let mut pods_of_roots = here.into_iter().map(|root| (root.clone(), root.join("pods").join(uid)));
        let Some((root, pod)) = pods_of_roots.find(|(_, pod)| pod.symlink_metadata().is_ok()) else {
            bail!("refresh {name}: no kubelet root has the pod {uid}; see [kubelet] roots in config.toml")
        };
        if !self.dry_run {
            rebind_host(root, uid, config.policy(), report);
        }
        let volumes = PodVolumes::open(&pod).with_context(|| format!("refresh {name}"))?;
        let refreshed = refresh_container(&process, &volumes, self.act()).with_context(|| format!("refresh {name}"))?;
        report.add(&name, &refreshed);
        Ok(())
    }
}

/// The host's subpaths first: a container that restarts meanwhile starts with the current file.
fn rebind_host(kubelet_root: PathBuf, uid: &str, policy: &Policy, report: &mut RefreshReport) {
    let subpaths = kubelet_root.join("pods").join(uid).join("volume-subpaths");
    let names = std::fs::read_dir(subpaths).into_iter().flatten().flatten();
    for volume in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        let volume = VolumeOfPod { kubelet_root: kubelet_root.clone(), pod_uid: uid.to_owned(), volume };
        report.problems.extend(rebind_volume(&volume, policy).problems);
    }
}

impl RefreshReport {
    fn add(&mut self, container: &str, refreshed: &Refreshed) {
        self.subpaths += refreshed.subpaths;
        for mount in &refreshed.mounts {
            let (outcome, reason) = match &mount.outcome {
                RefreshOutcome::Replaced(_) => ("replaced", None),
                RefreshOutcome::Stale => ("stale", None),
                RefreshOutcome::KeyGone => (
                    "key-gone",
                    Some(format!("{} has no {} any more", mount.volume.display(), mount.sub_path.display())),
                ),
                RefreshOutcome::Hidden => ("hidden", Some("the container mounted something over it".to_owned())),
                RefreshOutcome::NotReplaced(why) => ("failed", Some(error_chain(why))),
            };
            let destination = mount.destination.clone();
            self.files.push(RefreshedFile { container: container.to_owned(), destination, outcome, reason });
        }
        let not_notified = refreshed.not_notified.iter();
        self.problems.extend(not_notified.map(|error| format!("notify {container}: {}", error_chain(error))));
    }
}

fn text(report: &RefreshReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for line in &report.files {
        let style = if line.outcome == "replaced" { HEALTHY } else { FAULTY };
        let reason = line.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        lines.headed(line.outcome, style, &format!("{} of {}{reason}", line.destination.display(), line.container));
    }
    lines.line(&format!("{} files and folders checked, {} of them stale before", report.subpaths, report.files.len()));
    lines
}
