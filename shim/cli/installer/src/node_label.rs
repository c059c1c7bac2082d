//! `--node-label`, `--node-feature`: the label of this node in the cluster. The node has the label
//! while its runtime starts pods of the handler, and a RuntimeClass selects labelled nodes alone. The
//! label goes before a removal begins.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bindguard_core::program_names::RUNTIME;
use bindguard_operator::terminal::print_remark;
use bindguard_sys::write_new_file;

use crate::helper::{Helper, reason};
use crate::running::has_handler;

/// The line of node-feature-discovery's file, which is the label.
const FEATURE: &str = "feature.node.kubernetes.io/bindguard=true\n";

#[derive(Debug)]
enum Way {
    /// A helper that patches the node.
    Helper(Helper),
    /// A file that node-feature-discovery reads.
    Feature(PathBuf),
}

/// The label of this node.
#[derive(Debug)]
pub struct NodeLabel {
    way: Way,
    /// `None` until this process has set or removed the label.
    is_set: Option<bool>,
}

impl NodeLabel {
    /// Starts the helper: before the root changes.
    pub fn by_helper(line: &str) -> Result<Self> {
        Ok(Self {
            way: Way::Helper(Helper::start(line)?),
            is_set: None,
        })
    }

    /// A label by this file.
    pub fn by_feature(file: &Path) -> Self {
        Self {
            way: Way::Feature(file.to_owned()),
            is_set: None,
        }
    }

    /// Sets or removes the label by the running daemon's active configuration, and by a sandbox before
    /// the label is set. A daemon that starts or does not answer changes nothing.
    pub fn follow(&mut self, try_sandbox: impl FnOnce() -> Result<()>) {
        let followed = match has_handler() {
            None => Ok(()),
            Some(false) => self.set(false),
            Some(true) if self.is_set == Some(true) => Ok(()),
            Some(true) => match try_sandbox() {
                Ok(()) => self.set(true),
                Err(error) => self.set(false).and(Err(error)),
            },
        };
        if let Err(error) = followed {
            print_remark(format_args!("this node is not labelled: {error:#}"));
        }
    }

    /// Removes the label.
    pub fn remove(&mut self) -> Result<()> {
        self.set(false)
    }

    fn set(&mut self, is_active: bool) -> Result<()> {
        if self.is_set == Some(is_active) {
            return Ok(());
        }
        let doing = if is_active { "set" } else { "remove" };
        let done = match &mut self.way {
            Way::Helper(helper) => helper.answer(doing).and_then(|answer| match &*answer {
                "ok" => Ok(()),
                other => bail!("{}", reason(other)),
            }),
            Way::Feature(file) => write_feature(file, is_active),
        };
        done.with_context(|| format!("{doing} the node's label for the handler {RUNTIME}"))?;
        self.is_set = Some(is_active);
        Ok(())
    }
}

fn write_feature(file: &Path, is_active: bool) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", file.display()));
        }
        Ok(()) | Err(_) => {}
    }
    if is_active {
        write_new_file(file, FEATURE.as_bytes(), 0o644)
            .with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}
