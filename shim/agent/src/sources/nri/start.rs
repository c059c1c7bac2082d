//! Checks the subPath files and all binds of a new container again, right before its start.
//!
//! The runtime calls the plugin after it created the container and before it starts the process
//! (`StartContainer`; `StateChange` before NRI 0.11). A volume may have changed since the runtime
//! mounted it (kubernetes#127602). So stale mounts are replaced in the new container, by the
//! refresh of running containers. The process has not run yet: no opt-in is needed, and nothing in
//! the container can see two contents. Where the pod's policy repairs no subpaths, no file is
//! replaced.
//!
//! Then the container's mounts are compared with the sources that its binds had at the create.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::judge::refusal_of_uncompared;
use bindguard_core::kubelet::PodPath;
use bindguard_core::policy::{Alarm, Mode, policy_of_pod};
use bindguard_core::refresh::SpecBind;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{Actor, RefreshLine};
use bindguard_core::spec::{Bind, SpecUsers, SpecView};
use bindguard_guard::refresh::{
    HeldProcess, HelperProcess, PodVolumes, RefreshAct, Refreshed, TuckRecords, refresh_container,
};
use bindguard_guard::{
    ExpectedSources, Probes, Proved, kubelet_roots_by_all_names, prove_new_container,
};
use bindguard_operator::containers::{
    bundle_of_container, hold_init, recorded_init_of, spec_of_container,
};
use tracing::warn;

use super::messages::CreatedContainer;
use super::ttrpc::RpcStatus;
use crate::sinks::AgentLine;
use crate::sinks::metrics::{StartAnswer, Total, TotalBy};
use crate::sources::nri::{Calls, NoResult};

/// The runtime waits 2 s for a plugin by default, then closes its connection and starts the
/// container.
const START_TIMEOUT: Duration = Duration::from_millis(500);

/// The time limit of the comparison.
const PROOF_TIMEOUT: Duration = Duration::from_millis(500);

/// The time limit of the refresh, which ends before the answer is due.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(400);

