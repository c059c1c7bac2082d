//! A FUSE daemon that shows a folder at another place: bindfs(1), Debian package `bindfs`.
//!
//! For containers it is a CSI driver that mounts a volume by FUSE and can die.

use std::fs::File;
use std::path::Path;
use std::process::Child;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::mounts;
use crate::node::Node;
use crate::privilege::has_program;
use crate::waiting::until;

/// A running daemon. Drop kills the daemon, and leaves the dead mount.
#[derive(Debug)]
pub struct FuseDaemon(Child);

impl FuseDaemon {
    /// Why no daemon can run here, if so.
    pub fn missing() -> Option<&'static str> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        if device.is_err() {
            return Some("/dev/fuse cannot be opened");
        }
        (!has_program("bindfs")).then_some("no bindfs (Debian package bindfs)")
    }

    /// Shows a folder, which has a file `file`, at a place of the host.
    pub fn mounted(node: &Node, folder: &Path, place: &Path) -> Result<Self> {
        let mut command = node.command("bindfs")?;
        command.arg("-f").arg(folder).arg(place);
        let daemon = Self(command.spawn().context("start bindfs")?);
        until("bindfs has mounted", || {
            let top = mounts::on(place)?.pop();
            Ok(
                top.is_some_and(|mount| mount.filesystem.starts_with("fuse"))
                    && place.join("file").exists(),
            )
        })?;
        Ok(daemon)
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends the daemon a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.0.id().try_into()?);
        kill(pid, signal).with_context(|| format!("send {signal} to bindfs"))
    }
}

impl Drop for FuseDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
