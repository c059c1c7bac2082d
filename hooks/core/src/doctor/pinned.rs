//! Mounts that the host has let go of and a container still has: what "device or resource busy" will be about.
//!
//! A mount of another namespace counts when it covers a place where the kubelet or a runtime mounts things, when nothing of
//! its filesystem is mounted there on the host, and when no umount of the host could have reached it.

use std::path::{Path, PathBuf};

use crate::holders::SeenNamespace;
use crate::mount_table::{MountEntry, MountIndex, MountTable};
use crate::policy::Policy;

use super::Point;

const NAME: &str = "pinned";

/// The point on them. `problems`: namespaces that could not be looked at.
pub fn pinned(own: &MountTable, others: &[SeenNamespace], problems: &[String], policy: &Policy) -> Point {
    let mut found: Vec<PathBuf> = Vec::new();
    let own = MountIndex::of(own);
    for table in others.iter().filter_map(|namespace| namespace.table.as_ref().ok()) {
        let index = MountIndex::of(table);
        found.extend(table.entries().iter().filter_map(|entry| host_path_of_pinned(entry, &index, &own, policy)));
    }
    found.sort();
    found.dedup();
    if let Some(first) = found.first() {
        let told = format!("{} mounts are gone here and alive in containers, such as {}", found.len(), first.display());
        return Point::bad(NAME, told, format!("bindguard holders {}", first.display()));
    }
    let unread = others.iter().find_map(|namespace| namespace.table.as_ref().err());
    match problems.first().or(unread) {
        Some(why) => Point::no_answer(NAME, why.clone()),
        None => Point::good(NAME, format!("{} other mount namespaces hold nothing that is gone here", others.len())),
    }
}

/// Where a pinned mount was on the host; `None`: it is not pinned, or not where the kubelet or a runtime mounts.
fn host_path_of_pinned(
    entry: &MountEntry,
    table: &MountIndex<'_>,
    own: &MountIndex<'_>,
    policy: &Policy,
) -> Option<PathBuf> {
    let parent = table.parent(entry)?;
    // A container's own root is on the host, too, and what is mounted in it, or in a copy of it, is the container's.
    let root = table.stack_at(Path::new("/")).last()?;
    let is_its_own = parent.device == root.device && parent.root.path.starts_with(&root.root.path);
    if is_its_own || entry.propagation.master.is_some() {
        return None;
    }
    let place = parent.place_in_filesystem(&entry.mount_point)?;
    let host = own.of_device(parent.device).iter().find(|host| place.starts_with(&host.root.path))?;
    let below = place.strip_prefix(&host.root.path).ok()?;
    let path = if below.as_os_str().is_empty() { host.mount_point.clone() } else { host.mount_point.join(below) };
    let is_there = own.stack_at(&path).iter().any(|mount| mount.device == entry.device);
    (!is_there && policy.is_mounted_below(&path)).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;
    use crate::holders::KeptBy;

    fn table(lines: &str) -> MountTable {
        MountTable::from_mountinfo(lines.as_bytes()).unwrap()
    }

    fn container(table: MountTable) -> Vec<SeenNamespace> {
        let kept_by = KeptBy::Process { pid: 7, command: "exporter".to_owned(), cgroup: String::new() };
        vec![SeenNamespace { id: 9, kept_by, processes: 1, table: Ok(table) }]
    }

    const HOST: &str = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n2 1 0:20 / /run rw shared:2 - tmpfs tmpfs rw\n";
    const NETNS: &str = "3 2 0:4 net:[1] /run/netns/cni-1 rw shared:3 - nsfs nsfs rw\n";
    const COPY: &str = "11 10 0:50 / / rw - overlay overlay rw\n12 11 8:1 / /host rw - ext4 /dev/sda1 rw\n13 12 0:20 / /host/run rw - tmpfs tmpfs rw\n14 13 0:4 net:[1] /host/run/netns/cni-1 rw - nsfs nsfs rw\n15 11 0:60 / /proc rw - proc proc rw\n";

    #[test]
    fn a_private_copy_of_what_is_gone_is_pinned() {
        let policy = Policy::default();
        let of = |host: &str, copy: &str| pinned(&table(host), &container(table(copy)), &[], &policy);
        assert_eq!(of(&format!("{HOST}{NETNS}"), COPY).state, State::Good);
        assert_eq!(of(HOST, COPY).run.as_deref(), Some("bindguard holders /run/netns/cni-1"));
        assert_eq!(of(HOST, &COPY.replace("cni-1 rw -", "cni-1 rw master:3 -")).state, State::Good);
        assert_eq!(pinned(&table(HOST), &[], &["no".to_owned()], &policy).state, State::NoAnswer);
    }
}
