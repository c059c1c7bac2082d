//! Writes the agent's own lines of the journal.

mod pod_names;
mod share;
mod writer;

pub use self::pod_names::PodNames;
pub use self::writer::JournalWriter;
