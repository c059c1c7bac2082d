//! What has to hold whatever a node, a container or an operator hands the guard. The fuzz targets look for inputs for which it
//! does not; `hooks/core/tests/fuzz_seeds.rs` asks the same of what real nodes showed.

pub mod config;
pub mod kubelet_paths;
pub mod mountinfo;
pub mod spec;
pub mod statmount;
