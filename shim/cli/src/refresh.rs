//! `bindguard refresh`: a running container gets the current files of its subPaths, or of the
//! single files that Docker or Podman bound, or releases mounts of the host, once and by hand,
//! without the agent.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{Actor, RebindLine, RefreshLine, RefreshedMount};
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, HeldProcess, HelperProcess, HostRoots,
    PodVolumes, REPLACE_TIMEOUT, RefreshAct, TuckRecords, VolumeOfPod, rebind_volume,
    refresh_container,
};
use bindguard_guard::{record_rebind, record_refresh};
use bindguard_operator::containers::{
    EngineContainer, binds_of_container, bundle_of_container, engine_containers, hold_init,
    host_files_of_container, rootless_owner, state_folders,
};
use bindguard_operator::kubelets_here;
use bindguard_operator::node::{is_root, refuse_other_mounts};
use bindguard_operator::pods::{PodContainer, Pods};
use bindguard_operator::writers::ContainersOfNode;
use bindguard_sys::files::read_spec;
use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Args, ValueEnum};
use serde::Serialize;

use crate::pods::{PodsFrom, Selection, pod_argument};
use crate::show::{self, Lines, Output, counted, joined_names, unrecorded};

/// Arguments of `refresh`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("target").args(["named", "pod", "namespace", "all_namespaces", "container"]).required(true).multiple(true)))]
pub struct Refresh {
    /// Refresh every running container of this pod.
    #[arg(value_name = "pod/NAME", value_parser = pod_argument, conflicts_with = "pod")]
    named: Option<String>,
    #[command(flatten)]
    selection: Selection,
    /// Refresh this container of a pod, of Docker or of Podman, by its id.
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new(),
          conflicts_with_all = ["named", "pod", "namespace", "all_namespaces"])]
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
    #[command(flatten)]
    output: Output,
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

fn notify(text: &str) -> Result<Notify> {
    Notify::from_text(text).context(
        "expected none, touch, signal:NAME or signal:NAME@PROGRAM with HUP, USR1, USR2 or WINCH",
    )
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
    pub fn run(self, config: &Config) -> Result<ExitCode> {
        ensure!(
            is_root(),
            "refresh containers: this needs root, also with --dry-run"
        );
        let mut run = Run {
            verb: &self,
            config,
            helper: HelperProcess::start().context("start the helper process")?,
            running: &ContainersOfNode("/".into()),
            report: RefreshReport::default(),
        };
        if let Some(id) = &self.container
            && let Some(container) = container_with_id(id)?
        {
            let name = format!("{} container {}", container.engine.name(), container.id);
            run.refresh_of_engine(&container, &name)
                .with_context(|| format!("refresh {name}"))?;
        } else {
            let pods = self.pods.pods();
            for container in self.containers(&pods)? {
                let name = joined_names(container, "/");
                if let Err(error) = run.refresh_of_pod(container, &name) {
                    run.report
                        .problems
                        .push(format!("refresh {name}: {error:#}"));
                }
            }
        }
        let report = run.report;
        let mut lines = Lines::of_problems(&report.problems);
        let mut is_left = false;
        for RefreshedFile { container, mount } in &report.files {
            let (word, is_replaced) = (mount.outcome.as_str(), mount.outcome.is_replaced());
            let name = format!("{} of {container}", mount.destination);
            lines.result(word, is_replaced, &name, mount.reason().as_deref());
            is_left |= !is_replaced;
        }
        lines.line(&format!(
            "{} checked, {} stale before",
            counted(report.subpaths, "mount", "mounts"),
            report.files.len()
        ));
        let is_incomplete = !report.problems.is_empty();
        show::finish(&report, self.output, lines, is_incomplete, is_left)
    }

    /// The running containers that are meant, without sandboxes.
    fn containers<'p>(&self, pods: &'p Pods) -> Result<Vec<&'p PodContainer>> {
        let selection = self.selection.clone().with(self.named.clone());
        let uids = selection.uids(pods)?;
        if self.container.is_none() {
            selection.check_known(pods)?;
        }
        let mut found = Vec::from_iter(pods.running());
        found.retain(|container| match (&self.container, &container.pod.uid) {
            (Some(id), _) => container.id.starts_with(id.as_str()),
            (None, Some(uid)) => uids.contains(uid),
            (None, None) => false,
        });
        ensure!(
            !found.is_empty(),
            "nothing to refresh: this node has no such running container"
        );
        if let Some(id) = self.container.as_ref().filter(|_| found.len() > 1) {
            bail!("more than one container has an id that begins with {id}");
        }
        Ok(found)
    }
}

