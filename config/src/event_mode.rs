//! The setting `mode` of the table `[agent.events]`.

use std::str::FromStr;

use crate::value::Choice;

/// The events that the agent writes to the API server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EventMode {
    /// None.
    #[default]
    Off,
    /// Those of type Warning.
    Warnings,
    /// All.
    All,
}

impl Choice for EventMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("off", Self::Off),
        ("warnings", Self::Warnings),
        ("all", Self::All),
    ];
}

impl FromStr for EventMode {
    type Err = InvalidMode;

    fn from_str(text: &str) -> Result<Self, InvalidMode> {
        Self::from_word(text).ok_or(InvalidMode)
    }
}

/// The text is no mode.
#[derive(Debug, thiserror::Error)]
#[error("expected {}", EventMode::words())]
pub struct InvalidMode;
