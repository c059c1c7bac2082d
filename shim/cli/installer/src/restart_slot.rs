//! `--restart-slot`: permission to restart this node's runtime, from a helper that coordinates the
//! nodes. A node without an answer does not restart.

use anyhow::{Result, bail};

use crate::helper::{Helper, reason};

/// The slot of this node.
#[derive(Debug)]
pub struct RestartSlot {
    helper: Helper,
    /// False until this process knows that the node has no slot.
    is_freed: bool,
}

impl RestartSlot {
    /// Starts the helper: before the root changes.
    pub fn start(line: &str) -> Result<Self> {
        Ok(Self {
            helper: Helper::start(line)?,
            is_freed: false,
        })
    }

    /// Takes a slot. Returns why there is none.
    pub fn take(&mut self) -> Result<Option<String>> {
        self.is_freed = false;
        let answer = self.helper.answer("take")?;
        Ok((answer != "granted").then(|| reason(&answer)))
    }

    /// Frees the slot. Returns why it is not free.
    pub fn free(&mut self) -> Result<Option<String>> {
        if self.is_freed {
            return Ok(None);
        }
        let answer = self.helper.answer("done")?;
        self.is_freed = answer == "ok";
        Ok((!self.is_freed).then(|| reason(&answer)))
    }

    /// Keeps the slot, and marks it.
    pub fn fail(&mut self) -> Result<()> {
        let answer = self.helper.answer("failed")?;
        if answer == "ok" {
            Ok(())
        } else {
            bail!("mark the restart slot: {}", reason(&answer))
        }
    }
}
