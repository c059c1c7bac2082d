//! The vocabulary of bindguard and every decision it takes.
//!
//! Nothing here reads a file, asks a clock or makes a syscall: what the world looks like arrives as plain data
//! ([`evidence`]), what should be done leaves as plain data ([`plan`]). So each rule can be tested with a literal,
//! and a fixture captured on a node judges the same as the node itself.
//!
//! ```text
//! config.json ─ spec ─► binds ─ source ─► kinds ─┐
//! mountinfo ─ mount_table ─► entries ─ evidence ─┴─ judge ─► findings ─ plan ─► re-binds, spec edits
//! ```
#![forbid(unsafe_code)]

pub mod annotations;
pub mod doctor;
pub mod evidence;
pub mod holders;
pub mod judge;
pub mod kubelet;
pub mod mount_table;
pub mod node_report;
pub mod paths;
pub mod plan;
pub mod pods;
pub mod policy;
pub mod report;
pub mod source;
pub mod spec;
pub mod text;
pub mod unrepaired;
