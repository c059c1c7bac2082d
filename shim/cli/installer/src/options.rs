//! The options of both verbs.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::node_label::NodeLabel;
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

impl CommonOptions {
    /// Starts the command that grants slots, if one is named.
    pub fn start_slot(&self) -> Result<Option<RestartSlot>> {
        let line = self.restart_slot.as_deref().filter(|_| !self.dry_run);
        line.map(RestartSlot::start).transpose()
    }

    /// Starts the command that labels the node, if one is named.
    pub fn start_label(&self) -> Result<Option<NodeLabel>> {
        let by_feature = self.node_feature.as_deref().map(NodeLabel::by_feature);
        match &self.node_label {
            _ if self.dry_run => Ok(None),
            Some(line) => NodeLabel::by_helper(line).map(Some),
            None => Ok(by_feature),
        }
    }
}
