//! What is measured, and in which unit.

use serde::{Deserialize, Serialize};

/// A figure that candidates are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Figure {
    /// Memory that goes away with an idle shim.
    PrivateDirty,
    /// A shim's proportional share of memory, many shims being there.
    Pss,
    /// Threads of an idle shim.
    Threads,
    /// How often an idle shim's threads ran in a minute.
    WakeUps,
    /// From the exec of `start` until the shim answered its first call.
    StartWall,
    /// CPU time of the command `start` and of the shim until then.
    StartCpu,
    /// CPU time of the command `start` alone.
    StartCommandCpu,
    /// `ctr run --rm` of a program that ends at once.
    LifeCpu,
    /// The same, by the clock on the wall.
    LifeWall,
}

impl Figure {
    /// As tables call it.
    pub fn title(self) -> &'static str {
        match self {
            Self::PrivateDirty => "private dirty memory of an idle shim",
            Self::Pss => "PSS of a shim, with as many shims",
            Self::Threads => "threads of an idle shim",
            Self::WakeUps => "wake-ups of an idle shim in 60 s",
            Self::StartWall => "`start` until the first answer, wall",
            Self::StartCpu => "`start` until the first answer, CPU",
            Self::StartCommandCpu => "the command `start` alone, CPU",
            Self::LifeCpu => "a container's life, CPU",
            Self::LifeWall => "a container's life, wall",
        }
    }

    /// Of its values.
    pub fn unit(self) -> &'static str {
        match self {
            Self::PrivateDirty | Self::Pss => "KiB",
            Self::Threads | Self::WakeUps => "",
            Self::StartWall | Self::StartCpu | Self::StartCommandCpu | Self::LifeCpu | Self::LifeWall => "ms",
        }
    }

    /// What the columns of its table are, where it is measured more than once: containers in the shim, pods, mounts.
    pub fn columns(self) -> Option<&'static str> {
        match self {
            Self::PrivateDirty => Some("containers"),
            Self::Pss => Some("pods"),
            Self::LifeCpu | Self::LifeWall => Some("more mounts"),
            Self::Threads | Self::WakeUps | Self::StartWall | Self::StartCpu | Self::StartCommandCpu => None,
        }
    }

    /// A value as tables show it.
    pub fn show(self, value: f64) -> String {
        match self.unit() {
            "KiB" | "" => format!("{value:.0}"),
            _ => format!("{value:.1}"),
        }
    }
}
