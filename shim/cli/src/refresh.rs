//! `bindguard refresh`: a running container gets the current files of its subPaths, or of the
//! single files that Docker or Podman bound, or releases mounts of the host, once and by hand,
//! without the agent.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::policy::Policy;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{Actor, RebindLine, RefreshLine, RefreshedMount};
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, HelperProcess, HostRoots, PodVolumes,
    RefreshAct, Refreshed, TuckRecords, VolumeOfPod, rebind_volume, refresh_container,
};
use bindguard_guard::{record_rebind, record_refresh};
use bindguard_operator::bundles::{
    binds_of_container, bundle_of_container, host_files_of_container,
};
use bindguard_operator::engines::{
    ContainersOfNode, EngineContainer, engine_containers, rootless_owner, state_folders,
};
use bindguard_operator::kubelets_here;
use bindguard_operator::node::{hold_init, is_root, recorded_init_of, refuse_other_mounts};
use bindguard_operator::pods::{ContainerState, PodContainer, PodSelector, Pods};
use bindguard_sys::bundle::read_spec;
use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Args, ValueEnum};
use serde::Serialize;

use crate::pods::{PodsFrom, uids};
use crate::show;
use crate::show::{FAULTY, HEALTHY, Lines, counted};

/// Arguments of `refresh`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("target").args(["pod", "container"]).required(true)))]
pub struct Refresh {
    /// Refresh every running container of this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD", value_parser = NonEmptyStringValueParser::new())]
    pod: Option<String>,
    /// Refresh this container of a pod, of Docker or of Podman, by its id.
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    container: Option<String>,
    /// Refresh subPath files, volumes of the pod that the host has mounted anew, private host-root
    /// binds, which keep what the host has unmounted, or files of the host that were replaced.
    #[arg(long, value_name = "WHAT", default_value = "subpaths")]
    what: What,
    /// Notify the application afterwards: `none`, `touch` or `signal:NAME` with HUP, USR1, USR2 or
    /// WINCH. `signal:NAME@PROGRAM`: the process of the container that runs this program, instead
    /// of its init.
    #[arg(long, value_name = "HOW", default_value = "none", value_parser = notify)]
    notify: Notify,
    /// Print the stale mounts and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pods: PodsFrom,
}

/// The kind of binds to refresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Files and folders of kubelet-written volumes, and of CSI volumes with the same layout.
    Subpaths,
    /// Volumes that the host has mounted anew, as a restarted CSI driver does.
    Volumes,
    /// Private binds of the host's `/` and of runtime directories. The new mount receives the mounts
    /// and umounts of the host; `[host-root]` of config.toml applies.
    HostRoot,
    /// Single files and sockets of the host that were replaced, such as the socket of a restarted
    /// daemon.
    HostFiles,
}

/// An invalid value of `--notify`.
#[derive(Debug, thiserror::Error)]
#[error("expected none, touch, signal:NAME or signal:NAME@PROGRAM with HUP, USR1, USR2 or WINCH")]
struct InvalidNotify;

fn notify(text: &str) -> Result<Notify, InvalidNotify> {
    Notify::from_text(text).ok_or(InvalidNotify)
}

/// A stale mount of a running container.
#[derive(Debug, Serialize)]
struct RefreshedFile {
    /// The names of the pod and the container.
    container: String,
    #[serde(flatten)]
    mount: RefreshedMount,
}

/// The report of a refresh.
#[derive(Debug, Default, Serialize)]
struct RefreshReport {
    /// The mounts that were stale.
    files: Vec<RefreshedFile>,
    /// The number of all mounts that were checked.
    subpaths: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

impl Refresh {
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        ensure!(
            is_root(),
            "refresh containers: this needs root, also with --dry-run"
        );
        let helper = HelperProcess::start().context("start the helper process")?;
        let report = match self
            .container
            .as_deref()
            .map(container_with_id)
            .transpose()?
            .flatten()
        {
            Some(container) => refresh(&helper, &container, &self, config)?,
            None => self.refresh_pods(&helper, config)?,
        };
        show::print_report(&report, self.json, text)?;
        let is_left = |file: &RefreshedFile| !file.mount.outcome.is_replaced();
        Ok(show::code(
            !report.problems.is_empty(),
            report.files.iter().any(is_left),
        ))
    }

