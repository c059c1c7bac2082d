//! The processes of the node that may write a folder of the host, by mount namespaces.
//!
//! All live namespaces count, not only those that runtimes have recorded: Kata, LXC, nspawn and
//! runtimes with other state folders leave no record that bindguard knows. A process can also leave
//! the namespace that its runtime made.
//!
//! | namespace | may write |
//! |---|---|
//! | of the host's root, or as the spec of its container requests | what its mount table shows |
//! | that a container made: its table may lack a mount whose folder a process has open | what the container's spec gives, or any folder |
//! | whose processes cannot become root of the host | idmapped mounts |
//! | with the host's own root directory, writable, outside of containers | nothing: its root can change every file anyway |

use std::collections::{BTreeMap, BTreeSet};
use std::iter::once;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, mem};

use bindguard_core::evidence::FilePlace;
use bindguard_core::identity::container_of;
use bindguard_core::mount_table::MountTable;
use bindguard_core::spec::{MountMakers, RequestedUserNamespace, SpecUsers, SpecView};
use bindguard_guard::refresh::{
    RunningContainers, Writer, WriterReach, places_by_binds, reach_by_spec,
};
use bindguard_sys::enter::{HeldProcess, mount_namespaces};
use bindguard_sys::files::read_spec;
use bindguard_sys::read_mount_table;

use crate::containers::Record;
use crate::node::{is_gone, may_become_root, namespace, pids_in};

/// Limit of namespaces that are read for a container, and of the time for these. Beyond, its mounts
/// are not known. A container decides how many namespaces it makes.
const MAX_NAMESPACES: usize = 256;
const CONTAINER_TIMEOUT: Duration = Duration::from_secs(2);

/// The init of the node: its mounts are the reader's own.
const INIT: u32 = 1;

/// The containers of a node whose `/` is at this path, and all other processes with a mount namespace
/// of their own.
#[derive(Debug)]
pub struct ContainersOfNode(pub PathBuf);

/// A container, or the processes of a cgroup of no recorded container.
#[derive(Debug, Default)]
struct Group {
    record: Option<Record>,
    /// The processes, until their namespaces are known.
    pids: Vec<u32>,
    /// True if a process of the host's own namespace is in the cgroup.
    has_host_process: bool,
    /// The namespaces that were read, and the time for these.
    namespaces: usize,
    time: Duration,
    /// True if a writer was returned that represents all namespaces of the group.
    is_covered: bool,
}

/// The search for writers, namespace by namespace.
struct Search {
    groups: Vec<Group>,
    /// The namespaces that are not read yet, the first namespace last: the group, the processes, and
    /// false if a process blocks its readers and hides its namespace.
    left: Vec<(usize, Vec<u32>, bool)>,
    own_root: Option<FilePlace>,
}

impl RunningContainers for ContainersOfNode {
    fn writers(&self) -> Box<dyn Iterator<Item = Writer>> {
        match Search::start(&self.0) {
            Ok(search) => Box::new(search),
            Err(error) => Box::new(once(Writer {
                name: format!("list the processes of the node: {error}"),
                reach: WriterReach::Unknown,
            })),
        }
    }
}

impl Search {
    fn start(root: &Path) -> io::Result<Self> {
        let mut groups = grouped(root)?;
        let own = namespace("mnt").ok_or(io::ErrorKind::NotFound)?;
        let mut left = Vec::new();
        let mut by_number = BTreeMap::<u64, (usize, Vec<u32>)>::new();
        for group in 0..groups.len() {
            let pids = mem::take(&mut groups[group].pids);
            let numbers = mount_namespaces(&pids, CONTAINER_TIMEOUT);
            for (pid, number) in pids.into_iter().zip(numbers) {
                match number {
                    Ok(number) if number == own => groups[group].has_host_process = true,
                    Ok(number) => {
                        let (of, pids) = by_number.entry(number).or_insert((group, Vec::new()));
                        // A process of the host, such as nsenter(1), can be in the namespace of a
                        // container.
                        if groups[*of].record.is_none() {
                            *of = group;
                        }
                        pids.push(pid);
                    }
                    Err(error) if is_gone(&error) => {}
                    Err(_) => left.push((group, vec![pid], false)),
                }
            }
        }
        for (group, pids) in by_number.into_values() {
            left.push((group, pids, true));
        }
        let table = read_mount_table().unwrap_or_default();
        let own_root = table.stack_at(Path::new("/")).next();
        Ok(Self {
            groups,
            left,
            own_root: own_root.map(FilePlace::root_of),
        })
    }

