//! The owner of a file that an installation changes.

use serde::{Deserialize, Serialize};

/// The owner of a file.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Owner {
    /// containerd's config.toml, or a file that it imports.
    Containerd,
    /// Docker's daemon.json.
    Docker,
    /// A drop-in of Podman's containers.conf.
    Podman,
    /// A drop-in of CRI-O's.
    #[value(name = "crio")]
    Crio,
    /// The unit of the node agent.
    #[value(skip)]
    Agent,
    /// The programs and the settings of bindguard itself.
    #[value(skip)]
    Bindguard,
}

impl Owner {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Docker => "docker",
            Self::Podman => "podman",
            Self::Crio => "crio",
            Self::Agent => "agent",
            Self::Bindguard => "bindguard",
        }
    }
}
