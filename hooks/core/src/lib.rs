//! The types of bindguard and every decision it takes.
//!
//! This crate reads no file and no clock and makes no syscall. Evidence arrives as plain data
//! ([`evidence`]), and planned actions leave as plain data ([`judge::Plan`]). So each rule can be
//! tested with a literal, and a fixture captured on a node gives the same verdicts as the node
//! itself.
//!
//! ```text
//! config.json ─ spec ─► binds ─ places ─► kinds ─┐
//! mountinfo ─ mount_table ─► entries ─ evidence ─┴─ judge ─► findings, re-binds, spec edits
//! ```
#![forbid(unsafe_code)]

pub mod evidence;
pub mod handover;
pub mod identity;
pub mod judge;
pub mod kubelet;
pub mod mount_table;
pub mod places;
pub mod policy;
pub mod proof;
pub mod refresh;
pub mod refresh_request;
pub mod report;
pub mod spec;
pub mod text;

pub use crate::text::error_chain;