impl Calls {
    /// Replaces the stale mounts of a container, then compares all binds with the sources of the
    /// create. Both steps have a time limit. An unchecked container starts as it is.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub fn check(&self, container: CreatedContainer) -> Result<(), RpcStatus> {
        let refreshed = self.refresh(container.clone());
        self.prove(container, refreshed)
    }

    /// Returns the places of the replaced mounts.
    fn refresh(&self, container: CreatedContainer) -> Vec<PathBuf> {
        let (id, pod) = (container.id.clone(), container.pod_sandbox_id.clone());
        let (node, metrics, start) = (self.node, self.node.metrics, Instant::now());
        let until = start + REFRESH_TIMEOUT;
        let work = move || refreshed(node.helper, &container, &node.config, until);
        let mut places = Vec::new();
        let refreshed = self.starting.within(&pod, START_TIMEOUT, work);
        let answer = match refreshed.unwrap_or_else(|error| Err(error.into())) {
            Ok(None) => StartAnswer::Current,
            Ok(Some((names, refreshed))) => {
                places.extend(refreshed.replaced_places().map(Path::to_owned));
                let (replaced, all) = (refreshed.replaced(), refreshed.mounts.len());
                for mount in &refreshed.mounts {
                    metrics.refreshed(&mount.outcome);
                }
                if let Some(child) = refreshed.abandoned {
                    metrics.hanging_children.add(&id, &id, child);
                }
                if all > 0 {
                    let mut line = RefreshLine::new(Actor::Agent, &id, names);
                    line.mounts = refreshed.mounts;
                    line.set_duration(start.elapsed());
                    self.report(AgentLine::Refresh(line));
                }
                match (all, refreshed.is_out_of_time) {
                    (_, true) => StartAnswer::TimedOut,
                    (0, false) => StartAnswer::Current,
                    (_, false) if replaced == all => StartAnswer::Refreshed,
                    (_, false) => StartAnswer::Failed,
                }
            }
            Err(error) => {
                let why = error_chain(&*error);
                warn!("container {id} starts as it is: check its mounts: {why}");
                match error.downcast_ref().is_some_and(NoResult::is_late) {
                    true => StartAnswer::TimedOut,
                    false => StartAnswer::Failed,
                }
            }
        };
        self.started(answer);
        places
    }

    /// Compares the binds of a container whose shim calls no guard, without the refreshed mounts.
    fn prove(&self, container: CreatedContainer, refreshed: Vec<PathBuf>) -> Result<(), RpcStatus> {
        let created = self.created().pop(&container.id);
        let sources = created.map(|created| created.sources.without_refreshed(refreshed));
        if self.node.config.policy().proof == Alarm::Off {
            return Ok(());
        }
        let (id, node) = (container.id.clone(), self.node);
        let binds = sources.as_ref().map_or(0, ExpectedSources::binds);
        let pod = container.pod_sandbox_id.clone();
        let work = move || proved(&container, sources.as_ref(), &node.config);
        let proved = self.starting.within(&pod, PROOF_TIMEOUT, work);
        let refusal = match proved.unwrap_or_else(|error| Err(error.into())) {
            Ok(None) => None,
            Ok(Some((pid, proved))) => {
                node.metrics.checked(&proved.report);
                node.metrics[Total::UnprovenBinds].inc_by(proved.report.unproven as u64);
                self.report(AgentLine::NriCreate(id, Some(pid), proved.report));
                proved.refusal
            }
            Err(error) => self.not_proven(&id, binds, &error_chain(&*error)),
        };
        let Some(reason) = refusal else {
            return Ok(());
        };
        self.started(StartAnswer::Refused);
        Err(RpcStatus::refused(&reason))
    }

    fn started(&self, answer: StartAnswer) {
        self.node.metrics.count_by(TotalBy::NriStarts, answer, 1);
    }

    /// Counts the binds of an incomplete comparison. Returns the reason for a refusal if policy
    /// refuses such a start.
    fn not_proven(&self, id: &str, binds: usize, why: &str) -> Option<String> {
        self.node.metrics[Total::UnprovenBinds].inc_by(binds as u64);
        warn!("the mounts of container {id} are not compared with its spec: {why}");
        refusal_of_uncompared(why, self.node.config.policy())
    }

    /// Answers a request that could not be read.
    ///
    /// # Errors
    /// If the node's policy refuses mounts that were not compared.
    pub fn unread_start(&self, error: &prost::DecodeError) -> Result<(), RpcStatus> {
        let why = format!("read the runtime's request: {}", error_chain(error));
        let Some(reason) = self.not_proven("without an id", 0, &why) else {
            self.started(StartAnswer::Failed);
            return Ok(());
        };
        self.started(StartAnswer::Refused);
        Err(RpcStatus::refused(&reason))
    }
}

/// `None` if the container has no subPath file, or policy repairs none.
fn refreshed(
    helper: Option<&HelperProcess>,
    container: &CreatedContainer,
    config: &Config,
    until: Instant,
) -> Result<Option<(Identity, Refreshed)>> {
    let Some(bytes) = spec_of_container(Path::new("/"), &container.id) else {
        return Ok(None);
    };
    let spec = SpecView::from_bytes(&bytes)?;
    let (policy, _) = policy_of_pod(config.policy(), |name| spec.annotation(name));
    let Some(pod) = pod_directory(&spec, config).filter(|_| policy.stale_subpaths == Mode::Repair)
    else {
        return Ok(None);
    };
    let volumes = PodVolumes::open(&pod)?;
    let volumes = volumes.for_container(SpecBind::of_spec(&spec));
    let users = SpecUsers::from_spec(&bytes)?;
    let init = init_of(container)?;
    let left = until.saturating_duration_since(Instant::now());
    // The container starts, or has started: a container that did not opt in is not entered then.
    ensure!(!left.is_zero(), "its volumes were open too late");
    let refreshed = refresh_container(
        helper.context("the agent has no helper process")?,
        left,
        &init,
        Some(&users),
        &[&volumes],
        RefreshAct::Replace(Notify::None),
        &TuckRecords::default(),
    );
    Ok(Some((Identity::from_spec(&spec), refreshed?)))
}