    fn refresh_pods(
        &self,
        helper: &HelperProcess,
        config: &Config,
    ) -> anyhow::Result<RefreshReport> {
        let pods = self.pods.pods();
        let mut report = RefreshReport::default();
        for container in self.containers(&pods)? {
            if let Err(error) = self.refresh(helper, container, config, &mut report) {
                report.problems.push(format!("{error:#}"));
            }
        }
        Ok(report)
    }

    fn line(
        &self,
        id: &str,
        identity: Identity,
        refreshed: Refreshed,
        took: Duration,
    ) -> RefreshLine {
        let mut line = RefreshLine::new(Actor::Operator, id, identity);
        line.mounts = refreshed.mounts;
        line.notification = refreshed.notification;
        line.set_duration(took);
        line
    }

    fn act(&self) -> RefreshAct {
        if self.dry_run {
            RefreshAct::Look
        } else {
            RefreshAct::Replace(self.notify.clone())
        }
    }

    /// The running containers that are meant, without sandboxes.
    fn containers<'p>(&self, pods: &'p Pods) -> anyhow::Result<Vec<&'p PodContainer>> {
        let is_running = |container: &&PodContainer| {
            container
                .state
                .is_none_or(|state| state == ContainerState::Running)
        };
        let all = pods
            .containers
            .iter()
            .filter(|container| container.name.is_some())
            .filter(is_running);
        let found: Vec<_> = match (&self.pod, &self.container) {
            (Some(pod), _) => {
                let uids = uids(pods, &PodSelector::from_argument(pod))?;
                all.filter(|it| it.pod.uid.as_ref().is_some_and(|uid| uids.contains(uid)))
                    .collect()
            }
            (None, Some(id)) => all
                .filter(|container| container.id.starts_with(id.as_str()))
                .collect(),
            (None, None) => Vec::new(),
        };
        ensure!(
            !found.is_empty(),
            "nothing to refresh: this node has no such running container"
        );
        ensure!(
            self.pod.is_some() || found.len() == 1,
            "more than one container has an id that begins with {}",
            self.container.as_deref().unwrap_or_default()
        );
        Ok(found)
    }

    fn refresh(
        &self,
        helper: &HelperProcess,
        container: &PodContainer,
        config: &Config,
        report: &mut RefreshReport,
    ) -> anyhow::Result<()> {
        let name = show::joined_names(&container.pod, container, "/");
        let uid = container
            .pod
            .uid
            .as_deref()
            .with_context(|| format!("refresh {name}: its pod's uid is unknown"))?;
        let pid = recorded_init_of(&container.id).or_else(|| self.pods.init_of(&container.id));
        let pid = pid.with_context(|| {
            format!(
                "refresh {name}: neither its runtime's record nor the CRI names its process; name the socket with --cri"
            )
        })?;
        let process = hold_init(&container.id, pid).with_context(|| format!("refresh {name}"))?;
        // The files of a kubelet's volume are the same in every mount namespace.
        if self.what != What::Subpaths {
            refuse_other_mounts(&process).with_context(|| format!("refresh {name}"))?;
        }
        let (here, problems) = kubelets_here(config.places());
        report.problems.extend(problems);
        let mut pods_of_roots = here
            .into_iter()
            .map(|root| (root.clone(), root.join("pods").join(uid)));
        let Some((root, pod)) = pods_of_roots.find(|(_, pod)| pod.symlink_metadata().is_ok())
        else {
            bail!(
                "refresh {name}: no kubelet root has the pod {uid}; see [kubelet] roots in config.toml"
            )
        };
        let journal = config.journal().filter(|_| !self.dry_run);
        if !self.dry_run && !matches!(self.what, What::HostRoot | What::HostFiles) {
            rebind_host(root, uid, config.policy(), journal, report);
        }
        let volumes = PodVolumes::open(&pod)
            .and_then(|volumes| volumes.with_drivers(&pod, || self.pods.writable_mounts(uid)))
            .with_context(|| format!("refresh {name}"))?;
        let volumes = volumes.for_container(binds_of_container(Path::new("/"), &container.id));
        let bundle = || {
            let bundle = bundle_of_container(Path::new("/"), &container.id);
            bundle.with_context(|| format!("refresh {name}: its bundle is not found"))
        };
        let no_spec = || format!("refresh {name}: read the spec in its bundle");
        let running = ContainersOfNode::at(Path::new("/"));
        let other: Option<Box<dyn CurrentFiles + '_>> = match self.what {
            What::Subpaths => None,
            What::Volumes => {
                let mounts = BoundMounts::open(&bundle()?, &pod).with_context(no_spec)?;
                Some(Box::new(mounts))
            }
            What::HostRoot => {
                let roots = HostRoots::open(&bundle()?, config.policy(), config.places());
                Some(Box::new(roots.with_context(no_spec)?))
            }
            What::HostFiles => {
                let (root, id) = (Path::new("/"), &container.id);
                let binds = host_files_of_container(root, id, config.places());
                let binds = binds.with_context(no_spec)?;
                let (files, errors) = BoundFiles::open(binds, pid, &running);
                let errors = errors.iter().map(|error| error_chain(error));
                let errors = errors.map(|error| format!("{name}: {error}"));
                report.problems.extend(errors);
                Some(Box::new(files))
            }
        };
        let files = other.as_deref().unwrap_or(&volumes);
        let start = Instant::now();
        let spec = self.pods.spec_of(&container.id);
        let refreshed = refresh_container(
            helper,
            &process,
            spec.as_ref(),
            &[files],
            self.act(),
            &TuckRecords::default(),
        )
        .with_context(|| format!("refresh {name}"))?;
        let identity = Identity {
            container: container.name.clone(),
            pod: container.pod.clone(),
        };
        let subpaths = refreshed.subpaths;
        let line = self.line(&container.id, identity, refreshed, start.elapsed());
        report.add(&name, &line, subpaths);
        record(journal, line)
    }
}

