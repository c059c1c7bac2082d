//! Checks of a node: each point is a condition that hinders bindguard or leaves mounts in a wrong
//! state.
//!
//! Each point is a function over plain evidence. A failed point names the command to run.

mod kernel;

use std::collections::BTreeSet;
use std::path::Path;

use bindguard_core::evidence::Observed;
use bindguard_core::handover::{SHIM, SHIM_RUNTIME_TYPE, WRAPPER};
use bindguard_core::judge::Verdict;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::{BelowEmptyDirs, Mode, Policy};
use bindguard_core::text::shell_word;
use serde::Serialize;
use serde_json::Value;

use crate::doctor::kernel::known_fault;
use crate::kubelet_roots::HostMounts;
use crate::namespaces::NamespaceMounts;
use crate::node::Process;
use crate::node_report::NodeReport;
use crate::old_binds::ContainerMounts;
use crate::pods::{Pods, PodsOfVersion, mounts_in_volumes};

pub use crate::doctor::kernel::{
    LinuxDistribution, kernel, mount_helpers, os_release, os_release_value,
};

/// The result of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PointStatus {
    /// No problem found.
    Ok,
    Failed,
    /// The check was not possible.
    Unknown,
}

/// A point of a node's check-up.
#[derive(Debug, Serialize)]
pub struct Point {
    /// Its name: stable, for programs.
    pub name: &'static str,
    #[serde(flatten)]
    pub check: Check,
}

/// The result of a point, with its message.
#[derive(Debug, Serialize)]
pub struct Check {
    pub status: PointStatus,
    pub message: String,
    /// The command to run next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Check {
    /// A point without a problem.
    pub fn ok(message: impl Into<String>) -> Self {
        Self {
            status: PointStatus::Ok,
            message: message.into(),
            command: None,
        }
    }

    /// A point with a problem, and the command that helps.
    pub fn failed(message: impl Into<String>, command: impl Into<String>) -> Self {
        Self {
            status: PointStatus::Failed,
            message: message.into(),
            command: Some(command.into()),
        }
    }

    /// A point that could not be checked.
    pub fn unknown(why: impl Into<String>) -> Self {
        Self {
            status: PointStatus::Unknown,
            ..Self::ok(why)
        }
    }
}

