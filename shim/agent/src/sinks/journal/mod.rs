//! Writes the agent's own lines of the journal.

mod share;
mod writer;

pub use self::writer::JournalWriter;