fn record(journal: Option<&Path>, line: RefreshLine) -> anyhow::Result<()> {
    match journal
        .filter(|_| !line.mounts.is_empty())
        .map(|journal| record_refresh(journal, line))
    {
        Some(Err(error)) => Err(error).context("journal the refresh"),
        Some(Ok(())) | None => Ok(()),
    }
}

/// The host's subpaths first: a container that restarts meanwhile starts with the current file.
fn rebind_host(
    kubelet_root: PathBuf,
    uid: &str,
    policy: &Policy,
    journal: Option<&Path>,
    report: &mut RefreshReport,
) {
    let subpaths = kubelet_root.join("pods").join(uid).join("volume-subpaths");
    let names = std::fs::read_dir(subpaths).into_iter().flatten().flatten();
    for volume in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        let volume = VolumeOfPod {
            kubelet_root: kubelet_root.clone(),
            pod_uid: uid.to_owned(),
            volume,
        };
        let rebound = rebind_volume(&volume, policy);
        let line = RebindLine::new(Actor::Operator, uid, &volume.volume, &rebound);
        report.problems.extend(rebound.problems.iter().cloned());
        let has_findings = !line.binds.is_empty() || !line.problems.is_empty();
        if let Some(Err(error)) = journal
            .filter(|_| has_findings)
            .map(|journal| record_rebind(journal, line))
        {
            report.problems.push(format!(
                "journal the re-bind of volume {}: {}",
                volume.volume,
                error_chain(&error)
            ));
        }
    }
}

impl RefreshReport {
    fn add(&mut self, container: &str, line: &RefreshLine, subpaths: usize) {
        self.subpaths += subpaths;
        let file = |mount: &RefreshedMount| RefreshedFile {
            container: container.to_owned(),
            mount: mount.clone(),
        };
        self.files.extend(line.mounts.iter().map(file));
        let not_notified = line
            .notification
            .as_ref()
            .and_then(|notification| notification.error.as_ref());
        self.problems
            .extend(not_notified.map(|error| format!("notify {container}: {error}")));
    }
}

fn text(report: &RefreshReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for line in &report.files {
        let RefreshedFile { container, mount } = line;
        let (destination, outcome) = (&mount.destination, &mount.outcome);
        let style = if outcome.is_replaced() {
            HEALTHY
        } else {
            FAULTY
        };
        let reason = mount
            .reason()
            .map(|reason| format!(": {reason}"))
            .unwrap_or_default();
        lines.headed(
            outcome.as_str(),
            style,
            &format!("{destination} of {container}{reason}"),
        );
    }
    lines.line(&format!(
        "{} checked, {} stale before",
        counted(report.subpaths, "mount", "mounts"),
        report.files.len()
    ));
    lines
}

