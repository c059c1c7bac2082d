//! A FUSE daemon that shows a folder at a mount point: bindfs(1), or a program that CSI drivers
//! run.
//!
//! For containers it is a CSI driver that mounts a volume by FUSE and can die.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::mounts;
use crate::node::Node;
use crate::privilege::has_program;
use crate::s3_server::S3Server;
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

    /// Shows a folder, which has a file `file`, at a place of the host: bindfs.
    pub fn mounted(node: &Node, folder: &Path, place: &Path) -> Result<Self> {
        let mut command = node.command("bindfs")?;
        command.arg("-f").arg(folder).arg(place);
        Self::start(command, place)
    }

    /// As `mounted`: rclone with its backend for local folders.
    pub fn rclone(node: &Node, folder: &Path, place: &Path) -> Result<Self> {
        let mut command = node.command("rclone")?;
        command.args(["mount", "--config=/dev/null", "--allow-other"]);
        command
            .arg(format!(":local:{}", folder.display()))
            .arg(place);
        Self::start(command, place)
    }

    /// As `mounted`: sshfs with an SFTP server of its own, without a network.
    pub fn sshfs(node: &Node, folder: &Path, place: &Path) -> Result<Self> {
        // sshfs splits the command at spaces, and adds the words that ssh would need.
        let server = "ssh_command=sh -c exec${IFS}/usr/lib/openssh/sftp-server";
        let mut command = node.command("sshfs")?;
        command.args(["-f", "-o", "allow_other", "-o", server]);
        command.arg(format!("host:{}", folder.display())).arg(place);
        Self::start(command, place)
    }

    /// As `mounted`: s3fs with a bucket of a server.
    pub fn s3fs(node: &Node, server: &S3Server, bucket: &OsStr, place: &Path) -> Result<Self> {
        let mut command = node.command("s3fs")?;
        command.arg(bucket).arg(place);
        command.args(["-f", "-o", "allow_other,umask=0022,use_path_request_style"]);
        command.arg("-o").arg(format!("url={}", server.url()));
        command.envs(server.credentials());
        Self::start(command, place)
    }

    fn start(mut command: Command, place: &Path) -> Result<Self> {
        let daemon = Self(command.spawn().context("start a FUSE daemon")?);
        until("the FUSE daemon has mounted", || {
            let top = mounts::on(place)?.pop();
            Ok(
                top.is_some_and(|mount| mount.filesystem.starts_with("fuse"))
                    && place.join("file").exists(),
            )
        })?;
        Ok(daemon)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends the daemon a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.0.id().try_into()?);
        kill(pid, signal).with_context(|| format!("send {signal} to the FUSE daemon"))
    }
}

impl Drop for FuseDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
