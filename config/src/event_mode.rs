//! The setting `mode` of the table `[agent.events]`.

use std::str::FromStr;

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

impl FromStr for EventMode {
    type Err = InvalidMode;

    fn from_str(text: &str) -> Result<Self, InvalidMode> {
        match text {
            "off" => Ok(Self::Off),
            "warnings" => Ok(Self::Warnings),
            "all" => Ok(Self::All),
            _ => Err(InvalidMode),
        }
    }
}

/// The text is no mode.
#[derive(Debug, thiserror::Error)]
#[error("expected \"off\", \"warnings\" or \"all\"")]
pub struct InvalidMode;
