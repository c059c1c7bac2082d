//! What holds for any input of a reader: the fuzz targets and the tests of their seeds share it.

pub mod kubelet_paths;
pub mod mountinfo;
pub mod spec;
pub mod statmount;
