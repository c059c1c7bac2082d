//! A container's cgroup: its resource usage (`Stats`) and the kernel's out-of-memory kills
//! (`TaskOOM`).
//!
//! ```text
//!   init's pid ──find──► Cgroup ──metrics()──► StatsResponse.stats
//!                            └────watch_oom()──► OomWatch ──next(), take_unreported()──► TaskOOM
//! ```
//! Create the [`Cgroup`] after `create` has succeeded, while the init waits for its start. Its
//! directories are found through the living process and kept, so that the figures and the last kill
//! are still available when the init is dead. A process that moves later, for example an init that
//! is systemd, moves below them.
//!
//! This module sets no limit and moves no process; the runtime does. A figure that a kernel, or a
//! cgroup without some controller, does not report is left out of the message. It never fails the
//! whole message.

mod controllers;
mod directory;
mod discovery;
mod driver;
mod hierarchies;
mod hugepages;
mod leftover;
#[cfg(test)]
mod live;
mod mounts;
mod oom;
mod processes;
mod scope;
mod text;
mod v1;
mod v2;
mod waiting_init;

use std::io;
use std::path::PathBuf;

use protobuf::Message;
use protobuf::well_known_types::any::Any;

pub(crate) use driver::is_systemd;
pub(crate) use hierarchies::hierarchies_with_controllers;
pub(crate) use leftover::remove_leftover_cgroup;
pub(crate) use oom::{OomError, OomWatch};

/// The messages' names in Go's typeurl: the full name alone, without `type.googleapis.com/`.
const V1_NAME: &str = "io.containerd.cgroups.v1.Metrics";
const V2_NAME: &str = "io.containerd.cgroups.v2.Metrics";

/// A container's cgroup: its directories in the hierarchies.
#[derive(Debug, Clone)]
pub(crate) struct Cgroup(CgroupHierarchy);

#[derive(Debug, Clone)]
enum CgroupHierarchy {
    V1(v1::Controllers),
    V2(directory::Directory),
}

/// A cgroup that cannot be found or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CgroupError {
    /// Reading a file of the kernel that names the cgroup.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No hierarchy that is mounted here lists the process.
    #[error("find the cgroup of process {pid}: no mounted hierarchy shows it")]
    Nowhere {
        /// The process.
        pid: u32,
    },
}

impl Cgroup {
    /// Finds the cgroup of a living process, the container's init.
    pub(crate) fn of_process(pid: u32) -> Result<Self, CgroupError> {
        discovery::find(pid).map(Self)
    }

    /// All current figures, from about twenty small files that the kernel generates: no read waits
    /// for a disk.
    ///
    /// `None` after the container's end, when the cgroup has been removed.
    pub(crate) fn metrics(&self) -> protobuf::Result<Option<Any>> {
        match &self.0 {
            CgroupHierarchy::V1(controllers) => any(V1_NAME, &v1::metrics(controllers)),
            CgroupHierarchy::V2(directory) => any(V2_NAME, &v2::metrics(directory)),
        }
    }

    /// Enables all controllers of the node for it, as Go's shim does. Only the unified hierarchy
    /// needs that.
    pub(crate) fn enable_controllers(&self) {
        match &self.0 {
            CgroupHierarchy::V1(_) => {}
            CgroupHierarchy::V2(directory) => controllers::enable(directory.path()),
        }
    }

    /// Watches for kills from now on; earlier kills are not reported. Call this inside the event
    /// loop.
    pub(crate) fn watch_oom(&self) -> Result<OomWatch, OomError> {
        OomWatch::open(&self.0)
    }
}

/// `None` for a message without any figure.
fn any<M: Message>(name: &str, message: &M) -> protobuf::Result<Option<Any>> {
    if *message == M::new() {
        return Ok(None);
    }
    Ok(Some(Any {
        type_url: name.to_owned(),
        value: message.write_to_bytes()?,
        ..Default::default()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_messages() {
        use containerd_shim_protos::{cgroups, cgroups_v2};
        use protobuf::MessageFull;
        let v1 = cgroups::metrics::Metrics::descriptor();
        let v2 = cgroups_v2::metrics::Metrics::descriptor();
        assert_eq!((v1.full_name(), v2.full_name()), (V1_NAME, V2_NAME));
    }

    #[test]
    fn a_cgroup_without_a_file_is_gone() {
        let directory = directory::Directory::at("/nowhere/at/all");
        let cgroup = Cgroup(CgroupHierarchy::V2(directory));
        assert_eq!(cgroup.metrics().unwrap(), None);
    }
}
