//! Properties that hold for any input of a node, a container or an operator. The fuzz targets
//! search for inputs that violate them; `hooks/core/tests/fuzz_seeds.rs` checks them on data of
//! real nodes.

pub mod config;
pub mod kubelet_paths;
pub mod mountinfo;
pub mod spec;
pub mod statmount;
