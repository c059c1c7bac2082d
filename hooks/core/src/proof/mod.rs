//! The proof that a runtime mounted what the spec says.
//!
//! Before the runtime runs, the guard records what the kernel will show for each bind
//! ([`ExpectedBinds`]). After the create, the container's mount table is compared with the record
//! ([`Comparison`]). A runtime can mount something else: crun 1.29 on Linux 7.0 can bind its own
//! root filesystem in place of the host's (containers/crun#2262), and a hostile process can race any
//! runtime.
//!
//! The record alone decides: a program that changes config.json after the admission changes no
//! expectation. An image can have symlinks on the way to a destination. If nothing is mounted at the
//! literal destination, a walk through the container's root finds the place.

mod comparison;
mod difference;
mod expected;

pub use comparison::Comparison;
pub use difference::Difference;
pub use expected::{AdmittedEntry, ExpectedBind, ExpectedBinds, ExpectedPropagation, SpecVersion};

/// The file of a bundle with the [`ExpectedBinds`].
pub const EXPECTED_FILE: &str = "bindguard-binds.json";
