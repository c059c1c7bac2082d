//! Counts the leftovers of containers on a node: a story expects none when something goes wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::mounts;
use crate::node::Node;
use crate::systemd;
use crate::waiting::until;

/// crun's root keeps an empty folder for all containers.
const KEPT_BY_CRUN: &str = ".empty-directory";

/// The things on a node that come and go with containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftovers {
    /// The node's own mount points, below its disk and `/run`, with the number of mounts on each.
    mounts: BTreeMap<PathBuf, usize>,
    /// The mount points of the machine. The node's namespace began as a copy of the machine's
    /// namespace: when a program outside removes a mount point, the copy loses the mount there.
    mounts_of_machine: BTreeMap<PathBuf, usize>,
    shims: usize,
    /// Of the node and of its containers; clients are gone when this is counted.
    processes: usize,
    zombies: usize,
    cgroups: BTreeSet<PathBuf>,
    /// State of runc, and bundles.
    folders: BTreeSet<PathBuf>,
    /// Sockets, fifos and files below `/run`, which is the node's own.
    files: BTreeSet<PathBuf>,
}

impl Leftovers {
    /// The current counts.
    pub fn of(node: &Node) -> Result<Self> {
        let name = node.name();
        let processes = node.all_processes();
        let of_containerd =
            |folder: &str| entries(Path::new(&format!("/run/containerd/{folder}/{name}")));
        let own = [Path::new("/run"), node.disk()];
        let (own, machines): (Vec<_>, Vec<_>) = mounts::table()?
            .into_iter()
            .map(|mount| mount.target)
            .partition(|target| own.iter().any(|folder| target.starts_with(folder)));
        Ok(Self {
            mounts: counted(own),
            mounts_of_machine: counted(machines),
            shims: node.shims()?.len(),
            zombies: zombies_of(&processes),
            processes: processes.len(),
            cgroups: cgroups_of(name),
            folders: of_containerd("runc")
                .into_iter()
                .chain(of_containerd("io.containerd.runtime.v2.task"))
                .filter(|folder| !folder.ends_with(KEPT_BY_CRUN))
                .collect(),
            files: files_below(Path::new("/run")),
        })
    }

    /// Waits until no more is there than was at the time of `self`: a shim ends a moment after its
    /// last container, and containerd answers its client before that.
    pub fn are_all(&self, node: &Node) -> Result<()> {
        let mut beyond = String::new();
        let so = until("nothing is left", || {
            let now = Self::of(node)?;
            beyond = now.beyond(self);
            Ok(now.is_within(self))
        });
        so.with_context(|| {
            format!(
                "something is left:{beyond}\nprocesses: {:?}",
                node.processes()
            )
        })
    }

    fn numbers(&self) -> [(&'static str, usize); 3] {
        [
            ("shims", self.shims),
            ("processes", self.processes),
            ("zombies", self.zombies),
        ]
    }

    fn is_within(&self, before: &Self) -> bool {
        // a missing shim or mount is as wrong as an extra shim or mount; a process may have been
        // about to end before
        (&self.mounts, self.shims) == (&before.mounts, before.shims)
            && has_no_more(&self.mounts_of_machine, &before.mounts_of_machine)
            && self.processes <= before.processes
            && self.zombies <= before.zombies
            && self.cgroups.is_subset(&before.cgroups)
            && self.folders.is_subset(&before.folders)
            && self.files.is_subset(&before.files)
    }

    fn beyond(&self, before: &Self) -> String {
        let numbers = self
            .numbers()
            .into_iter()
            .zip(before.numbers())
            .filter(|(now, then)| now != then);
        let numbers =
            numbers.map(|((what, now), (_, then))| format!("\n{what}: {then} before, {now} now"));
        let tables = [
            (&self.mounts, &before.mounts),
            (&self.mounts_of_machine, &before.mounts_of_machine),
        ];
        let tables = tables.into_iter().filter(|(now, then)| now != then);
        let tables =
            tables.map(|(now, then)| format!("\nmounts: before {then:?}\nmounts: now {now:?}"));
        let pairs = [
            (&self.cgroups, &before.cgroups),
            (&self.folders, &before.folders),
            (&self.files, &before.files),
        ];
        let paths = pairs
            .into_iter()
            .flat_map(|(now, then)| now.difference(then));
        numbers
            .chain(tables)
            .chain(paths.map(|path| format!("\n{}", path.display())))
            .collect()
    }
}

fn counted(targets: Vec<PathBuf>) -> BTreeMap<PathBuf, usize> {
    let mut counts = BTreeMap::new();
    for target in targets {
        *counts.entry(target).or_default() += 1;
    }
    counts
}

fn has_no_more(now: &BTreeMap<PathBuf, usize>, before: &BTreeMap<PathBuf, usize>) -> bool {
    now.iter()
        .all(|(target, count)| before.get(target).is_some_and(|then| count <= then))
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).map_or_else(
        |_| Vec::new(),
        |entries| entries.flatten().map(|entry| entry.path()).collect(),
    )
}

