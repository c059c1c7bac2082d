//! The parts of bindguard that only its operators need: no shim and no runtime links this crate.
//!
//! ```text
//! survey      every volume-subpath and volume of a node ─► node_report
//! namespaces  every mount namespace of a node ─► holders, doctor
//! doctor      one file per point: plain evidence ─► a point with the command to run
//! cri         the client of the node's CRI
//! bundles     the bundles of running containers
//! engines     the running containers of Docker and Podman
//! root_program programs that root alone can change
//! ```
//!
//! Findings and repairs are the guard's own: an operator sees what an admission would find, and
//! repairs by the same re-bind.
#![forbid(unsafe_code)]

pub mod agent_status;
pub mod bundles;
pub mod container_mounts;
pub mod cri;
pub mod doctor;
pub mod drift_count;
pub mod engines;
pub mod holders;
pub mod ignored_requests;
pub mod namespaces;
pub mod node;
pub mod node_report;
pub mod old_binds;
pub mod pod_deletion;
pub mod pods;
pub mod root_program;
pub mod survey;
pub mod terminal;
pub mod unix_http;

mod kubelet_roots;
mod process_files;

pub use crate::kubelet_roots::block_device;
pub use kubelet_roots::{NotASubpath, exact_subpath, kubelets_here, named_subpath};
pub use survey::{RepairAct, repair_node, survey_node, survey_recorded};
