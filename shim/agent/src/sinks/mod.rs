//! Where reports go: the journal, the log, figures, events on pods, and the status. Nothing here
//! knows who reports.

pub mod events;
pub mod journal;
pub mod kubernetes;
pub mod log_line;
pub mod metrics;
pub mod reporting;
pub mod status;
