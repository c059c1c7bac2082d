//! Checks of a node: each point is a condition that hinders bindguard or leaves mounts in a wrong
//! state.
//!
//! Each point is a function over plain evidence. A failed point names the command to run.

mod agent;
mod containerd;
mod kernel;
mod mount_helpers;
mod pinned;

use std::collections::BTreeSet;
use std::path::Path;

use bindguard_core::evidence::Observed;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::BelowEmptyDirs;
use serde::Serialize;

use crate::container_mounts::ContainerMounts;
use crate::node::Process;
use crate::pod_deletion::mounts_in_volumes;
use crate::pods::Pods;

pub use crate::doctor::agent::{agent, describe as describe_agent, seconds};
pub use crate::doctor::containerd::{ContainerdSeen, RunningPods, RuntimeEntry, containerd};
pub use crate::doctor::containerd::{ProgramSeen, programs};
pub use crate::doctor::kernel::kernel;
pub use crate::doctor::kernel::{LinuxDistribution, Packages, os_release, os_release_value};
pub use crate::doctor::mount_helpers::{helper_of, mount_helpers};
pub use crate::doctor::pinned::pinned;
pub use crate::doctor::pinned::subpaths;

// A point of a node's check-up.

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

/// A point and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Its name: stable, for programs.
    pub name: &'static str,
    pub status: PointStatus,
    pub message: String,
    /// The command to run next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Point {
    /// A point without a problem.
    pub fn ok(name: &'static str, message: impl Into<String>) -> Self {
        Self {
            name,
            status: PointStatus::Ok,
            message: message.into(),
            command: None,
        }
    }

    /// A point with a problem, and the command that helps.
    pub fn failed(
        name: &'static str,
        message: impl Into<String>,
        command: impl Into<String>,
    ) -> Self {
        Self {
            status: PointStatus::Failed,
            command: Some(command.into()),
            ..Self::ok(name, message)
        }
    }

    /// A point that could not be checked.
    pub fn unknown(name: &'static str, why: impl Into<String>) -> Self {
        Self {
            status: PointStatus::Unknown,
            ..Self::ok(name, why)
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
#[derive(Debug, Clone, Default, Serialize)]
pub struct DoctorReport {
    /// The points, in the order in which an operator would check them.
    pub points: Vec<Point>,
}

impl DoctorReport {
    /// True if a point has the status.
    pub fn has(&self, status: PointStatus) -> bool {
        self.points.iter().any(|point| point.status == status)
    }
}

// Checks that the host's `/` is shared: rslave needs that to receive umounts, and older kernels
// need it for a re-bind.

const NAME: &str = "host-root";

/// The point for the host's `/`.
pub fn host_root(table: &MountTable) -> Point {
    match table.stack_at(Path::new("/")).last() {
        Some(root) if root.propagation.passes_umounts_on() => Point::ok(
            NAME,
            "/ is shared: umounts reach containers that follow them",
        ),
        Some(_) => Point::failed(
            NAME,
            "/ is private: no container can follow the host's umounts, whatever its mountPropagation",
            "mount --make-rshared /",
        ),
        None => Point::unknown(NAME, "the mount table has no /"),
    }
}

// Containers with a read-only bind of the host's root that can write to later mounts of the host.
//
// The default makes such binds rslave, so that the host's umounts arrive. The point is no fault: an
// operator decides whether each of these pods may do what docs/security.md says.

const READ_ONLY_BINDS_NAME: &str = "read-only-binds";
/// The number of pods that the point names.
const NAMED: usize = 10;

pub fn read_only_binds(found: &ContainerMounts) -> Point {
    let mut pods = BTreeSet::new();
    for container in &found.open_to_later_mounts {
        let name = container.pod.display_name();
        pods.insert(name.unwrap_or_else(|| container.id.clone()));
    }
    if !pods.is_empty() {
        return Point::ok(
            READ_ONLY_BINDS_NAME,
            format!(
                "these pods bind the host's root read-only, and can write to mounts that the host makes later: {}; \
                 [host-root] read-only = \"keep\" in config.toml keeps such binds private",
                first_of(&Vec::from_iter(pods), NAMED)
            ),
        );
    }
    match found.unread.first() {
        Some(unread) => Point::unknown(READ_ONLY_BINDS_NAME, unread.container.problem(&unread.why)),
        None => Point::ok(
            READ_ONLY_BINDS_NAME,
            "no read-only bind of the host's root takes in later mounts",
        ),
    }
}

// `fs.may_detach_mounts`: on RHEL 7 a mount point that has a mount in another namespace can be
// removed only if this is 1. Every kernel since 3.18 allows it by default and has no such key.

const DETACH_MOUNTS_NAME: &str = "detach-mounts";

/// The point for it; `setting` is the text of `/proc/sys/fs/may_detach_mounts`.
pub fn detach_mounts(setting: &Observed<String>) -> Point {
    match setting {
        Observed::Absent => Point::ok(
            DETACH_MOUNTS_NAME,
            "this kernel lets mount points be removed that are in use elsewhere",
        ),
        Observed::Seen(text) if text.trim() == "1" => {
            Point::ok(DETACH_MOUNTS_NAME, "fs.may_detach_mounts is 1")
        }
        Observed::Seen(text) => Point::failed(
            DETACH_MOUNTS_NAME,
            format!(
                "fs.may_detach_mounts is {}: removing a pod's folders fails with \"device or resource busy\"",
                text.trim()
            ),
            "sysctl -w fs.may_detach_mounts=1",
        ),
        Observed::Unreadable(why) => Point::unknown(DETACH_MOUNTS_NAME, why.clone()),
    }
}

// Mounts of the host below a pod's emptyDir: the kubelet removes the files that they show when the
// pod is deleted (kubernetes#129550, #115054).

const BELOW_EMPTYDIRS_NAME: &str = "mounts-below-emptydir";

pub fn below_emptydirs(table: &MountTable, places: &Places, policy: BelowEmptyDirs) -> Point {
    if policy == BelowEmptyDirs::Off {
        return Point::ok(
            BELOW_EMPTYDIRS_NAME,
            "not checked: mounts-below-emptydir is off",
        );
    }
    let found = mounts_in_volumes(table, &Pods::default(), places);
    let Some(first) = found.first() else {
        if let Some(skipped) = table.skipped() {
            return Point::unknown(BELOW_EMPTYDIRS_NAME, skipped.to_string());
        }
        return Point::ok(BELOW_EMPTYDIRS_NAME, "nothing is mounted below an emptyDir");
    };
    let count = found.len();
    if policy == BelowEmptyDirs::Detach {
        let message = format!(
            "{count} mounts below volumes of pods; bindguard's shim unmounts those below emptyDirs with their pods"
        );
        return Point::ok(BELOW_EMPTYDIRS_NAME, message);
    }
    let shown = first.mount_point.display();
    let message = format!(
        "{count} mounts are below volumes of pods, such as {shown}: {}",
        first.effect()
    );
    Point::failed(BELOW_EMPTYDIRS_NAME, message, first.command.clone())
}

// FUSE daemons in the kubelet's cgroup: a restart of the kubelet ends them. From then on all their
// mounts fail with "transport endpoint is not connected" (Kubernetes' PR 49640 starts its own by
// `systemd-run --scope`).

const FUSE_DAEMONS_NAME: &str = "fuse-daemons";

/// The point for them. `kubelets`: the kubelets of this node; `daemons`: the processes that have
/// /dev/fuse open.
pub fn fuse_daemons(kubelets: &[Process], daemons: &[Process]) -> Point {
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
        return Point::ok(FUSE_DAEMONS_NAME, message);
    };
    let pid = first.pid;
    let mut names = format!("{} ({pid})", first.command);
    for daemon in at_risk {
        names += &format!(", {} ({})", daemon.command, daemon.pid);
    }
    // The command moves a running process into its own scope, as `systemd-run --scope` does for a
    // new process.
    Point::failed(
        FUSE_DAEMONS_NAME,
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

#[cfg(test)]
mod host_root_tests {
    use super::PointStatus;
    use super::*;

    #[test]
    fn private_is_bad() {
        let of = |tags: &str| {
            let line = format!("1 0 8:1 / / rw{tags} - ext4 /dev/sda1 rw\n");
            host_root(&MountTable::from_mountinfo(line.as_bytes()).unwrap()).status
        };
        assert_eq!(
            (of(" shared:1"), of(" master:1"), of("")),
            (PointStatus::Ok, PointStatus::Ok, PointStatus::Failed)
        );
        assert_eq!(
            host_root(&MountTable::default()).status,
            PointStatus::Unknown
        );
    }
}

#[cfg(test)]
mod detach_mounts_tests {
    use super::PointStatus;
    use super::*;

    #[test]
    fn only_a_zero_is_bad() {
        let of = |text: &str| detach_mounts(&Observed::Seen(text.to_owned())).status;
        assert_eq!(
            (of("1\n"), of("0\n")),
            (PointStatus::Ok, PointStatus::Failed)
        );
        assert_eq!(detach_mounts(&Observed::Absent).status, PointStatus::Ok);
        assert_eq!(
            detach_mounts(&Observed::Unreadable("no".to_owned())).status,
            PointStatus::Unknown
        );
    }
}

#[cfg(test)]
mod below_emptydirs_tests {
    use super::PointStatus;
    use super::*;

    #[test]
    fn a_mount_below_an_emptydir_is_reported_with_its_umount() {
        const ED: &str = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/scratch";
        let point = |mount_point: &str, policy| {
            let text =
                format!("1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / {mount_point} rw - ext4 b rw\n");
            let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
            below_emptydirs(&table, &Places::default(), policy)
        };
        let found = point(&format!("{ED}/disk"), BelowEmptyDirs::Report);
        assert_eq!(found.status, PointStatus::Failed);
        assert_eq!(found.command, Some(format!("umount {ED}/disk")));
        // medium Memory
        let own = point(ED, BelowEmptyDirs::Report);
        assert_eq!(own.status, PointStatus::Ok);
        for policy in [BelowEmptyDirs::Off, BelowEmptyDirs::Detach] {
            let quiet = point(&format!("{ED}/disk"), policy);
            assert_eq!(quiet.status, PointStatus::Ok);
        }
    }
}

#[cfg(test)]
mod fuse_daemons_tests {
    use super::PointStatus;
    use super::*;

    fn process(pid: u32, cgroup: &str) -> Process {
        Process {
            pid,
            command: "sshfs".to_owned(),
            cgroup: cgroup.to_owned(),
        }
    }

    #[test]
    fn a_process_in_or_below_the_kubelets_cgroup_dies_with_it() {
        let kubelet = [process(1, "0::/system.slice/kubelet.service\n")];
        for (cgroup, state) in [
            ("0::/system.slice/kubelet.service\n", PointStatus::Failed),
            (
                "0::/system.slice/kubelet.service/below\n",
                PointStatus::Failed,
            ),
            ("0::/system.slice/kubelet.service-not\n", PointStatus::Ok),
            ("0::/system.slice/run-1.scope\n", PointStatus::Ok),
        ] {
            assert_eq!(
                fuse_daemons(&kubelet, &[process(7, cgroup)]).status,
                state,
                "{cgroup}"
            );
        }
        assert_eq!(
            fuse_daemons(&[], &[process(7, "0::/\n")]).status,
            PointStatus::Ok
        );
    }

    #[test]
    fn without_systemd_any_hierarchy_is_used() {
        let text = "5:pids:/n/node\n1:name=systemd:/\n0::/\n";
        assert_eq!(
            fuse_daemons(&[process(1, text)], &[process(7, text)]).status,
            PointStatus::Failed
        );
        let slice = "5:cpu:/system.slice\n1:name=systemd:/system.slice/kubelet.service\n";
        let other = "5:cpu:/system.slice\n1:name=systemd:/system.slice/sshfs.service\n";
        assert_eq!(
            fuse_daemons(&[process(1, slice)], &[process(7, other)]).status,
            PointStatus::Ok
        );
    }
}
