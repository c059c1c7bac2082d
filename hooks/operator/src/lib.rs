//! The parts of bindguard that only its operators need: no shim and no runtime links this crate.
//!
//! ```text
//! survey      every volume-subpath and volume of a node ─► node_report
//! namespaces  every mount namespace of a node ─► holders, doctor
//! doctor      plain evidence of each point ─► a check with the command to run
//! old_binds   what running containers show and the host no longer has
//! cri         the client of the node's CRI
//! containers  the running containers: their bundles and inits, of every runtime
//! writers     the processes that may write a folder of the host
//! root_program programs that root alone can change
//! ```
//!
//! Findings and repairs are the guard's own: an operator sees what an admission would find, and
//! repairs by the same re-bind.
#![forbid(unsafe_code)]

pub mod agent_status;
pub mod containers;
pub mod cri;
pub mod doctor;
pub mod holders;
pub mod namespaces;
pub mod node;
pub mod node_report;
pub mod old_binds;
pub mod pods;
pub mod root_program;
pub mod survey;
pub mod terminal;
pub mod unix_http;
pub mod writers;

mod kubelet_roots;

pub use kubelet_roots::{block_device, exact_subpath, kubelets_here, named_subpath};
pub use survey::{RepairAct, repair_node, survey_node, survey_recorded};
