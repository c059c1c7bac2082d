//! The proof that a runtime mounted what the spec says.
//!
//! Before the runtime runs, the guard records what the kernel will show for each bind
//! ([`ExpectedBinds`]). After the create, the container's mount table is compared with the record
//! ([`Comparison`]). A runtime can mount something else: crun 1.29 on Linux 7.0 can bind its own
//! root filesystem in place of the host's (containers/crun#2262), and a hostile process can race any
//! runtime.
//!
//! Binds are compared as a set. An image can have symlinks on the way to a destination, so the
//! place of a mount is compared only if the table has the destination literally.

mod comparison;
mod difference;
mod expected;

pub use comparison::Comparison;
pub use difference::Difference;
pub use expected::{ExpectedBind, ExpectedBinds, ExpectedPropagation};

/// The file of a bundle with the [`ExpectedBinds`].
pub const EXPECTED_FILE: &str = "bindguard-binds.json";
