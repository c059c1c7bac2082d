//! Looks at bind sources: what the kernel says of them, as the plain data that `bindguard-core` judges.
//!
//! A look is done in two halves. First every source is held by a handle, so that its mount id stays its own; then the
//! kernel is asked for each handle's mount.

mod filesystem;
mod host_mount;
mod origin;
mod recorded;
mod subpath;
mod subpaths;
mod volume;
mod volume_directory;
mod volumes;

pub use host_mount::observe_host_mount;
pub use recorded::Recorded;
pub use subpath::HeldSubpath;
pub use subpaths::{SubpathsError, is_listed, list_subpaths};
pub use volume::HeldVolume;
pub use volume_directory::HeldVolumeDirectories;
pub use volumes::{Volumes, list_volumes};

use bindguard_core::evidence::Observed;

use crate::handle::HandleError;

/// What an error to hold something says of it.
fn unreadable<T>(error: &HandleError) -> Observed<T> {
    if error.is_not_found() { Observed::Absent } else { Observed::Unreadable(error.in_full()) }
}
