//! The options of both verbs.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::restart_slot::RestartSlot;

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
    /// Print the changes as JSON.
    #[arg(long)]
    pub json: bool,
    /// Wait for SIGTERM afterwards, which changes nothing: for the pod of a DaemonSet. Unfinished
    /// work is tried again.
    #[arg(long, conflicts_with = "dry_run")]
    pub stay: bool,
}

impl CommonOptions {
    /// Starts the command that grants slots, if one is named.
    pub fn start_slot(&self) -> Result<Option<RestartSlot>> {
        let line = self.restart_slot.as_deref().filter(|_| !self.dry_run);
        line.map(RestartSlot::start).transpose()
    }
}
