//! The outcome of a finding.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::text::shell_word;

/// The outcome of a finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Outcome {
    /// The current target is bound in place of the stale target.
    Rebound {
        /// The number of tries; the volume changed during the earlier tries.
        tries: u32,
    },
    /// Another repairer made the bind current meanwhile.
    AlreadyCurrent,
    /// The stale mount is detached; the kubelet binds again when it next starts the container.
    Detached,
    /// The spec's source points at the volume's own path.
    PointedAtVolume {
        /// The new source.
        source: PathBuf,
    },
    /// The spec now requests rslave.
    MadeRslave,
    /// The spec now requests rslave, which helps only after this command is run on the host.
    NeedsSharedMount {
        /// The command.
        command: String,
    },
    /// The action that an admission or a repair would take; this run only checked.
    Planned {
        /// The action.
        action: PlannedAction,
    },
    /// Policy refused the container.
    Refused,
    /// The repair failed; the runtime gets the bind as it was.
    Failed {
        /// Why.
        error: String,
    },
}

/// An action that a check plans and does not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedAction {
    /// Bind the current target in place of the stale target.
    Rebind,
    /// Create the missing directory again, then bind it.
    Remake,
    /// Point the spec's source at the volume's own path.
    PointAtVolume,
    /// Request rslave in the spec.
    MakeRslave,
    /// Refuse the container.
    Refuse,
}

impl Outcome {
    /// The command that helps if a mount on the host is private: mount(8). systemd does the same
    /// with `/` at boot.
    pub fn needs_shared(mount_point: &Path) -> Self {
        Self::NeedsSharedMount {
            command: format!("mount --make-rshared {}", shell_word(mount_point)),
        }
    }

    /// True if the bind is healthy now, or its stale mount is gone.
    pub fn is_repaired(&self) -> bool {
        match self {
            Self::Rebound { .. } | Self::AlreadyCurrent | Self::Detached => true,
            Self::PointedAtVolume { .. } | Self::MadeRslave => true,
            Self::NeedsSharedMount { .. }
            | Self::Planned { .. }
            | Self::Refused
            | Self::Failed { .. } => false,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rebound { tries: 1 } => f.write_str("re-bound to the current target"),
            Self::Rebound { tries } => write!(f, "re-bound to the current target, at try {tries}"),
            Self::AlreadyCurrent => f.write_str("another repair was first"),
            Self::Detached => {
                f.write_str("detached: the kubelet binds it anew at the container's next start")
            }
            Self::PointedAtVolume { source } => write!(f, "source pointed at {}", source.display()),
            Self::MadeRslave => f.write_str("made rslave"),
            Self::NeedsSharedMount { command } => {
                write!(f, "for it to have one, run on the host: {command}")
            }
            Self::Refused => f.write_str("the container is refused"),
            Self::Planned { action } => write!(f, "would be {action}"),
            Self::Failed { error } => write!(f, "could not be repaired: {error}"),
        }
    }
}

impl fmt::Display for PlannedAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rebind => "re-bound to the current target",
            Self::Remake => "created again and bound",
            Self::PointAtVolume => "pointed at the volume's own path",
            Self::MakeRslave => "made rslave",
            Self::Refuse => "refused",
        })
    }
}