    /// The reach of the processes in a namespace. `None` if they can write nothing, or ended.
    fn reach(&self, group: &Group, pids: &[u32], is_readable: bool) -> Option<WriterReach> {
        let has_ended = || pids.iter().all(|pid| has_ended(*pid));
        let record = group.record.as_ref();
        let spec = record.and_then(|record| read_spec(&record.bundle).ok());
        let spec = spec.as_deref();
        let users = spec.and_then(|spec| SpecUsers::from_spec(spec).ok());
        let is_within = group.namespaces < MAX_NAMESPACES && group.time < CONTAINER_TIMEOUT;
        let mut table = None;
        if is_readable && is_within {
            let requested = users.as_ref().map(SpecUsers::namespace);
            table = table_of(
                pids,
                requested.unwrap_or(&RequestedUserNamespace::OfRuntime),
            );
        }
        if table.is_none() && has_ended() {
            return None;
        }
        // Root of the host alone may write a folder on which a way relies. Through an idmapped mount,
        // another user is root.
        let is_root = pids.iter().any(|pid| may_become_root(*pid));
        if let Some(table) = table {
            let has_root_of_host = || {
                let root = table.stack_at(Path::new("/")).next();
                let own = self.own_root.as_ref().zip(root);
                own.is_some_and(|(own, root)| own.is_root_of(root) && !root.is_read_only())
            };
            let is_of_host = record.is_none() && has_root_of_host();
            if is_of_host || !is_root && !has_idmapped(&table) {
                return None;
            }
            let hidden = spec.map(unmountable_places).unwrap_or_default();
            return Some(WriterReach::Mounts { table, hidden });
        }
        // A runtime gives its container a cgroup, or a record. In other cgroups, the host's own
        // root has made the namespace.
        let is_of_host = record.is_none() && group.has_host_process;
        if is_root && !is_of_host || users.is_some_and(|users| users.has_idmapped()) {
            return Some(spec.map_or(WriterReach::Unknown, reach_by_spec));
        }
        let mut pids = pids.iter();
        let Some(table) = pids.find_map(|pid| HeldProcess::open(*pid).ok()?.mounts().ok()) else {
            // The table of a living process may have an idmapped mount.
            return (!has_ended()).then_some(WriterReach::Unknown);
        };
        let hidden = Vec::new();
        has_idmapped(&table).then_some(WriterReach::Mounts { table, hidden })
    }
}

impl Iterator for Search {
    type Item = Writer;

    fn next(&mut self) -> Option<Writer> {
        loop {
            let (index, pids, is_readable) = self.left.pop()?;
            let group = &self.groups[index];
            if group.is_covered {
                continue;
            }
            let start = Instant::now();
            let reach = self.reach(group, &pids, is_readable);
            let group = &mut self.groups[index];
            group.namespaces += 1;
            group.time += start.elapsed();
            if let Some(reach) = reach {
                group.is_covered = !matches!(reach, WriterReach::Mounts { .. });
                let name = group.name(&pids);
                return Some(Writer { name, reach });
            }
        }
    }
}

impl Group {
    fn name(&self, pids: &[u32]) -> String {
        match (&self.record, pids) {
            (Some(record), _) => format!("container {}", record.id),
            (None, [pid, ..]) => {
                let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                format!("process {pid} ({})", command.trim_end())
            }
            (None, []) => String::new(),
        }
    }
}

