//! Filesystems of a user-space program: `fuse.NAME` and `fuse3.NAME`, through mount.fuse(8).
//!
//! The helper starts the program NAME, which goes into the background after it has mounted, and
//! stays there until it is unmounted. Its output goes to a memory file: a pipe would stay open as
//! long as the filesystem is mounted.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;
use std::process::{Command, Stdio};

use containerd_shim_protos::types::mount::Mount;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::kernel;

/// The limit of output that is kept for the error.
const MAX_MESSAGE: u64 = 2048;

/// A FUSE mount.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fuse<'a> {
    helper: &'static str,
    program: &'a str,
}

impl<'a> Fuse<'a> {
    /// The FUSE mount of this filesystem type; `None` if the type is not FUSE.
    pub(super) fn of_type(kind: &'a str) -> Option<Self> {
        let helpers = [("fuse.", "mount.fuse"), ("fuse3.", "mount.fuse3")];
        helpers.into_iter().find_map(|(prefix, helper)| {
            Some(Self {
                helper,
                program: kind.strip_prefix(prefix)?,
            })
        })
    }

    /// `mount.fuse3 SOURCE TARGET -o OPTION... -t PROGRAM`; the helper sorts the options.
    pub(super) fn mount(&self, mount: &Mount, target: &Path) -> io::Result<()> {
        let mut output = File::from(memfd_create("mount-helper-output", MemfdFlags::CLOEXEC)?);
        let mut command = Command::new(self.helper);
        command
            .arg(&mount.source)
            .arg(target)
            .args(mount.options.iter().flat_map(|option| ["-o", option]));
        command
            .args(["-t", self.program])
            .current_dir("/")
            .stdin(Stdio::null());
        command
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?);
        kernel::with_default_signals(&mut command);
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", self.helper));
        let status = command.status().map_err(named)?;
        if status.success() {
            return Ok(());
        }
        let mut message = Vec::new();
        output.rewind()?;
        output.take(MAX_MESSAGE).read_to_end(&mut message)?;
        let message = String::from_utf8_lossy(&message).trim().replace('\n', "; ");
        Err(io::Error::other(format!(
            "{} {}: {status}: {message}",
            self.helper, self.program
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_names_helper_and_program() {
        assert_eq!(
            Fuse::of_type("fuse3.bindfs"),
            Some(Fuse {
                helper: "mount.fuse3",
                program: "bindfs"
            })
        );
        assert_eq!(
            Fuse::of_type("fuse.sshfs"),
            Some(Fuse {
                helper: "mount.fuse",
                program: "sshfs"
            })
        );
        for other in ["fuse", "fuseblk", "overlay"] {
            assert_eq!(Fuse::of_type(other), None);
        }
    }
}
