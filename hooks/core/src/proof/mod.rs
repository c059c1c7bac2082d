//! The proof that a runtime mounted what the spec says.
//!
//! Before the runtime runs, the guard records what the kernel will show for each bind
//! ([`ExpectedBinds`]). After the create, the container's mount table is compared with the record
//! ([`Comparison`]). A runtime can mount something else: crun 1.29 on Linux 7.0 can bind its own
//! root filesystem in place of the host's (containers/crun#2262), and a hostile process can race any
//! runtime.
//!
//! The record alone decides: a program that changes config.json after the admission changes no
//! expectation. An image can have symlinks on the way to a destination. If nothing is mounted at the
//! literal destination, a walk through the container's root finds the place.

mod expected;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::mount_table::{MountAttributes, MountEntry, MountId, Propagation};

pub use crate::proof::expected::{
    AdmittedEntry, ExpectedBind, ExpectedBinds, ExpectedPropagation, SpecVersion,
};

/// The file of a bundle with the [`ExpectedBinds`].
pub const EXPECTED_FILE: &str = "bindguard-binds.json";

// A difference between a bind of the spec and the mounts of the new container.

/// A difference between a bind of the spec and the mounts of the new container.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// The container sees no mount at the destination, or too few.
    #[error("nothing is mounted at its destination, or another mount hides its mount")]
    NotMounted,
    /// Another file or directory is mounted at the destination.
    #[error("its destination shows {root} of the {fs_type} filesystem {device}")]
    OtherSource {
        /// The root of the mount at the destination, as the kernel prints it.
        root: String,
        /// That mount's filesystem type.
        fs_type: String,
        /// That mount's device.
        device: String,
    },
    /// The mount permits what the spec denies.
    #[error("its mount in the container is not {0}")]
    Permits(MountAttributes),
    /// The mount sends or receives more mounts than the spec requests.
    #[error("its mount in the container propagates mounts further than the spec says")]
    Propagates,
    /// A host-root bind does not receive the host's umounts.
    #[error("its mount in the container has no master: the host's umounts do not reach it")]
    WithoutMaster,
}

// Compares a container's mount table with the expected binds: the mount that the container sees at
// each destination must be the mount that the spec puts there.
//
// The spec's entries form a stack: a later entry at the same place, or at a folder above, covers
// an earlier bind. The table forms a tree: the parents say which mount is visible at a place, the
// order of the lines does not.

/// A comparison with the mounts of a container, which arrive singly.
#[derive(Debug)]
pub struct Comparison<'e> {
    /// The entries of the spec, in their order.
    entries: Vec<Entry<'e>>,
    /// The places that the runtime covers after all mounts.
    masked: Vec<PathBuf>,
    /// The mounts at or above the place of a bind.
    mounts: Vec<MountEntry>,
    is_of_container: bool,
}

/// An entry of the spec's `mounts`.
#[derive(Debug, Default)]
struct Entry<'e> {
    /// The destination, in the kernel's way to print a path.
    place: PathBuf,
    /// The expectation; `None` for an entry that is no bind, and for a bind of unknown source.
    bind: Option<&'e ExpectedBind>,
}

impl<'e> Comparison<'e> {
    /// Starts with no mount. Each destination is taken literally, as if the image had no symlinks.
    pub fn new(expected: &'e ExpectedBinds) -> Self {
        Self::at_places(expected, &HashMap::new())
    }

    /// Starts with no mount. `places` has the places of entries whose destination leads elsewhere,
    /// and after the entries those of the masked paths.
    pub fn at_places(expected: &'e ExpectedBinds, places: &HashMap<usize, PathBuf>) -> Self {
        let mut masked = Vec::with_capacity(expected.masked.len());
        for (index, path) in expected.masked.iter().enumerate() {
            let place = places.get(&(expected.entries.len() + index));
            masked.push(as_printed(place.unwrap_or(path)));
        }
        let mut entries = Vec::with_capacity(expected.entries.len());
        for (index, entry) in expected.entries.iter().enumerate() {
            let mut place = places.get(&index).unwrap_or(&entry.destination).clone();
            if !place.as_os_str().is_empty() {
                place = as_printed(&place);
            }
            entries.push(Entry { place, bind: None });
        }
        for bind in &expected.binds {
            // The record of an earlier version has no entries.
            if entries.len() <= bind.bind {
                entries.resize_with(bind.bind + 1, Entry::default);
            }
            let entry = &mut entries[bind.bind];
            if entry.place.as_os_str().is_empty() {
                let place = places.get(&bind.bind).unwrap_or(&bind.destination);
                entry.place = as_printed(place);
            }
            entry.bind = Some(bind);
        }
        Self {
            entries,
            masked,
            mounts: Vec::new(),
            is_of_container: false,
        }
    }

    /// Adds the next mount of the table.
    pub fn add(&mut self, mount: &MountEntry) {
        let point = mount.mount_point.as_os_str().as_bytes();
        self.is_of_container |= point == b"/proc";
        let mut is_on_the_way = false;
        for entry in &self.entries {
            if entry.bind.is_some() && is_at_or_above(point, &entry.place) {
                is_on_the_way = true;
                self.is_of_container |= point == entry.place.as_os_str().as_bytes();
            }
        }
        if is_on_the_way {
            self.mounts.push(mount.clone());
        }
    }

    /// False if the table has neither a `/proc` nor a mount at the place of a bind: a process of a
    /// sandbox, as Kata's, has none of the spec's mounts.
    pub fn is_of_container(&self) -> bool {
        self.is_of_container
    }