/// A call of `refresh`, and its results so far.
struct Run<'a> {
    verb: &'a Refresh,
    config: &'a Config,
    helper: HelperProcess,
    running: &'a ContainersOfNode,
    report: RefreshReport,
}

impl<'a> Run<'a> {
    fn refresh_of_pod(&mut self, container: &PodContainer, name: &str) -> Result<()> {
        let (verb, policy, places) = (self.verb, self.config.policy(), self.config.places());
        let (node, id) = (Path::new("/"), &container.id);
        let uid = container.pod.uid.as_deref();
        let uid = uid.context("its pod's uid is unknown")?;
        let pid = verb.pods.init_of(id).context(
            "neither its runtime's record nor the CRI names its process; name the socket with --cri",
        )?;
        let process = hold_init(node, id, pid)?;
        // The files of a kubelet's volume are the same in every mount namespace.
        if verb.what != What::Subpaths {
            refuse_other_mounts(&process)?;
        }
        let (roots, problems) = kubelets_here(places);
        self.report.problems.extend(problems);
        let mut roots = roots.into_iter();
        let root = roots.find(|root| root.join("pods").join(uid).symlink_metadata().is_ok());
        let root = root.with_context(|| {
            format!("no kubelet root has the pod {uid}; see [kubelet] roots in config.toml")
        })?;
        let pod = root.join("pods").join(uid);
        if !verb.dry_run && matches!(verb.what, What::Subpaths | What::Volumes) {
            self.rebind_host(root, uid);
        }
        let bundle = || bundle_of_container(node, id).context("its bundle is not found");
        const NO_SPEC: &str = "read the spec in its bundle";
        let volumes = PodVolumes::open(&pod)?;
        let volumes = volumes.with_drivers(&pod, || verb.pods.writable_mounts(uid))?;
        let files: Box<dyn CurrentFiles + '_> = match verb.what {
            What::Subpaths => Box::new(volumes.for_container(binds_of_container(node, id))),
            What::Volumes => Box::new(BoundMounts::open(&bundle()?, &pod).context(NO_SPEC)?),
            What::HostRoot => {
                Box::new(HostRoots::open(&bundle()?, policy, places).context(NO_SPEC)?)
            }
            What::HostFiles => {
                let binds = host_files_of_container(node, id, places).context(NO_SPEC)?;
                Box::new(self.host_files(name, binds, pid))
            }
        };
        let line = RefreshLine::new(Actor::Operator, id, container.identity());
        self.replace(name, &process, verb.pods.spec_of(id), &*files, line)
    }

    /// Refreshes the binds that `--what` names; by default, the single files that the container
    /// binds. The container's spec has the host path of each bind.
    fn refresh_of_engine(&mut self, container: &EngineContainer, name: &str) -> Result<()> {
        let EngineContainer {
            id, bundle, pid, ..
        } = container;
        let (policy, places) = (self.config.policy(), self.config.places());
        // Since the read of the state, the kernel may have reused the pid.
        let process = hold_init(Path::new("/"), id, *pid)?;
        let bytes = read_spec(bundle)?;
        let files: Box<dyn CurrentFiles + '_> = match self.verb.what {
            // An engine has no subPaths.
            What::Subpaths | What::HostFiles => {
                let binds = FileBind::of_spec(&SpecView::from_bytes(&bytes)?);
                Box::new(self.host_files(name, binds, *pid))
            }
            What::Volumes => Box::new(BoundMounts::of_engine(bundle, self.running, places, None)?),
            What::HostRoot => Box::new(HostRoots::open(bundle, policy, places)?),
        };
        let line = RefreshLine::new(Actor::Operator, id, Identity::without_pod(name));
        let users = SpecUsers::from_spec(&bytes).ok();
        self.replace(name, &process, users, &*files, line)
    }

    /// The single files of the host that a container binds.
    fn host_files(&mut self, name: &str, binds: Vec<FileBind>, init: u32) -> BoundFiles<'a> {
        let (files, errors) = BoundFiles::open(binds, init, self.running);
        for error in errors {
            let problem = format!("{name}: {}", error_chain(&error));
            self.report.problems.push(problem);
        }
        files
    }

    /// Replaces the stale mounts of a container, and records the results.
    fn replace(
        &mut self,
        name: &str,
        process: &HeldProcess,
        spec: Option<SpecUsers>,
        files: &dyn CurrentFiles,
        mut line: RefreshLine,
    ) -> Result<()> {
        let act = match self.verb.dry_run {
            true => RefreshAct::Look,
            false => RefreshAct::Replace(self.verb.notify.clone()),
        };
        let start = Instant::now();
        let refreshed = refresh_container(
            &self.helper,
            REPLACE_TIMEOUT,
            process,
            spec.as_ref(),
            &[files],
            act,
            &TuckRecords::default(),
        )?;
        line.mounts = refreshed.mounts;
        line.notification = refreshed.notification;
        line.set_duration(start.elapsed());
        self.report.subpaths += refreshed.subpaths;
        for mount in &line.mounts {
            self.report.files.push(RefreshedFile {
                container: name.to_owned(),
                mount: mount.clone(),
            });
        }
        if let Some(notification) = &line.notification
            && let Some(error) = &notification.error
        {
            let problem = format!("notify {name}: {error}");
            self.report.problems.push(problem);
        }
        if let Some(journal) = self.config.journal()
            && !self.verb.dry_run
            && !line.mounts.is_empty()
        {
            let problem = unrecorded("the refresh", record_refresh(journal, line));
            self.report.problems.extend(problem);
        }
        Ok(())
    }

    /// The host's subpaths first: a container that restarts meanwhile starts with the current file.
    fn rebind_host(&mut self, kubelet_root: PathBuf, uid: &str) {
        let subpaths = kubelet_root.join("pods").join(uid).join("volume-subpaths");
        for entry in std::fs::read_dir(subpaths).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let volume = VolumeOfPod {
                kubelet_root: kubelet_root.clone(),
                pod_uid: uid.to_owned(),
                volume: name,
            };
            let name = &volume.volume;
            let rebound = rebind_volume(&volume, self.config.policy());
            let line = RebindLine::new(Actor::Operator, uid, name, &rebound);
            let problems = &mut self.report.problems;
            problems.extend(rebound.problems);
            if let Some(journal) = self.config.journal()
                && !(line.binds.is_empty() && line.problems.is_empty())
            {
                let what = &format!("the re-bind of volume {name}");
                problems.extend(unrecorded(what, record_rebind(journal, line)));
            }
        }
    }
}

/// The running container of Docker or Podman whose id begins with this text; `None` without such a
/// container.
///
/// # Errors
/// If several containers match, or a rootless container of a user.
fn container_with_id(id: &str) -> Result<Option<EngineContainer>> {
    let node = Path::new("/");
    let mut found = engine_containers(&state_folders(node));
    found.retain(|container| container.id.starts_with(id));
    ensure!(
        found.len() < 2,
        "more than one container has an id that begins with {id}"
    );
    if found.is_empty()
        && let Some(user) = rootless_owner(node, id)
    {
        bail!(
            "refresh container {id}: it is a rootless container of user {user}, whose host paths are in a mount namespace of \
             that user; restart it to use the new files"
        );
    }
    Ok(found.pop())
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
        let (file, source) = ("/etc/app/app.conf".as_ref(), source.as_ref());
        let report = RefreshReport {
            files: vec![RefreshedFile {
                container: "default/web/app".to_owned(),
                mount: RefreshedMount::new(file, source, outcome),
            }],
            subpaths: 3,
            problems: Vec::new(),
        };
        let shown = documented("`refresh`");
        assert_eq!(
            serde_json::to_string_pretty(&report).unwrap(),
            shown.trim_end()
        );
    }
}
