//! The receivers of reports: the journal, the log, figures, events on pods, and the status. No
//! module of this folder imports a module of `sources` or `work`.

pub mod events;
pub mod journal;
pub mod kubernetes;
pub mod log_line;
pub mod metrics;
pub mod reporting;
pub mod status;
