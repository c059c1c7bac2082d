//! The places of a kubelet's root. The mount table shows a different root of a volume in each case,
//! and every published repair so far failed in some case (kubernetes#93691, #103836).

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::mount_calls::{bind, own_copy, tmpfs};
use crate::privilege::has_program;
use crate::process::host;

/// xfs and btrfs have smallest sizes, of some hundred MiB; the file is sparse.
const IMAGE: u64 = 512 << 20;

/// The relation of a kubelet's root to the machine's filesystems.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KubeletRoot {
    /// A plain folder on the root disk.
    #[default]
    RootDisk,
    /// A filesystem of its own: ext4 on a loop device.
    OwnFilesystem,
    Xfs,
    /// A subvolume of a btrfs, with a second subvolume for the pods: files of a single mount then
    /// have several `st_dev`.
    BtrfsSubvolume,
    /// An overlay of two folders, as on hosts with a read-only root.
    Overlay,
    /// Memory, as on nodes that boot from the network.
    Tmpfs,
    /// A bind mount of a folder elsewhere.
    BindMounted,
    /// A symlink to a folder elsewhere.
    Symlinked,
    /// As in a node that is a container itself (kind, k3d): its root an overlay, its /var a volume
    /// of the engine's, and the kubelet's root in that a bind of a folder of the machine
    /// (`extraMounts`).
    InAContainer,
    /// The kubelet's default, `/var/lib/kubelet`, in a copy of the machine's `/var/lib`: a picture
    /// shows the paths that a reader has.
    VarLib,
}

impl KubeletRoot {
    /// Every kind of place.
    pub const ALL: [Self; 9] = [
        Self::RootDisk,
        Self::OwnFilesystem,
        Self::Xfs,
        Self::BtrfsSubvolume,
        Self::Overlay,
        Self::Tmpfs,
        Self::BindMounted,
        Self::Symlinked,
        Self::InAContainer,
    ];

    /// The reason why this machine cannot have the root; `None` if it can.
    pub(crate) fn unavailable(self) -> Option<String> {
        let filesystem = self.filesystem()?;
        let loop_device = || {
            let programs = ["losetup".to_owned(), format!("mkfs.{filesystem}")];
            let missing = programs.iter().find(|program| !has_program(program));
            match Path::new("/dev/loop-control").exists() {
                true => missing.map(|program| format!("no {program}")),
                false => Some("no loop devices".to_owned()),
            }
        };
        let in_kernel =
            (!kernel_has(filesystem)).then(|| format!("this kernel has no {filesystem}"));
        in_kernel.or_else(|| self.is_an_image().then(loop_device).flatten())
    }

    /// The type of the filesystem that is made for it.
    fn filesystem(self) -> Option<&'static str> {
        match self {
            Self::OwnFilesystem => Some("ext4"),
            Self::Xfs => Some("xfs"),
            Self::BtrfsSubvolume => Some("btrfs"),
            Self::Overlay | Self::InAContainer => Some("overlay"),
            Self::Tmpfs => Some("tmpfs"),
            Self::RootDisk | Self::BindMounted | Self::Symlinked | Self::VarLib => None,
        }
    }

    fn is_an_image(self) -> bool {
        matches!(self, Self::OwnFilesystem | Self::Xfs | Self::BtrfsSubvolume)
    }

    /// Makes it in the node's folder and returns the path for the kubelet's `--root-dir`.
    pub(super) fn lay_out(self, disk: &Path) -> Result<PathBuf> {
        let root = disk.join("kubelet");
        match self {
            Self::RootDisk => make(&root)?,
            Self::OwnFilesystem | Self::Xfs => {
                make(&root)?;
                mount_image(
                    self.filesystem().unwrap_or_default(),
                    &disk.join("kubelet.img"),
                    &root,
                )?;
            }
            Self::BtrfsSubvolume => {
                let top = disk.join("btrfs");
                make(&top)?;
                make(&root)?;
                mount_image("btrfs", &disk.join("kubelet.img"), &top)?;
                subvolume(&top.join("kubelet"))?;
                bind(top.join("kubelet"), &root)?;
                subvolume(&root.join("pods"))?;
            }
            Self::Overlay => {
                make(&root)?;
                mount_overlay(&disk.join("overlay"), &root)?;
            }
            Self::Tmpfs => {
                make(&root)?;
                tmpfs(&root, "mode=755")?;
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
                symlink(&place, &root)
                    .with_context(|| format!("link {} to {}", root.display(), place.display()))?;
            }
            Self::InAContainer => {
                let (node, volume, extra) = (
                    disk.join("node"),
                    disk.join("volumes/5f0c/_data"),
                    disk.join("extra"),
                );
                make(&node)?;
                mount_overlay(&disk.join("overlay"), &node)?;
                let root = node.join("var/lib/kubelet");
                bind_as_an_engine(&volume, &node.join("var"))?;
                bind_as_an_engine(&extra, &root)?;
                return Ok(root);
            }
            Self::VarLib => {
                own_copy("/var/lib", Path::new("/run/own/var/lib"))?;
                let default = PathBuf::from("/var/lib/kubelet");
                make(&root)?;
                make(&default)?;
                bind(&root, &default)?;
                return Ok(default);
            }
        }
        Ok(root)
    }
}

/// An engine's binds are private; the node's first process makes them shared, each a peer group of
/// its own.
fn bind_as_an_engine(from: &Path, to: &Path) -> Result<()> {
    [from, to].into_iter().try_for_each(make)?;
    bind(from, to)?;
    let to = to.display().to_string();
    ["--make-private", "--make-shared"]
        .into_iter()
        .try_for_each(|way| host(["mount", way, &to]).map(drop))
}

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))
}

/// True if the kernel knows a filesystem, or has a module for it.
fn kernel_has(filesystem: &str) -> bool {
    let knows = || {
        let all = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        all.lines()
            .any(|line| line.split_whitespace().last() == Some(filesystem))
    };
    knows() || host(["modprobe", filesystem]).is_ok() && knows()
}

fn subvolume(path: &Path) -> Result<()> {
    host([
        "btrfs".as_ref(),
        "-q".as_ref(),
        "subvolume".as_ref(),
        "create".as_ref(),
        path.as_os_str(),
    ])
    .map(drop)
}

fn mount_overlay(folders: &Path, target: &Path) -> Result<()> {
    for folder in ["lower", "upper", "work"] {
        make(&folders.join(folder))?;
    }
    let at = folders.display();
    let options = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work");
    host([
        "mount",
        "-t",
        "overlay",
        "-o",
        &options,
        "overlay",
        &target.display().to_string(),
    ])
    .map(drop)
}

/// `mount -o loop` gives the device back by itself when the last mount of it goes.
fn mount_image(filesystem: &str, image: &Path, target: &Path) -> Result<()> {
    let file = File::create(image).with_context(|| format!("create {}", image.display()))?;
    file.set_len(IMAGE)
        .with_context(|| format!("enlarge {}", image.display()))?;
    host([
        format!("mkfs.{filesystem}").as_ref(),
        "-q".as_ref(),
        image.as_os_str(),
    ])?;
    host([
        "mount".as_ref(),
        "-o".as_ref(),
        "loop".as_ref(),
        image.as_os_str(),
        target.as_os_str(),
    ])?;
    Ok(())
}
