//! The kernel's mount table, as `/proc/PID/mountinfo` prints it.
//!
//! Mirrors proc_pid_mountinfo(5) and `show_mountinfo` in the kernel's `fs/proc_namespace.c`. A line
//! that cannot be read makes the table incomplete, and the table names the line: "could not read"
//! must not pass for "not mounted". Most readers refuse such a table.

mod attributes;
mod entry;
mod escape;
mod index;
mod limits;
mod parse;
mod peers;
mod render;
mod statmount;
mod stream;
mod table;

pub use attributes::MountAttributes;
pub use entry::{Device, FsType, MountEntry, MountId, MountRoot, Propagation};
pub use index::MountIndex;
pub use limits::{ExceededLimit, TableError, TableLimits};
pub use parse::{ParseError, WrongField};
pub use statmount::{StatmountEntry, StatmountError};
pub use stream::{Detail, TableParser};
pub use table::MountTable;
