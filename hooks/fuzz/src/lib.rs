//! Properties that hold for any input of a node, a container or an operator. The fuzz targets
//! search for inputs that violate them; `hooks/guard/tests/it/fuzz_seeds.rs` checks them on data of
//! real nodes.

pub mod config;

pub use bindguard_testing::readers::{kubelet_paths, mountinfo, spec, statmount};