    pub fn differences(self) -> Vec<(&'e ExpectedBind, Difference)> {
        let tree = Tree::of(&self.mounts);
        let mut at: HashMap<&OsStr, Vec<usize>> = HashMap::new();
        for (index, entry) in self.entries.iter().enumerate() {
            at.entry(entry.place.as_os_str()).or_default().push(index);
        }
        let mut found = Vec::new();
        for (place, indices) in &at {
            let place = Path::new(place);
            if self.masked.iter().any(|masked| place.starts_with(masked)) {
                continue;
            }
            // An entry at a folder above hides all earlier entries.
            let mut first_seen = 0;
            for above in place.ancestors().skip(1) {
                if let Some(above) = at.get(above.as_os_str()).and_then(|it| it.last()) {
                    first_seen = first_seen.max(above + 1);
                }
            }
            let indices = indices.iter().filter(|index| **index >= first_seen);
            let binds: Vec<_> = indices.map(|index| self.entries[*index].bind).collect();
            if binds.iter().any(Option::is_some) {
                compare_stacks(&binds, &tree.stack_at(place), &mut found);
            }
        }
        found.sort_by_key(|(bind, _)| bind.bind);
        found
    }
}

/// Compares the entries at a place with the mounts there, both from the lowest. The container sees
/// the topmost mount. The mounts below must be there: a mount proves a single bind. Further mounts
/// between are no difference: the runtime binds a read-only path over itself.
fn compare_stacks<'e>(
    binds: &[Option<&'e ExpectedBind>],
    stack: &[&MountEntry],
    found: &mut Vec<(&'e ExpectedBind, Difference)>,
) {
    let mut below = stack.len().saturating_sub(1);
    for (depth, bind) in binds.iter().rev().enumerate() {
        let Some(bind) = bind else { continue };
        let difference = if depth == 0 {
            match stack.last() {
                Some(topmost) => bind.difference(topmost),
                None => Some(Difference::NotMounted),
            }
        } else if let Some(mount) = stack[..below].iter().rposition(|it| bind.is_shown_by(it)) {
            below = mount;
            None
        } else {
            Some(Difference::NotMounted)
        };
        if let Some(difference) = difference {
            found.push((bind, difference));
        }
    }
}

/// The mounts of a table by their parents.
struct Tree<'m> {
    roots: Vec<&'m MountEntry>,
    children: HashMap<MountId, Vec<&'m MountEntry>>,
}

impl<'m> Tree<'m> {
    fn of(mounts: &'m [MountEntry]) -> Self {
        let mut children: HashMap<MountId, Vec<&MountEntry>> = HashMap::new();
        for mount in mounts {
            children.entry(mount.id).or_default();
        }
        let mut roots = Vec::new();
        for mount in mounts {
            match children.get_mut(&mount.parent) {
                Some(siblings) if mount.parent != mount.id => siblings.push(mount),
                // The parent of the root is in no table.
                _ => roots.push(mount),
            }
        }
        Self { roots, children }
    }

    /// The mounts at a place that the container can see or that lie below such a mount, the lowest
    /// first. Mirrors the kernel's look-up: path_resolution(7).
    fn stack_at(&self, place: &Path) -> Vec<&'m MountEntry> {
        let mut stack = Vec::new();
        let mut next = &self.roots;
        // In a table that was read while it changed, parents can form a circle.
        for _ in 0..=self.children.len() {
            // The look-up meets the mount nearest to the root first; the newest mount covers others.
            let mut met: Option<&MountEntry> = None;
            for mount in next {
                let point = mount.mount_point.as_os_str();
                if is_at_or_above(point.as_bytes(), place)
                    && met.is_none_or(|it| point.len() <= it.mount_point.as_os_str().len())
                {
                    met = Some(mount);
                }
            }
            let Some(mount) = met else { break };
            if mount.mount_point.as_os_str() == place.as_os_str() {
                stack.push(mount);
            }
            let Some(above) = self.children.get(&mount.id) else {
                break;
            };
            next = above;
        }
        stack
    }
}

/// A destination as the kernel prints a mount point. A runtime takes a relative path from the root.
fn as_printed(destination: &Path) -> PathBuf {
    let names = destination.components();
    let names = names.filter(|name| *name != Component::CurDir);
    Path::new("/").components().chain(names).collect()
}

/// Compares bytes: `Path` compares component by component, which costs 0.1 ms for 30 binds and 100
/// mounts.
fn is_at_or_above(point: &[u8], place: &Path) -> bool {
    let place = place.as_os_str().as_bytes();
    match place.strip_prefix(point) {
        Some(rest) => rest.is_empty() || rest[0] == b'/' || point == b"/",
        None => false,
    }
}

impl ExpectedBind {
    /// Compares the mount that the container sees at the destination.
    fn difference(&self, mount: &MountEntry) -> Option<Difference> {
        if !self.is_shown_by(mount) {
            return Some(Difference::OtherSource {
                root: mount.root.display_name(),
                fs_type: mount.fs_type.0.clone(),
                device: mount.device.to_string(),
            });
        }
        let missing = self.denied.denied_only_here(mount.attributes);
        if !missing.is_empty() {
            return Some(Difference::Permits(missing));
        }
        let Propagation {
            peer_group, master, ..
        } = mount.propagation;
        match self.propagation {
            ExpectedPropagation::Any => None,
            _ if peer_group.is_some() => Some(Difference::Propagates),
            ExpectedPropagation::NoPeer => None,
            ExpectedPropagation::Private => master.map(|_| Difference::Propagates),
            ExpectedPropagation::Slave if master.is_none() => Some(Difference::WithoutMaster),
            ExpectedPropagation::Slave => None,
        }
    }
}
