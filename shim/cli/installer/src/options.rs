//! The operator's options, and the owners of the files that an installation changes.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

/// Arguments of both verbs.
#[derive(Debug, Args)]
pub struct CommonOptions {
    /// Print the planned changes and do nothing. The exit code is 1 if there is something to do.
    #[arg(long)]
    pub dry_run: bool,
    /// Work in another root file system: of an image, or of a node as a pod sees it. All other
    /// paths are below this folder.
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Run the command that activates the changes, if there were any.
    #[arg(long)]
    pub restart: bool,
    /// Restart only while this command grants a slot, such as `bindguard-agent restart-slot`: it
    /// limits the nodes that restart at the same time.
    #[arg(long, value_name = "COMMAND", requires = "restart")]
    pub restart_slot: Option<String>,
    /// Label this node by this command while pods of the handler start, such as `bindguard-agent
    /// node-label`.
    #[arg(long, value_name = "COMMAND")]
    pub node_label: Option<String>,
    /// Label this node by this file of node-feature-discovery.
    #[arg(long, value_name = "FILE", conflicts_with = "node_label")]
    pub node_feature: Option<PathBuf>,
    /// Print the changes as JSON.
    #[arg(long)]
    pub json: bool,
    /// Wait for SIGTERM afterwards, which changes nothing: for the pod of a DaemonSet. Unfinished
    /// work is tried again.
    #[arg(long, conflicts_with = "dry_run")]
    pub stay: bool,
}

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

/// The OCI runtime that bindguard-runtime calls if its config names none.
pub const USUAL_RUNTIME: &str = "runc";

/// The options of the command line, with their defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallOptions {
    /// The folder in which services find the programs.
    pub prefix: PathBuf,
    /// Guard every container, not only containers that request the handler.
    pub default: bool,
    /// Keep containerd's own shim.
    pub wrapper: bool,
    /// The containerd program.
    pub containerd: Option<PathBuf>,
    /// containerd's main file, if the operator names it.
    pub containerd_config: Option<PathBuf>,
}
