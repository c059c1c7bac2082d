//! Properties of the readers for any input. The fuzz targets and the tests of their seeds share them.

pub mod kubelet_paths;
pub mod mountinfo;
pub mod spec;
pub mod statmount;
