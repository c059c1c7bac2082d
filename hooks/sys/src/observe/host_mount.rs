//! The mount that a host-root bind would be made from.

use bindguard_core::evidence::{HostMount, Observed};
use bindguard_core::mount_table::MountTable;

use crate::handle::{Handle, HandleError};

/// Looks a held source up in the mount table.
pub fn observe_host_mount(source: &Result<Handle, HandleError>, table: &MountTable) -> Observed<HostMount> {
    let id = match source.as_ref().map(Handle::mount_id) {
        Ok(Ok(id)) => id,
        Err(error) if error.is_not_found() => return Observed::Absent,
        Err(error) => return Observed::Unreadable(error.in_full()),
        Ok(Err(error)) => return Observed::Unreadable(error.in_full()),
    };
    match table.mount(id) {
        Some(entry) => Observed::Seen(HostMount {
            mount_point: entry.mount_point.clone(),
            passes_umounts_on: entry.propagation.passes_umounts_on(),
        }),
        None => Observed::Unreadable(format!("mount {} is not in the mount table", id.0)),
    }
}
