//! Counts the leftovers of containers on a node: a story expects none when something goes wrong.

use std::collections::BTreeSet;
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
    mounts: usize,
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
        Ok(Self {
            mounts: mounts::table()?.len(),
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

    fn numbers(&self) -> [(&'static str, usize); 4] {
        [
            ("mounts", self.mounts),
            ("shims", self.shims),
            ("processes", self.processes),
            ("zombies", self.zombies),
        ]
    }

    fn is_within(&self, before: &Self) -> bool {
        // a shim or a mount less is as wrong as one more; of processes, one may have been about to
        // end before
        (self.mounts, self.shims) == (before.mounts, before.shims)
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
        let pairs = [
            (&self.cgroups, &before.cgroups),
            (&self.folders, &before.folders),
            (&self.files, &before.files),
        ];
        let paths = pairs
            .into_iter()
            .flat_map(|(now, then)| now.difference(then));
        numbers
            .chain(paths.map(|path| format!("\n{}", path.display())))
            .collect()
    }
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
