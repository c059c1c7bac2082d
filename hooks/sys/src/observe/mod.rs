//! Looks at bind sources: what the kernel says of them, as the plain data that `bindguard-core` judges.
//!
//! A look is done in two halves. First every source is held by a handle, so that its mount id stays its own; then the
//! mount table is read once, and each handle is looked up in it.

mod host_mount;
mod place;
mod subpath;
mod subpaths;
mod volume;

pub use host_mount::observe_host_mount;
pub use subpath::HeldSubpath;
pub use subpaths::{SubpathsError, list_subpaths};
pub use volume::HeldVolume;
