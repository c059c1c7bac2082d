//! A file server that does not answer: a FUSE mount whose daemon is the story, which answers
//! nothing. fuse(4)

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A mount of such a server; gone when this is dropped.
#[derive(Debug)]
pub struct SilentServer {
    path: PathBuf,
    daemon: Option<File>,
}

impl SilentServer {
    /// Makes the directory and mounts a silent server.
    pub fn mounted(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
        let daemon = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .context("open /dev/fuse")?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            daemon.as_raw_fd()
        );
        mount(
            Some("silent"),
            path,
            Some("fuse"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .context("mount a FUSE")?;
        Ok(Self {
            path: path.to_owned(),
            daemon: Some(daemon),
        })
    }

    /// True if the machine supports FUSE.
    pub fn is_possible() -> bool {
        Path::new("/dev/fuse").exists()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The daemon takes a request, and from now on who waits for the answer cannot be ended.
    pub fn take_request(&mut self) -> Result<()> {
        ensure!(
            self.daemon
                .as_mut()
                .context("the daemon is dead")?
                .read(&mut [0; 8192])?
                > 0
        );
        Ok(())
    }

    /// The daemon dies; the mount stays.
    pub fn die(&mut self) {
        self.daemon = None;
    }
}

impl Drop for SilentServer {
    fn drop(&mut self) {
        self.die();
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}
