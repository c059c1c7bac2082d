//! The causes of work: the kubelet's updates, the mounts of drivers, replaced files of the host,
//! NRI, requests over HTTP, and new lines in the journal.

pub mod engines;
pub mod host_files;
pub mod http;
pub mod journal;
pub mod kubediag;
pub mod nri;
pub mod roots;
pub mod volumes;
pub mod watch;