/// The first of some names, and the number of the others.
fn first_of(names: &[String], count: usize) -> String {
    let first = names[..names.len().min(count)].join(", ");
    match names.len().saturating_sub(count) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// All points. `doctor --json` prints the JSON form.
#[derive(Debug, Serialize)]
pub struct DoctorReport {
    /// The points, in the order in which an operator would check them.
    pub points: Vec<Point>,
}

impl DoctorReport {
    /// True if a point has the status.
    pub fn has(&self, status: PointStatus) -> bool {
        self.points.iter().any(|point| point.check.status == status)
    }
}

// Checks that the host's `/` is shared: rslave needs that to receive umounts, and older kernels
// need it for a re-bind.

/// The point for the host's `/`.
pub fn host_root(table: &MountTable) -> Check {
    match table.stack_at(Path::new("/")).last() {
        Some(root) if root.propagation.passes_umounts_on() => {
            Check::ok("/ is shared: umounts reach containers that follow them")
        }
        Some(_) => Check::failed(
            "/ is private: no container can follow the host's umounts, whatever its mountPropagation",
            "mount --make-rshared /",
        ),
        None => Check::unknown("the mount table has no /"),
    }
}

// Containers with a read-only bind of the host's root that can write to later mounts of the host.
//
// The default makes such binds rslave, so that the host's umounts arrive. The point is no fault: an
// operator decides whether each of these pods may do what docs/security.md says.

/// The number of pods that the point names.
const MAX_PODS: usize = 10;

pub fn read_only_binds(found: &ContainerMounts) -> Check {
    let mut pods = BTreeSet::new();
    for container in &found.open_to_later_mounts {
        let name = container.pod.display_name();
        pods.insert(name.unwrap_or_else(|| container.id.clone()));
    }
    if !pods.is_empty() {
        return Check::ok(format!(
            "these pods bind the host's root read-only, and can write to mounts that the host makes later: {}; \
                 [host-root] read-only = \"keep\" in config.toml keeps such binds private",
            first_of(&Vec::from_iter(pods), MAX_PODS)
        ));
    }
    match found.unread.first() {
        Some(unread) => Check::unknown(unread.container.problem(&unread.why)),
        None => Check::ok("no read-only bind of the host's root takes in later mounts"),
    }
}

// `fs.may_detach_mounts`: on RHEL 7 a mount point that has a mount in another namespace can be
// removed only if this is 1. Every kernel since 3.18 allows it by default and has no such key.

/// The point for it; `setting` is the text of `/proc/sys/fs/may_detach_mounts`.
pub fn detach_mounts(setting: &Observed<String>) -> Check {
    match setting {
        Observed::Absent => {
            Check::ok("this kernel lets mount points be removed that are in use elsewhere")
        }
        Observed::Seen(text) if text.trim() == "1" => Check::ok("fs.may_detach_mounts is 1"),
        Observed::Seen(text) => Check::failed(
            format!(
                "fs.may_detach_mounts is {}: removing a pod's folders fails with \"device or resource busy\"",
                text.trim()
            ),
            "sysctl -w fs.may_detach_mounts=1",
        ),
        Observed::Unreadable(why) => Check::unknown(why.clone()),
    }
}

// Mounts of the host below a pod's emptyDir: the kubelet removes the files that they show when the
// pod is deleted (kubernetes#129550, #115054).

pub fn below_emptydirs(table: &MountTable, places: &Places, policy: BelowEmptyDirs) -> Check {
    if policy == BelowEmptyDirs::Off {
        return Check::ok("not checked: mounts-below-emptydir is off");
    }
    let found = mounts_in_volumes(table, &Pods::default(), places);
    let Some(first) = found.first() else {
        if let Some(skipped) = table.skipped() {
            return Check::unknown(skipped.to_string());
        }
        return Check::ok("nothing is mounted below an emptyDir");
    };
    let count = found.len();
    if policy == BelowEmptyDirs::Detach {
        let message = format!(
            "{count} mounts below volumes of pods; bindguard's shim unmounts those below emptyDirs with their pods"
        );
        return Check::ok(message);
    }
    let shown = first.mount_point.display();
    let message = format!(
        "{count} mounts are below volumes of pods, such as {shown}: {}",
        first.effect()
    );
    Check::failed(message, first.command.clone())
}

// FUSE daemons in the kubelet's cgroup: a restart of the kubelet ends them. From then on all their
// mounts fail with "transport endpoint is not connected" (Kubernetes' PR 49640 starts its own by
// `systemd-run --scope`).

/// The point for them. `kubelets`: the kubelets of this node; `daemons`: the processes that have
/// /dev/fuse open.
pub fn fuse_daemons(kubelets: &[Process], daemons: &[Process]) -> Check {
    let homes: Vec<(&str, &str)> = kubelets.iter().filter_map(|it| home(&it.cgroup)).collect();
    let mut at_risk = daemons.iter().filter(|daemon| {
        lines(&daemon.cgroup).any(|(hierarchy, path)| {
            let mut homes = homes.iter().filter(|(of, _)| *of == hierarchy);
            homes.any(|(_, home)| {
                let rest = path.strip_prefix(home);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        })
    });
    let Some(first) = at_risk.next() else {
        let message = if kubelets.is_empty() {
            "no kubelet runs here"
        } else {
            "none lives in the kubelet's cgroup"
        };
        return Check::ok(message);
    };
    let pid = first.pid;
    let mut names = format!("{} ({pid})", first.command);
    for daemon in at_risk {
        names += &format!(", {} ({})", daemon.command, daemon.pid);
    }
    // The command moves a running process into its own scope, as `systemd-run --scope` does for a
    // new process.
    Check::failed(
        format!("in the kubelet's cgroup, and dead when it restarts: {names}"),
        format!(
            "busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager StartTransientUnit \
             'ssa(sv)a(sa(sv))' fuse-{pid}.scope fail 1 PIDs au 1 {pid} 0"
        ),
    )
}

/// The cgroup that ends with the kubelet: systemd's. If systemd's is `/`, that of any hierarchy
/// that is more than a slice.
fn home(cgroup: &str) -> Option<(&str, &str)> {
    let is_systemds =
        |(hierarchy, path): &(&str, &str)| ["", "name=systemd"].contains(hierarchy) && *path != "/";
    let is_nested = |(_, path): &(&str, &str)| path.matches('/').count() > 1;
    let of_systemd = lines(cgroup).find(is_systemds);
    of_systemd.or_else(|| lines(cgroup).find(is_nested))
}

/// The hierarchies and paths of a `/proc/PID/cgroup`.
fn lines(cgroup: &str) -> impl Iterator<Item = (&str, &str)> {
    cgroup
        .lines()
        .filter_map(|line| line.split_once(':')?.1.split_once(':'))
}

// Filesystems that the host has unmounted and another mount namespace keeps: causes of "device or
// resource busy".

/// The number of places that the point names.
const MAX_PLACES: usize = 3;

/// The point for them. `problems`: namespaces that could not be read.
pub fn pinned(
    own: &MountTable,
    others: &[NamespaceMounts],
    problems: &[String],
    places: &Places,
) -> Check {
    // A filesystem of a skipped line would look unmounted.
    if let Some(skipped) = own.skipped() {
        return Check::unknown(skipped.to_string());
    }
    let places = &places.with_runtimes_at(own.mount_points());
    let host = HostMounts::of(own, places);
    let mut found = BTreeSet::new();
    for table in others.iter().flat_map(|other| &other.table) {
        found.extend(host.pinned_by(table));
    }
    if let Some(first) = found.first() {
        let places: Vec<String> = found.iter().map(|it| it.display().to_string()).collect();
        return Check::failed(
            format!(
                "the host unmounted these, and other mount namespaces keep them: {}",
                first_of(&places, MAX_PLACES)
            ),
            format!("bindguard holders {}", shell_word(first)),
        );
    }
    let unread = || others.iter().find_map(NamespaceMounts::unread);
    match problems.first().cloned().or_else(unread) {
        Some(why) => Check::unknown(why),
        None => Check::ok(format!(
            "no filesystem that the host has unmounted is kept by any of the {} other mount namespaces",
            others.len()
        )),
    }
}

// Subpaths that are stale now, and volumes that are not mounted now.
//
// A finding fails the point, as it gives `diagnose` and `status` their exit status. The message has
// the cure: the guard repairs a subpath when its container is created next, or the operator does.

/// The point for them. `policy`: the guard's action at a create.
pub fn subpaths(report: &NodeReport, policy: &Policy) -> Check {
    let is_repair = policy.stale_subpaths == Mode::Repair;
    let (mut count, mut first, mut of_operator, mut unread) = (0, None, None, None);
    for bind in report.binds.iter().filter(|bind| bind.is_finding()) {
        if let Verdict::Unknown(why) = &bind.bind.finding.verdict {
            unread = unread.or(Some(format!("{}: {why}", bind.bind.source().display())));
            continue;
        }
        count += 1;
        first = first.or(Some(bind));
        if !is_repair || !bind.would_be_repaired() || bind.guarded == Some(false) {
            of_operator = of_operator.or(Some(bind));
        }
    }
    let checked = report.checked;
    let Some(bind) = of_operator.or(first) else {
        return match report.problems.first().cloned().or(unread) {
            Some(problem) => Check::unknown(problem),
            None => Check::ok(format!("{checked} subpaths and volumes checked")),
        };
    };
    let cure = match bind.guarded {
        _ if !bind.would_be_repaired() => "",
        _ if !is_repair => {
            ", and [checks] stale-subpaths in config.toml keeps the guard from repairing it"
        }
        Some(false) => ", and its pod runs under another shim: no guard repairs it",
        Some(true) => ", and the guard repairs it when its container is created next",
        None => ", and no process shows whether its pod runs under the guard",
    };
    let (path, verdict) = (bind.bind.source().display(), bind.bind.verdict());
    let message = format!("{count} of {checked} have findings: {path} is {verdict}{cure}");
    Check::failed(message, "bindguard diagnose")
}

// containerd's effective runtimes: a runtime must use bindguard, the running containerd must have
// loaded it, and this containerd must support the runtime's settings.

/// The command that shows what an installation would change.
const INSTALL: &str = "bindguard install --dry-run";

#[derive(Debug)]
pub struct ContainerdSeen {
    /// Its version, such as `1.7.24`.
    pub version: String,
    /// The runtimes of `containerd config dump`.
    pub runtimes: Vec<RuntimeEntry>,
    /// The runtime of pods without a RuntimeClass.
    pub default_runtime: String,
    /// The runtimes that call the guard in the running process, which read its file at its start.
    /// `None` without a CRI.
    pub loaded: Option<GuardedRuntimes>,
    /// The command with which containerd reads its file again.
    pub restart: String,
    /// The pods that run now.
    pub pods: RunningPods,
    /// The reasons why bindguard's runtimes, or the default, start no container.
    pub unusable: Vec<String>,
}

/// Running pods, by the shim under which they were created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RunningPods {
    #[serde(rename = "running")]
    pub all: usize,
    /// The pods whose creates run no guard.
    pub unguarded: usize,
}

impl RunningPods {
    /// The sentence about pods that an installation does not reach; empty if there are none.
    /// `is_default`: new pods run under bindguard without a RuntimeClass.
    pub fn not_reached(self, is_default: bool) -> String {
        let (all, unguarded) = (self.all, self.unguarded);
        let why = match is_default {
            _ if unguarded == 0 => return String::new(),
            false => "do not select it: only a repair by hand or the agent reaches them",
            true => {
                "keep another shim until they are created anew, also for containers that restart: delete them, or repair their subPaths"
            }
        };
        format!("; {unguarded} of {all} running pods {why}")
    }
}

/// A runtime of containerd's CRI plugin.
#[derive(Debug, Clone, Default)]
pub struct RuntimeEntry {
    pub name: String,
    pub runtime_type: String,
    pub runtime_path: String,
    /// `options.BinaryName`
    pub binary_name: String,
    /// `options.SystemdCgroup`
    pub systemd_cgroup: bool,
}

impl RuntimeEntry {
    /// True if this runtime runs the guard.
    pub fn calls_guard(&self) -> bool {
        let names = |path: &str, name: &str| path.rsplit('/').next() == Some(name);
        self.is_by_type() || names(&self.runtime_path, SHIM) || names(&self.binary_name, WRAPPER)
    }

    fn is_by_type(&self) -> bool {
        self.runtime_type.contains("bindguard")
    }
}

/// The point for a running containerd.
pub fn containerd(seen: &ContainerdSeen) -> Check {
    let (mut guarded, mut others) = (Vec::new(), Vec::new());
    for entry in &seen.runtimes {
        if entry.calls_guard() {
            guarded.push(entry);
        } else if matches!(&*entry.runtime_type, "" | "io.containerd.runc.v2") {
            others.push(entry);
        }
    }
    let version = &seen.version;
    if let Some(why) = seen.unusable.first().filter(|_| !guarded.is_empty()) {
        let message = format!("containerd {version} cannot start containers: {why}");
        return Check::failed(message, INSTALL);
    }
    let names: BTreeSet<&str> = guarded.iter().map(|entry| entry.name.as_str()).collect();
    let is_default = names.contains(seen.default_runtime.as_str());
    if let Some(loaded) = &seen.loaded {
        let runs: BTreeSet<&str> = loaded.runtimes.iter().map(String::as_str).collect();
        if runs != names || loaded.default != is_default {
            let now = match (runs.is_empty(), loaded.default) {
                (true, _) => "no new pod is guarded",
                (false, true) => "bindguard is still its default",
                (false, false) => "new pods are guarded only if they select bindguard",
            };
            let message =
                format!("the running containerd {version} has not read its changed file: {now}");
            return Check::failed(message, seen.restart.clone());
        }
    }
    if guarded.is_empty() {
        let message =
            format!("containerd {version} has no runtime of bindguard's: no pod is guarded");
        return Check::failed(message, INSTALL);
    }
    if let Some(problem) = other_cgroup_driver(&guarded, &others) {
        return Check::failed(problem, INSTALL);
    }
    let default = if is_default {
        ", for every new pod"
    } else {
        ", for new pods that select it"
    };
    let not_reached = seen.pods.not_reached(is_default);
    let names = Vec::from_iter(names).join(", ");
    Check::ok(format!(
        "containerd {version}: bindguard is the runtime {names}{default}{not_reached}"
    ))
}

/// Finds a bindguard runtime whose cgroup driver differs from every other runtime of runc's kind:
/// `install` copies bindguard's runtime from a runtime of runc's kind. A runtime of bindguard's own
/// type needs no check: the shim detects the driver from the form of the cgroup's path.
fn other_cgroup_driver(guarded: &[&RuntimeEntry], others: &[&RuntimeEntry]) -> Option<String> {
    let runc = others.iter().find(|entry| entry.name == "runc");
    let usual = runc.or(others.first())?;
    let entry = guarded.iter().find(|entry| {
        let differs = |other: &&RuntimeEntry| other.systemd_cgroup != entry.systemd_cgroup;
        !entry.is_by_type() && others.iter().all(differs)
    })?;
    Some(format!(
        "SystemdCgroup is {} for {} and {} for {}: its pods get another cgroup driver than the kubelet expects",
        usual.systemd_cgroup, usual.name, entry.systemd_cgroup, entry.name
    ))
}

// Checks that the programs of bindguard and the OCI runtime exist, and that bindguard's programs
// have the same version. A runtime with a known fault is named.

/// A program as it was found.
#[derive(Debug)]
pub struct ProgramSeen {
    pub name: String,
    /// The program's path and reported version; `None`: not found.
    pub found: Option<(String, String)>,
}

/// The point for the programs. `ours`: the programs of bindguard, all expected to have `version`;
/// `runtime`: runc, or the runtime that the config names; `kernel`: the kernel's release. `pods`:
/// the pods under bindguard's shim. A pod under another version is no fault: a pod keeps its shim
/// until the pod is created anew.
pub fn programs(
    version: &str,
    ours: &[ProgramSeen],
    runtime: &ProgramSeen,
    kernel: &str,
    pods: &[PodsOfVersion],
) -> Check {
    let Some((path, found)) = &runtime.found else {
        let message = format!(
            "the OCI runtime {} is not found: no container can be created",
            runtime.name
        );
        return Check::failed(message, "bindguard config show");
    };
    let (mut missing, mut other) = (Vec::new(), None);
    for program in ours {
        match &program.found {
            None => missing.push(program.name.as_str()),
            Some((path, found)) if !found.is_empty() && !found.contains(version) => {
                other = other.or(Some((path, found)));
            }
            Some(_) => {}
        }
    }
    if !missing.is_empty() {
        let message = format!("{} not found in any folder of programs", missing.join(", "));
        return Check::failed(message, INSTALL);
    }
    if let Some((path, found)) = other {
        let message = format!("{path} is {found}, and this bindguard is {version}");
        return Check::failed(message, INSTALL);
    }
    if let Some(fault) = known_fault(found, kernel) {
        let command = format!("{path} --version");
        return Check::failed(format!("{path}: {fault}"), command);
    }
    let mut message = format!("bindguard {version}, and {path}: {found}");
    if !pods.is_empty() {
        let pods: Vec<String> = pods.iter().map(PodsOfVersion::summary).collect();
        message.push_str(&format!("; pods: {}", pods.join("; ")));
    }
    Check::ok(message)
}

// The runtimes of a daemon that call the guard, by the active configuration as JSON.

/// A running daemon and its runtimes that call the guard.
#[derive(Debug, Clone, Serialize)]
pub struct GuardedRuntimes {
    /// `containerd`, `dockerd` or `crio`.
    pub daemon: &'static str,
    /// The names of the runtimes.
    pub runtimes: Vec<String>,
    /// True if the default runtime calls the guard.
    pub default: bool,
}

impl GuardedRuntimes {
    /// By the configuration that containerd's CRI plugin reports: `config` in the answer to
    /// `Status` with `verbose`.
    pub fn of_containerd(config: &Value) -> Self {
        Self::from_config(
            "containerd",
            &config["containerd"],
            "runtimes",
            "defaultRuntimeName",
        )
    }

    /// `runtimes` and `default` are the names of the members with the runtimes and with the name of
    /// the default runtime.
    pub fn from_config(
        daemon: &'static str,
        config: &Value,
        runtimes: &str,
        default: &str,
    ) -> Self {
        let entries = config[runtimes].as_object().into_iter().flatten();
        let names: Vec<String> = entries
            .filter(|(_, entry)| calls_guard(entry))
            .map(|(name, _)| name.clone())
            .collect();
        let default = config[default]
            .as_str()
            .is_some_and(|default| names.iter().any(|name| name == default));
        Self {
            daemon,
            runtimes: names,
            default,
        }
    }
}

fn calls_guard(entry: &Value) -> bool {
    match entry {
        Value::String(text) => {
            let name = Path::new(text).file_name();
            text == SHIM_RUNTIME_TYPE || name.is_some_and(|name| name == SHIM || name == WRAPPER)
        }
        Value::Object(members) => members.values().any(calls_guard),
        Value::Array(items) => items.iter().any(calls_guard),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests;
