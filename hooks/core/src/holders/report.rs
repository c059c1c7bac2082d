//! What is told of who holds what, and what would free it.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::mount_table::{MountEntry, MountIndex, MountTable, Propagation};
use crate::pods::{PodName, Pods};

use super::cgroup::looks_like_an_id;
use super::free::{Way, ways};
use super::{KeptBy, SeenNamespace, Wanted, container_ids, pod_uid};

/// Who keeps the mounts at or below a path alive. Its JSON form is what `holders --json` prints.
#[derive(Debug, Clone, Default, Serialize)]
pub struct HoldersReport {
    /// What was asked about.
    pub path: PathBuf,
    /// What is mounted there in the reader's own namespace.
    pub mounts: Vec<KeptMount>,
    /// Everybody else who has it mounted.
    pub holders: Vec<Holder>,
    /// What was looked at.
    pub looked_at: Looked,
    /// What kept the look from being whole.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// How much was looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Looked {
    /// Processes whose namespace was asked for.
    pub processes: usize,
    /// Mount namespaces; the table of each was read once.
    pub namespaces: usize,
}

/// A mount namespace in which it is mounted.
#[derive(Debug, Clone, Serialize)]
pub struct Holder {
    /// The namespace's number.
    pub namespace: u64,
    /// `process`, `descriptor`, `bind-mount`, or `here` for the reader's own.
    pub kept_by: &'static str,
    /// The process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// How many processes live there.
    pub processes: usize,
    /// Their container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Their pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// What is mounted there.
    pub mounts: Vec<KeptMount>,
    /// What would free it.
    pub free: Vec<Way>,
}

/// A mount of a holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeptMount {
    /// Where, as that namespace sees it.
    pub mount_point: PathBuf,
    /// What of its filesystem it shows.
    pub root: String,
    /// Its filesystem's type.
    pub fs_type: String,
    /// Its device, `major:minor`.
    pub device: String,
    /// `private`, `slave`, `shared`, `shared,slave` or `unbindable`.
    pub propagation: &'static str,
    /// A umount in the reader's namespace reaches it.
    pub follows: bool,
}

impl KeptMount {
    fn from_entry(entry: &MountEntry, here: &Here<'_>) -> Self {
        Self {
            mount_point: entry.mount_point.clone(),
            root: entry.root.for_people(),
            fs_type: entry.fs_type.0.clone(),
            device: entry.device.to_string(),
            propagation: in_words(&entry.propagation),
            follows: here.reaches(&entry.propagation),
        }
    }
}

/// What is asked about in the reader's own namespace.
#[derive(Debug)]
pub(super) struct Here<'t> {
    /// The mounts at or below the path.
    pub mounts: Vec<&'t MountEntry>,
    peer_groups: HashSet<u32>,
}

impl<'t> Here<'t> {
    fn at_or_below(path: &Path, own: &'t MountTable) -> Self {
        let below = own.entries().iter().filter(|entry| entry.mount_point.starts_with(path));
        let mounts: Vec<&MountEntry> = below.collect();
        let peer_groups = mounts.iter().filter_map(|entry| entry.propagation.peer_group).collect();
        Self { mounts, peer_groups }
    }

    /// A umount spreads within a peer group and to the slaves of it: mount_namespaces(7).
    fn reaches(&self, to: &Propagation) -> bool {
        [to.peer_group, to.master].iter().flatten().any(|group| self.peer_groups.contains(group))
    }
}

fn in_words(propagation: &Propagation) -> &'static str {
    match (propagation.peer_group.is_some(), propagation.master.is_some(), propagation.unbindable) {
        (_, _, true) => "unbindable",
        (true, true, false) => "shared,slave",
        (true, false, false) => "shared",
        (false, true, false) => "slave",
        (false, false, false) => "private",
    }
}

impl HoldersReport {
    /// Finds who has what is wanted mounted. `own`: the reader's own namespace.
    pub fn find(path: &Path, wanted: &Wanted, own: &MountTable, others: &[SeenNamespace], pods: &Pods) -> Self {
        let here = Here::at_or_below(path, own);
        let mut report = Self {
            path: path.to_owned(),
            mounts: here.mounts.iter().map(|entry| KeptMount::from_entry(entry, &here)).collect(),
            ..Self::default()
        };
        report.holders.extend(elsewhere_here(path, wanted, own, &here));
        for namespace in others {
            match &namespace.table {
                Ok(table) => report.holders.extend(holder(namespace, table, wanted, &here, pods)),
                Err(why) => report.problems.push(format!("mount namespace {}: {why}", namespace.id)),
            }
        }
        report
    }
}

/// The same filesystem at another place of the reader's own namespace.
fn elsewhere_here(path: &Path, wanted: &Wanted, own: &MountTable, here: &Here<'_>) -> Option<Holder> {
    let index = MountIndex::of(own);
    let others = own.entries().iter().filter(|entry| !entry.mount_point.starts_with(path) && wanted.is(entry, &index));
    let mounts: Vec<KeptMount> = others.map(|entry| KeptMount::from_entry(entry, here)).collect();
    let first = mounts.first()?.mount_point.display().to_string();
    let free = vec![Way { what: "take this other mount of it away", run: format!("umount {first}") }];
    Some(Holder { kept_by: "here", mounts, free, ..Holder::nobody() })
}

fn holder(
    namespace: &SeenNamespace,
    table: &MountTable,
    wanted: &Wanted,
    here: &Here<'_>,
    pods: &Pods,
) -> Option<Holder> {
    let index = MountIndex::of(table);
    let found = table.entries().iter().filter(|entry| wanted.is(entry, &index));
    let mounts: Vec<KeptMount> = found.map(|entry| KeptMount::from_entry(entry, here)).collect();
    let first = mounts.iter().find(|mount| !mount.follows).or(mounts.first())?;
    let mut holder = Holder { namespace: namespace.id, processes: namespace.processes, ..Holder::nobody() };
    holder.keep(&namespace.kept_by, pods);
    holder.free = ways(&namespace.kept_by, &holder, first, here);
    holder.mounts = mounts;
    Some(holder)
}

impl Holder {
    fn nobody() -> Self {
        Self {
            namespace: 0,
            kept_by: "here",
            pid: None,
            command: None,
            processes: 0,
            container: None,
            pod: None,
            mounts: Vec::new(),
            free: Vec::new(),
        }
    }

    fn keep(&mut self, kept_by: &KeptBy, pods: &Pods) {
        match kept_by {
            KeptBy::Process { pid, command, cgroup } => {
                (self.kept_by, self.pid, self.command) = ("process", Some(*pid), Some(command.clone()));
                let ids = container_ids(cgroup);
                let known = ids.iter().find_map(|id| pods.with_id(id));
                let id =
                    known.map(|known| known.id.as_str()).or_else(|| ids.into_iter().find(|id| looks_like_an_id(id)));
                self.container = id.map(str::to_owned);
                let named = known.map(|known| known.pod.clone()).filter(|pod| *pod != PodName::default());
                self.pod = named.or_else(|| pod_uid(cgroup).map(|uid| pods.of_uid(&uid)));
            }
            KeptBy::Descriptor { pid, command } => {
                (self.kept_by, self.pid, self.command) = ("descriptor", Some(*pid), Some(command.clone()));
            }
            KeptBy::BindMount(_) => self.kept_by = "bind-mount",
        }
    }
}
