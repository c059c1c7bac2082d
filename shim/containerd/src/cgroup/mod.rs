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

mod discovery;
mod files;
mod leftover;
#[cfg(test)]
mod live;
mod oom;
mod v1;
mod v2;

use std::fs;
use std::path::PathBuf;

use protobuf::well_known_types::any::Any;

pub use discovery::hierarchies_with_controllers;
pub use leftover::remove_leftover_cgroup;
pub use oom::OomWatch;

use crate::step::StepError;
use files::Metrics;

/// The messages' names in Go's typeurl: the full name alone, without `type.googleapis.com/`.
const V1_NAME: &str = "io.containerd.cgroups.v1.Metrics";
const V2_NAME: &str = "io.containerd.cgroups.v2.Metrics";

/// Only a node that booted with systemd has this directory, see sd_booted(3).
const BOOTED: &str = "/run/systemd/system";

/// A container's cgroup: its directories in the hierarchies.
#[derive(Debug, Clone)]
pub struct Cgroup(CgroupHierarchy);

#[derive(Debug, Clone)]
enum CgroupHierarchy {
    V1(v1::Controllers),
    V2(PathBuf),
}

impl Cgroup {
    /// Finds the cgroup of a living process, the container's init.
    pub fn of_process(pid: u32) -> Result<Self, StepError> {
        discovery::find(pid).map(Self)
    }

    /// All current figures, from about twenty small files that the kernel generates: no read waits
    /// for a disk.
    ///
    /// `None` after the container's end, when the cgroup has been removed.
    pub fn metrics(&self) -> Option<Any> {
        let (name, metrics) = match &self.0 {
            CgroupHierarchy::V1(controllers) => (V1_NAME, v1::metrics(controllers)),
            CgroupHierarchy::V2(directory) => (V2_NAME, v2::metrics(directory)),
        };
        (metrics != Metrics::default()).then(|| Any {
            type_url: name.to_owned(),
            value: metrics.0,
            ..Default::default()
        })
    }

    /// Enables all controllers of the node for it, as Go's shim does. Only the unified hierarchy
    /// needs that.
    pub fn enable_controllers(&self) {
        if let CgroupHierarchy::V2(directory) = &self.0 {
            v2::enable_controllers(directory);
        }
    }

    /// Watches for kills from now on; earlier kills are not reported. Call this inside the event
    /// loop.
    pub fn watch_oom(&self) -> Result<OomWatch, StepError> {
        OomWatch::open(&self.0)
    }
}

/// True if systemd makes the container's cgroups, and not the runtime itself.
///
/// The option names the driver. containerd 1.6 loses the options of a foreign runtime type. Without
/// the option, a cgroup path in systemd's form is a hint that the kubelet uses the systemd driver.
/// The form is only a hint: containerd's CRI before 2.0 writes this form for any parent whose name
/// ends in `.slice`. On a node without systemd the runtime could not use such a path.
pub fn is_systemd(said: Option<bool>, path_is_systemds: bool) -> bool {
    decide(said, path_is_systemds, || {
        fs::symlink_metadata(BOOTED).is_ok_and(|found| found.is_dir())
    })
}

fn decide(said: Option<bool>, path_is_systemds: bool, booted: impl FnOnce() -> bool) -> bool {
    said.unwrap_or_else(|| path_is_systemds && booted())
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
        let cgroup = Cgroup(CgroupHierarchy::V2("/nowhere/at/all".into()));
        assert_eq!(cgroup.metrics(), None);
    }

    #[test]
    fn the_option_goes_before_the_path_and_the_path_needs_a_systemd() {
        for path_is_systemds in [true, false] {
            assert!(decide(Some(true), path_is_systemds, || false));
            assert!(!decide(Some(false), path_is_systemds, || true));
        }
        assert!(decide(None, true, || true));
        assert!(!decide(None, true, || false));
        assert!(!decide(None, false, || true));
    }
}