/// The comparison of a container's mounts, and the pid of the container's init. `None` if the
/// bundle has a record of the guard.
fn proved(
    container: &CreatedContainer,
    sources: Option<&ExpectedSources>,
    config: &Config,
) -> Result<Option<(u32, Proved)>> {
    let bundle =
        bundle_of_container(Path::new("/"), &container.id).context("its bundle is not found")?;
    let init = init_of(container)?;
    let (policy, places) = (config.policy(), config.places());
    let proved = prove_new_container(&bundle, init.pid(), sources, policy, places);
    Ok(proved.map(|proved| (init.pid(), proved)))
}

/// The init of a container. A pidfd holds the process, so that the pid is not used again.
fn init_of(container: &CreatedContainer) -> Result<HeldProcess> {
    let pid = Some(container.pid).filter(|pid| *pid > 0);
    let pid = pid.or_else(|| recorded_init_of(Path::new("/"), &container.id));
    let pid = pid.context("the runtime reports no process")?;
    Ok(hold_init(Path::new("/"), &container.id, pid)?)
}

/// The folder of the pod whose subpaths or volumes the container binds. `None` if it binds none.
fn pod_directory(spec: &SpecView<'_>, config: &Config) -> Option<PathBuf> {
    let may_be_of_pod = |bind: &&Bind<'_>| PodPath::may_be_one(bind.source());
    let mut binds = spec.binds().iter().filter(may_be_of_pod).peekable();
    binds.peek()?;
    let roots = kubelet_roots_by_all_names(config.places(), &Probes::for_create());
    binds.find_map(|bind| {
        let path = PodPath::from_path(bind.source(), roots.iter().map(PathBuf::as_path))?;
        Some(path.kubelet_root.join("pods").join(path.pod_uid))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashSet;
    use std::fs;

    use bindguard_guard::admit_spec;
    use bindguard_testing::live::{Container as Running, Inside};
    use bindguard_testing::{Pod, helper, own_namespace, skipped};

    use super::*;
    use crate::work::Node;

    /// A cgroup with the name of a container.
    struct Cgroup(PathBuf);

    impl Cgroup {
        /// `None` without the right to make cgroups.
        fn with(id: &str, pid: u32) -> Option<Self> {
            let hierarchies =
                ["unified", "pids", ""].map(|name| Path::new("/sys/fs/cgroup").join(name));
            let has_processes =
                |folder: &&PathBuf| fs::exists(folder.join("cgroup.procs")).unwrap();
            let cgroup = hierarchies.iter().find(has_processes)?.join(id);
            if fs::create_dir(&cgroup).is_err() {
                skipped("no right to make a cgroup");
                return None;
            }
            fs::write(cgroup.join("cgroup.procs"), pid.to_string()).unwrap();
            Some(Self(cgroup))
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }

    /// containerd writes the kernel's name of a source into the spec.
    #[test]
    fn the_pod_of_a_linked_kubelet_root_is_known() {
        let disk = tempfile::tempdir().unwrap();
        let [data, link] = ["data", "link"].map(|name| disk.path().join(name));
        fs::create_dir(&data).unwrap();
        std::os::unix::fs::symlink(&data, &link).unwrap();
        let config = Config::from_toml(&format!("kubelet.roots = [{link:?}]")).unwrap();
        for root in [&data, &link] {
            let source = root.join("pods/u/volume-subpaths/conf/app/0");
            let spec = serde_json::json!({"mounts": [
                {"type": "bind", "source": source, "destination": "/d"}
            ]});
            let spec = spec.to_string();
            let spec = SpecView::from_bytes(spec.as_bytes()).unwrap();
            assert_eq!(pod_directory(&spec, &config), Some(root.join("pods/u")));
        }
    }

    #[test]
    fn the_binds_of_a_comparison_without_an_end_are_counted() {
        let (source, config) = (tempfile::tempdir().unwrap(), Config::default());
        let bind = |destination: &str| serde_json::json!({"type": "bind", "source": source.path(), "destination": destination, "options": ["rbind"]});
        let spec = serde_json::json!({"mounts": [bind("/a"), bind("/b")]}).to_string();
        let (policy, places) = (config.policy(), config.places());
        let deadline = Duration::from_secs(60);
        let admission = admit_spec(spec.as_bytes(), policy, places, deadline, |_, edits| {
            edits.to_vec()
        });
        let node = Node::silent("");
        let calls = Calls::new(node);
        calls.keep("gone", admission.expected, HashSet::new());
        let container = CreatedContainer {
            id: "gone".to_owned(),
            ..CreatedContainer::default()
        };
        calls.prove(container, Vec::new()).unwrap();
        let figures = node.metrics.text().unwrap();
        let counted = "bindguard_unproven_binds_total 2\n";
        assert!(figures.contains(counted), "{figures}");
    }

    /// A disk that answers late: by then the container runs, and did not opt in.
    #[test]
    fn a_container_that_has_started_meanwhile_is_not_entered() {
        if !own_namespace() {
            return;
        }
        let pod = Pod::with_keys(1);
        let root = tempfile::tempdir().unwrap();
        let running = Running::start(root.path(), &[Inside::of(pod.subpath(0), "etc/app/0")]);
        let id = format!("bindguard-nri-{}", std::process::id());
        let Some(_cgroup) = Cgroup::with(&id, running.process.pid()) else {
            return;
        };
        let none = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", "/run", "tmpfs", none, None).unwrap();
        let task = Path::new("/run/containerd/io.containerd.runtime.v2.task/k8s.io").join(&id);
        fs::create_dir_all(&task).unwrap();
        fs::copy(pod.config(), task.join("config.json")).unwrap();
        fs::write(task.join("init.pid"), running.process.pid().to_string()).unwrap();
        let config = format!("kubelet.roots = [{:?}]", pod.places().kubelet_roots[0]);
        let config = Config::from_toml(&config).unwrap();
        let admitted = || {
            let (spec, limit) = (fs::read(pod.config()).unwrap(), Duration::from_secs(60));
            let (policy, places) = (config.policy(), config.places());
            admit_spec(&spec, policy, places, limit, |_, edits| edits.to_vec()).expected
        };
        let [expected, without_refresh] = [admitted(), admitted()];
        pod.update_keeping_old(1);
        let container = CreatedContainer {
            id,
            ..CreatedContainer::default()
        };
        let now = Instant::now();
        let late = refreshed(Some(helper()), &container, &config, now);
        let late = late.unwrap_err().to_string();
        assert_eq!(late, "its volumes were open too late");
        assert_eq!(running.read("etc/app/0").as_deref(), Some("0"));
        let in_time = now + Duration::from_secs(60);
        let (_, done) = refreshed(Some(helper()), &container, &config, in_time)
            .unwrap()
            .unwrap();
        assert_eq!(done.replaced(), 1, "{done:?}");
        assert_eq!(running.read("etc/app/0").as_deref(), Some("1"));
        // The host's subpath still shows the old file.
        let places: Vec<_> = done.replaced_places().map(Path::to_owned).collect();
        for (sources, wrong) in [
            (without_refresh, 1),
            (expected.without_refreshed(places), 0),
        ] {
            let (_, proved) = proved(&container, Some(&sources), &config)
                .unwrap()
                .unwrap();
            let found = (proved.report.binds.len(), proved.report.unproven);
            assert_eq!(found, (wrong, 0), "{proved:?}");
        }
        drop(running);
    }
}
