//! The running containers of the node, and all other processes that may write folders of the host:
//! their names in the folders can lead elsewhere.

use std::fmt::Debug;

use bindguard_core::evidence::FilePlace;
use bindguard_core::mount_table::MountTable;
use bindguard_core::paths::lies_below;
use bindguard_core::spec::{MountMakers, RequestedPropagation, SpecView};

use crate::refresh::mounts::place_of_source;

/// A mount namespace, or a container, that may be able to write folders of the host.
#[derive(Debug)]
pub struct Writer {
    /// The container or the process, for people.
    pub name: String,
    /// The folders that the writer may write.
    pub reach: WriterReach,
}

/// The folders of the host that a writer may write.
#[derive(Debug)]
pub enum WriterReach {
    /// Those that its mounts show.
    Mounts {
        table: MountTable,
        /// Places that its table may lack.
        hidden: Vec<FilePlace>,
    },
    /// Its mounts are not known: those that its spec gives. A container can hide its mounts in a
    /// namespace of its own, and still write through an open directory.
    Spec(Vec<FilePlace>),
    /// Any folder: neither its mounts nor its spec are known.
    Unknown,
}

/// Finds the writers. A refresh needs them only if the way to a file has a symlink or another
/// folder than before.
pub trait RunningContainers: Debug {
    /// The writers at this moment. Each mount table may be large, so `next` reads a single table. A
    /// container that ended meanwhile is left out.
    fn writers(&self) -> Box<dyn Iterator<Item = Writer>>;
}

/// The places that a container may write by the binds of its spec, also by read-only binds if the
/// container may remount them. `None` if a place is not known.
pub fn places_by_binds(spec: &SpecView<'_>, may_remount: bool) -> Option<Vec<FilePlace>> {
    if spec.overlooked().is_some() {
        return None;
    }
    let host = bindguard_sys::read_mount_table().ok()?;
    let mut places = Vec::new();
    for bind in spec.binds() {
        let source = bind.source();
        if may_remount || !bind.denied().is_read_only() {
            places.push(place_of_source(source)?);
        }
        // A read-only bind leaves the mounts below its source writable. crun binds recursively for
        // every word with an r.
        if may_remount || !bind.denied_below().is_read_only() {
            let mounts = host.entries().iter();
            let below = mounts.filter(|mount| lies_below(&mount.mount_point, source));
            places.extend(below.map(FilePlace::root_of));
        }
    }
    Some(places)
}

/// The reach of a container whose mounts are not known, by its spec.
pub fn reach_by_spec(spec: &[u8]) -> WriterReach {
    let makers = MountMakers::from_spec(spec).ok();
    let makers = makers.filter(MountMakers::has_binds_alone);
    let (Some(_), Ok(spec)) = (makers, SpecView::from_bytes(spec)) else {
        return WriterReach::Unknown;
    };
    // Slaves and peers receive later mounts of the host.
    let is_private = |requested| {
        use RequestedPropagation as Requested;
        matches!(requested, Requested::Private | Requested::Unbindable)
    };
    let are_private = spec
        .binds()
        .iter()
        .all(|bind| is_private(bind.propagation()));
    match places_by_binds(&spec, false).filter(|_| are_private) {
        Some(places) => WriterReach::Spec(places),
        None => WriterReach::Unknown,
    }
}
