//! Where a kubelet's root lies. The mount table shows the same volume with another root in each case, and every
//! published repair so far got one of them wrong (kubernetes#93691, #103836).

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::mount_calls::bind;
use crate::privilege::has_program;
use crate::process::host;

/// How the kubelet's root relates to the machine's filesystems.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KubeletRoot {
    /// A plain folder on the root disk.
    #[default]
    RootDisk,
    /// A filesystem of its own: ext4 on a loop device.
    OwnFilesystem,
    /// A folder of another place, bind-mounted.
    BindMounted,
    /// A symlink to another place.
    Symlinked,
}

impl KubeletRoot {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::RootDisk, Self::OwnFilesystem, Self::BindMounted, Self::Symlinked];

    /// Why this machine cannot have it, if so.
    pub(crate) fn unavailable(self) -> Option<String> {
        let missing = ["losetup", "mkfs.ext4"].into_iter().find(|program| !has_program(program));
        match self {
            Self::OwnFilesystem if !Path::new("/dev/loop-control").exists() => Some("no loop devices".into()),
            Self::OwnFilesystem => missing.map(|program| format!("no {program}")),
            Self::RootDisk | Self::BindMounted | Self::Symlinked => None,
        }
    }

    /// Makes it in the node's folder and returns the path that the kubelet is told.
    pub(super) fn lay_out(self, disk: &Path) -> Result<PathBuf> {
        let root = disk.join("kubelet");
        match self {
            Self::RootDisk => make(&root)?,
            Self::OwnFilesystem => {
                make(&root)?;
                mount_image(&disk.join("kubelet.img"), &root)?;
            }
            Self::BindMounted => {
                let place = disk.join("data/kubelet");
                make(&place)?;
                make(&root)?;
                bind(&place, &root)?;
            }
            Self::Symlinked => {
                let place = disk.join("data/kubelet");
                make(&place)?;
                symlink(&place, &root).with_context(|| format!("link {} to {}", root.display(), place.display()))?;
            }
        }
        Ok(root)
    }
}

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))
}

/// `mount -o loop` gives the device back by itself when the last mount of it goes.
fn mount_image(image: &Path, target: &Path) -> Result<()> {
    const SIZE: u64 = 64 << 20;
    let file = File::create(image).with_context(|| format!("create {}", image.display()))?;
    file.set_len(SIZE).with_context(|| format!("enlarge {}", image.display()))?;
    host(["mkfs.ext4".as_ref(), "-q".as_ref(), image.as_os_str()])?;
    host(["mount".as_ref(), "-o".as_ref(), "loop".as_ref(), image.as_os_str(), target.as_os_str()])?;
    Ok(())
}
