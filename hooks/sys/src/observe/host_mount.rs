//! The mount that a host-root bind would be made from.

use bindguard_core::error_chain;
use bindguard_core::evidence::{HostMount, Observed};

use crate::handle::{Handle, HandleError};
use crate::mounts::Mounts;
use crate::observe::unreadable;

/// Observes the mount of an open source.
pub fn observe_host_mount(
    source: &Result<Handle, HandleError>,
    mounts: &Mounts,
) -> Observed<HostMount> {
    let mount = match source {
        Ok(handle) => mounts.mount_of(handle),
        Err(error) => return unreadable(error),
    };
    match mount {
        Ok(mount) => Observed::Seen(HostMount {
            passes_umounts_on: mount.entry.propagation.passes_umounts_on(),
            mount_point: mount.entry.mount_point.clone(),
        }),
        Err(error) => Observed::Unreadable(error_chain(&error)),
    }
}