/// The cgroups of single containers, in every hierarchy. What a pod's cgroup is for, its kubelet
/// knows.
fn cgroups_of(name: &str) -> BTreeSet<PathBuf> {
    let hierarchies = entries(Path::new("/sys/fs/cgroup"))
        .into_iter()
        .chain([PathBuf::from("/sys/fs/cgroup")]);
    let below = hierarchies
        .flat_map(|hierarchy| entries(&hierarchy.join(name)))
        .chain(entries(&systemd::cgroup_of(name)));
    below
        .filter(|path| path.is_dir() && !path.ends_with("node") && !path.ends_with("pods"))
        .collect()
}

fn files_below(folder: &Path) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    for path in entries(folder) {
        let is_folder = path.symlink_metadata().is_ok_and(|meta| meta.is_dir());
        // the journal and the logs of pods stay, and containerd's own sockets are created again
        // when it is started again; the fifos are made by a client, and stay when the shim dies
        // while the client is about to open them; systemd's own are the machine's
        let stays = [
            "/run/bindguard",
            "/run/containerd/fifo",
            "/run/pods",
            "/run/systemd",
            "/run/dbus",
        ]
        .iter()
        .any(|folder| path == Path::new(folder));
        let is_containerds = path.parent() == Some(Path::new("/run/containerd")) && !is_folder;
        match () {
            () if stays || is_containerds => {}
            () if is_folder => files.extend(files_below(&path)),
            () => drop(files.insert(path)),
        }
    }
    files
}

fn zombies_of(processes: &[u32]) -> usize {
    let numbers = entries(Path::new("/proc"))
        .into_iter()
        .filter_map(|path| path.file_name()?.to_str()?.parse().ok());
    numbers
        .filter(|pid| dead_childs_parent(*pid).is_some_and(|parent| processes.contains(&parent)))
        .count()
}

/// The parent of a zombie; see proc_pid_stat(5).
fn dead_childs_parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    (fields.next()? == "Z").then_some(())?;
    fields.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_mounts(own: &[&str], machines: &[&str]) -> Leftovers {
        let counted = |targets: &[&str]| counted(targets.iter().map(PathBuf::from).collect());
        Leftovers {
            mounts: counted(own),
            mounts_of_machine: counted(machines),
            shims: 1,
            processes: 2,
            zombies: 0,
            cgroups: BTreeSet::new(),
            folders: BTreeSet::new(),
            files: BTreeSet::new(),
        }
    }

    #[test]
    fn a_mount_of_the_machine_may_end_and_no_other() {
        let before = with_mounts(
            &["/run", "/run/a"],
            &["/", "/dev", "/tmp/of-another-program"],
        );
        for (own, machines, is_within) in [
            (&["/run", "/run/a"][..], &["/", "/dev"][..], true),
            (&["/run", "/run/a"], &["/", "/dev", "/dev"], false),
            (&["/run", "/run/a"], &["/", "/dev", "/mnt"], false),
            (&["/run"], &["/", "/dev"], false),
            (&["/run", "/run/a", "/run/a"], &["/", "/dev"], false),
        ] {
            let now = with_mounts(own, machines);
            assert_eq!(now.is_within(&before), is_within, "{now:?}");
            assert!(!now.beyond(&before).is_empty());
        }
    }
}
