//! The OCI spec, seen without taking it apart.
//!
//! A spec is kept as the bytes that containerd wrote; [`read`] takes the few values out of them that the guard reads, and
//! [`edit`] finds those and replaces them and nothing else. Unknown fields, big numbers, odd escapes and
//! duplicate keys therefore reach the runtime exactly as they were sent, which a round trip through typed structs
//! cannot promise.
//!
//! Mirrors the [runtime spec's `mounts` and `linux.rootfsPropagation`][spec] as runc and crun read them.
//!
//! [spec]: https://github.com/opencontainers/runtime-spec/blob/main/config.md#mounts

mod access;
mod bind;
mod edit;
mod object;
mod propagation;
mod read;
mod view;

pub use access::AskedAccess;
pub use bind::Bind;
pub use edit::{EditError, SpecEdit};
pub use object::{RawObject, Text};
pub use propagation::{AskedPropagation, RootfsPropagation};
pub use view::{SpecError, SpecView};