/// All processes by their groups. A container that no runtime has recorded counts as any other
/// process.
fn grouped(root: &Path) -> io::Result<Vec<Group>> {
    let mut groups = Vec::new();
    let (mut by_id, mut by_init) = (BTreeMap::new(), BTreeMap::new());
    for record in Record::all(root) {
        by_init.extend(record.init.map(|init| (init, groups.len())));
        by_id.insert(record.id.clone(), groups.len());
        groups.push(Group {
            record: Some(record),
            ..Group::default()
        });
    }
    let ids: BTreeSet<&str> = by_id.keys().map(String::as_str).collect();
    let mut by_cgroup = BTreeMap::new();
    for pid in pids_in(Path::new("/proc"))? {
        if pid == INIT {
            continue;
        }
        let cgroup = match fs::read_to_string(format!("/proc/{pid}/cgroup")) {
            Err(error) if is_gone(&error) => continue,
            cgroup => cgroup?,
        };
        let of_container = container_of(&cgroup, &ids).and_then(|id| by_id.get(id));
        let group = match of_container.or_else(|| by_init.get(&pid)) {
            Some(group) => *group,
            None => *by_cgroup.entry(cgroup).or_insert_with(|| {
                groups.push(Group::default());
                groups.len() - 1
            }),
        };
        groups[group].pids.push(pid);
    }
    Ok(groups)
}

/// The mounts of the namespace of these processes, if no container made the namespace for itself.
fn table_of(pids: &[u32], requested: &RequestedUserNamespace) -> Option<MountTable> {
    let start = Instant::now();
    for pid in pids {
        let Ok(process) = HeldProcess::open(*pid) else {
            continue;
        };
        let namespace = process.mount_namespace().ok();
        let accepted = namespace.and_then(|it| it.accepted(&process, requested).ok());
        let table = accepted.and_then(|namespace| namespace.mounts().ok());
        if table.is_some() || start.elapsed() > CONTAINER_TIMEOUT {
            return table;
        }
    }
    None
}

/// The places that a container may write although its mount table lacks them: with the right to
/// mount, a container can unmount a bind and keep its folder open.
fn unmountable_places(spec: &[u8]) -> Vec<FilePlace> {
    let may_mount = MountMakers::from_spec(spec).is_ok_and(|makers| makers.container_may_mount);
    let spec = SpecView::from_bytes(spec).ok().filter(|_| may_mount);
    let places = spec.and_then(|spec| places_by_binds(&spec, true));
    places.unwrap_or_default()
}

fn has_idmapped(table: &MountTable) -> bool {
    let mut mounts = table.entries().iter();
    mounts.any(|mount| mount.attributes.is_idmapped())
}

fn has_ended(pid: u32) -> bool {
    let number = mount_namespaces(&[pid], CONTAINER_TIMEOUT).pop();
    matches!(number, Some(Err(error)) if is_gone(&error))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::process::Command;
    use std::thread::yield_now;

    use super::*;

    /// bwrap(1), or a shell of the host's root: not every namespace without a record is a container's.
    #[test]
    fn namespaces_that_the_hosts_root_made_for_itself_do_not_count() {
        let unshare = Command::new("unshare")
            .args(["-Urm", "sleep", "1000"])
            .spawn();
        let mut process = unshare.unwrap();
        let pid = process.id();
        let own = mount_namespaces(&[std::process::id()], CONTAINER_TIMEOUT)
            .pop()
            .unwrap()
            .unwrap();
        let number = || {
            mount_namespaces(&[pid], CONTAINER_TIMEOUT)
                .pop()
                .unwrap()
                .unwrap()
        };
        while number() == own || !may_become_root(pid) {
            yield_now();
        }
        let name = format!("process {pid} (");
        let writers = ContainersOfNode("/nowhere".into()).writers();
        let found: Vec<_> = writers
            .filter(|writer| writer.name.starts_with(&name))
            .collect();
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(found.is_empty(), "{found:?}");
    }
}
