//! Observes bind sources: the kernel's facts about them, as the plain data that `bindguard-core`
//! judges.
//!
//! First every source is opened: an open descriptor keeps the kernel from reusing the mount id.
//! Then the kernel reports each handle's mount.

mod bind_source;
mod filesystem;
mod host_mount;
mod origin;
mod subpath;
mod subpaths;
mod volume;
mod volume_directory;
mod volumes;

pub use bind_source::BindSource;
pub use host_mount::observe_host_mount;
pub use subpath::HeldSubpath;
pub use subpaths::{SubpathsError, children, is_listed, list_subpaths};
pub use volume::HeldVolume;
pub use volume_directory::HeldVolumeDirectories;
pub use volumes::{Volumes, list_volumes};

use bindguard_core::error_chain;
use bindguard_core::evidence::Observed;

use crate::handle::HandleError;

/// The evidence from an error to open something.
fn unreadable<T>(error: &HandleError) -> Observed<T> {
    if error.is_not_found() {
        Observed::Absent
    } else {
        Observed::Unreadable(error_chain(&error))
    }
}
