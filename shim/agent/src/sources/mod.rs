//! The causes of work: the kubelet's updates, the mounts of drivers, replaced files of the host,
//! NRI, requests over HTTP, and new lines in the journal.

pub mod engines;
pub mod http;
pub mod journal;
pub mod kubediag;
pub mod kubelet_volumes;
pub mod nri;
pub mod pod_binds;
pub mod roots;
pub mod watch;