// `bindguard refresh --container` of Docker or Podman. The container's spec has the host path of
// each bind.

/// The running container of an engine whose id begins with this text; `None` without such a
/// container.
///
/// # Errors
/// If several containers match, or a rootless container of a user.
fn container_with_id(id: &str) -> anyhow::Result<Option<EngineContainer>> {
    let root = Path::new("/");
    let mut found = engine_containers(&state_folders(root));
    found.retain(|container| !id.is_empty() && container.id.starts_with(id));
    ensure!(
        found.len() < 2,
        "more than one container has an id that begins with {id}"
    );
    if let (true, Some(user)) = (found.is_empty(), rootless_owner(root, id)) {
        bail!(
            "refresh container {id}: it is a rootless container of user {user}, whose host paths are in a mount namespace of \
             that user; restart it to use the new files"
        );
    }
    Ok(found.pop())
}

/// Refreshes the binds that `--what` names; by default, the single files that the container binds.
fn refresh(
    helper: &HelperProcess,
    container: &EngineContainer,
    verb: &Refresh,
    config: &Config,
) -> anyhow::Result<RefreshReport> {
    let name = format!("{} container {}", container.engine.name(), container.id);
    let doing = || format!("refresh {name}");
    // Since the read of the state, the kernel may have reused the pid.
    let process = hold_init(&container.id, container.pid).with_context(doing)?;
    let bytes = read_spec(&container.bundle).with_context(doing)?;
    let spec = SpecView::from_bytes(&bytes).with_context(doing)?;
    let running = ContainersOfNode::at(Path::new("/"));
    let (places, bundle) = (config.places(), container.bundle.as_path());
    let mut errors = Vec::new();
    let files: Box<dyn CurrentFiles + '_> = match verb.what {
        // An engine has no subPaths.
        What::Subpaths | What::HostFiles => {
            let binds = FileBind::of_spec(&spec);
            let (files, failed) = BoundFiles::open(binds, container.pid, &running);
            errors = failed;
            Box::new(files)
        }
        What::Volumes => {
            let mounts = BoundMounts::of_engine(bundle, &running, places, None);
            Box::new(mounts.with_context(doing)?)
        }
        What::HostRoot => {
            let roots = HostRoots::open(bundle, config.policy(), places);
            Box::new(roots.with_context(doing)?)
        }
    };
    let start = Instant::now();
    let users = SpecUsers::from_spec(&bytes).ok();
    let refreshed = refresh_container(
        helper,
        &process,
        users.as_ref(),
        &[&*files],
        verb.act(),
        &TuckRecords::default(),
    );
    let refreshed = refreshed.with_context(doing)?;
    let identity = Identity::without_pod(&name);
    let subpaths = refreshed.subpaths;
    let line = verb.line(&container.id, identity, refreshed, start.elapsed());
    let mut report = RefreshReport::default();
    report.problems.extend(
        errors
            .iter()
            .map(|error| format!("{name}: {}", error_chain(error))),
    );
    report.add(&name, &line, subpaths);
    if let Err(error) = record(config.journal().filter(|_| !verb.dry_run), line) {
        report.problems.push(format!("{error:#}"));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_core::report::{AttachMethod, MountResult};
    use bindguard_testing::documented;

    #[test]
    fn json_matches_the_document() {
        let source = "/var/lib/kubelet/pods/eea5c325/volumes/kubernetes.io~configmap/conf/app.conf";
        let outcome = MountResult::Replaced {
            method: AttachMethod::Beneath,
        };
        let mut line = RefreshLine::new(Actor::Operator, "bb344d713010", Identity::default());
        line.mounts.push(RefreshedMount::new(
            "/etc/app/app.conf".as_ref(),
            source.as_ref(),
            outcome,
        ));
        let mut report = RefreshReport::default();
        report.add("default/web/app", &line, 3);
        let shown = documented("`refresh`");
        assert_eq!(
            serde_json::to_string_pretty(&report).unwrap(),
            shown.trim_end()
        );
    }
}
