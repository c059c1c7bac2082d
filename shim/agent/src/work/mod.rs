//! The work: re-binds on the host, refreshes of containers with a queue and a time limit each, and
//! surveys.

pub mod pod_refreshes;

pub mod refresher;
pub mod survey;
pub mod turns;
