//! The OCI spec, read and edited as bytes.
//!
//! A spec is kept as the bytes that containerd wrote. [`read`] extracts the few values that the
//! guard needs, and [`edit`] replaces only those. Unknown fields, big numbers, odd escapes and
//! duplicate keys therefore reach the runtime unchanged. A round trip through typed structs cannot
//! guarantee that.
//!
//! Mirrors the [runtime spec's `mounts` and `linux.rootfsPropagation`][spec] as runc and crun read
//! them.
//!
//! [spec]: https://github.com/opencontainers/runtime-spec/blob/main/config.md#mounts

mod bind;
mod edit;
mod mount_makers;
mod object;
mod propagation;
mod read;
mod users;
mod view;

pub use bind::Bind;
pub use edit::{EditError, SpecEdit};
pub use mount_makers::{MountMakers, SpecMount};
pub use object::{RawObject, Text};
pub use propagation::{RequestedPropagation, RootfsPropagation};
pub use read::MAX_BINDS;
pub use users::{IdMap, IdMaps, RequestedUserNamespace, SpecUsers};
pub use view::{SpecError, SpecView};
