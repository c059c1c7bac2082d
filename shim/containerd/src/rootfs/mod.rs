//! The container's root filesystem: the snapshotter's mounts, on `rootfs` in the bundle.
//!
//! Usually an overlay, sometimes id-mapped. A devmapper or erofs snapshotter uses block devices or
//! images, a lazy-pulling snapshotter a FUSE filesystem. Everything is mounted on a separate
//! thread, and a failure unmounts the earlier mounts. No mount or unmount reads the mount table:
//! with ten thousand mounts on a node the reading would be the main cost.

#[cfg(test)]
mod live;
mod mount_options;
mod overlay;

use std::fs::{self, DirBuilder, File, OpenOptions, read_link};
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use bindguard_core::error_chain;
use containerd_shim_protos::types::mount::Mount;
use mount_options::MountOptions;
use nix::mount::MsFlags;
use overlay::{MappedNamespace, mount_with_long_options};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, ResolveFlags, StatVfsMountFlags, memfd_create, openat2,
};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount as unmount_once};

use crate::blocking::run_blocking;
use crate::kernel::{self, LoopMode, attach_loop_device, free_loop_device};
use crate::step::{StepError, failed};

/// The flags for access times.
const ATIME: MsFlags = MsFlags::MS_NOATIME
    .union(MsFlags::MS_NODIRATIME)
    .union(MsFlags::MS_RELATIME)
    .union(MsFlags::MS_STRICTATIME);
const OVERLAY: &str = "overlay";
/// Beside the root filesystem, and only during the mount.
const MAPPED_LAYERS: &str = "mapped-layers";

/// Mounts all in order; unmounts them again after a failure.
pub async fn mount(mounts: Vec<Mount>, rootfs: PathBuf) -> Result<(), StepError> {
    if mounts.is_empty() {
        return Ok(());
    }
    let step = format!("work on {} in a thread", rootfs.display());
    run_blocking(move || mount_all(&mounts, &rootfs))
        .await
        .map_err(failed(step))?
}

/// Unmounts everything on the mount point and removes the directory. A directory without a mount is
/// no error.
pub async fn unmount(rootfs: PathBuf) -> Result<(), StepError> {
    let step = format!("work on {} in a thread", rootfs.display());
    run_blocking(move || unmount_and_remove(&rootfs))
        .await
        .map_err(failed(step))?
}

fn mount_all(mounts: &[Mount], rootfs: &Path) -> Result<(), StepError> {
    make_directory(rootfs)?;
    for mount in mounts {
        if let Err(error) = mount_one(mount, rootfs) {
            if let Err(left) = unmount_all(rootfs) {
                tracing::warn!(
                    error = error_chain(&left),
                    "a half mounted root filesystem stays"
                );
            }
            return Err(error);
        }
    }
    Ok(())
}

fn make_directory(path: &Path) -> Result<(), StepError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(path)
        .map_err(failed(format!("make the mount point {}", path.display())))
}

fn mount_one(mount: &Mount, rootfs: &Path) -> Result<(), StepError> {
    let mount_failed = |step: &'static str| {
        move |source: io::Error| {
            failed(format!(
                "failed to mount rootfs component: {step} {} {} on {}",
                mount.type_,
                mount.source,
                rootfs.join(mount.target.trim_start_matches('/')).display()
            ))(source)
        }
    };
    let target =
        resolve_target(rootfs, &mount.target).map_err(mount_failed("resolve the target of"))?;
    if let Some(fuse) = Fuse::of_type(&mount.type_) {
        return fuse.mount(mount, &target).map_err(mount_failed("mount"));
    }
    let options =
        MountOptions::parse(&mount.options).map_err(failed(format!("mount {}", mount.source)))?;
    let id_map = options
        .id_map
        .as_ref()
        .map(|(users, groups)| MappedNamespace::new(users, groups));
    let id_map = id_map.transpose().map_err(mount_failed("map the ids of"))?;

    if !options.is_remount_only() {
        mount_itself(mount, rootfs, &target, &options, id_map.as_ref())
            .map_err(mount_failed("mount"))?;
    }
    if !options.propagation.is_empty() {
        call(None, &target, None, options.propagation, None)
            .map_err(mount_failed("change the propagation of"))?;
    }
    // For a new bind the kernel ignores all further flags: read-only needs a second call.
    let read_only_bind = MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    if options.flags.contains(read_only_bind) {
        remount(&target, options.flags).map_err(mount_failed("make read-only"))?;
    }
    match id_map.filter(|_| mount.type_ != OVERLAY) {
        Some(map) => map.apply(&target).map_err(mount_failed("map the ids of")),
        None => Ok(()),
    }
}

/// mount(2), with its preparations: a loop device, or layers with mapped ids.
fn mount_itself(
    mount: &Mount,
    rootfs: &Path,
    target: &Path,
    options: &MountOptions,
    id_map: Option<&MappedNamespace>,
) -> io::Result<()> {
    let source = Path::new(&mount.source);
    let device = options
        .loop_device
        .map(|mode| LoopDevice::attach(source, mode))
        .transpose()?;
    let source = device.as_ref().map_or(source, |device| &device.path);
    let mount_with = |data: &[String]| {
        mount_with_long_options(&mount.type_, source, options.flags, data, target)
    };
    match id_map.filter(|_| mount.type_ == OVERLAY) {
        None => mount_with(&options.data),
        Some(map) => {
            let (_until_it_is_mounted, data) =
                map.layers(&options.data, rootfs.with_file_name(MAPPED_LAYERS))?;
            mount_with(&data)
        }
    }
}

/// Gives a bind its flags. In a user namespace the flags of a mount from outside are locked, see
/// mount_namespaces(7): the kernel refuses a call that leaves out a locked flag. Then the locked
/// flags are kept, and so is the mount's atime mode, which the kernel keeps when the call has no
/// atime flag.
fn remount(target: &Path, flags: MsFlags) -> io::Result<()> {
    match call(None, target, None, flags | MsFlags::MS_REMOUNT, None) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let kept = lockable_flags(target)? | flags.difference(ATIME);
            call(None, target, None, kept | MsFlags::MS_REMOUNT, None)
        }
        done => done,
    }
}

fn lockable_flags(target: &Path) -> io::Result<MsFlags> {
    let has = rustix::fs::statvfs(target)?.f_flag;
    let lockable = [
        (StatVfsMountFlags::RDONLY, MsFlags::MS_RDONLY),
        (StatVfsMountFlags::NOSUID, MsFlags::MS_NOSUID),
        (StatVfsMountFlags::NODEV, MsFlags::MS_NODEV),
        (StatVfsMountFlags::NOEXEC, MsFlags::MS_NOEXEC),
    ];
    Ok(lockable
        .into_iter()
        .filter(|(flag, _)| has.contains(*flag))
        .map(|(_, flag)| flag)
        .collect())
}

/// mount(2).
fn call(
    source: Option<&Path>,
    target: &Path,
    kind: Option<&str>,
    flags: MsFlags,
    data: Option<&str>,
) -> io::Result<()> {
    Ok(nix::mount::mount(source, target, kind, flags, data)?)
}

// Unmounts a root filesystem, without reading the mount table.

/// The number of attempts to unmount a busy root filesystem before it is only detached.
const BUSY_TRIES: u32 = 10;
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Unmounts, and removes the mount point. If a bundle still has one, containerd 2 reads the node's
/// whole mount table before it removes the bundle, see `UnmountRecursive` in its `mount` package.
pub fn unmount_and_remove(rootfs: &Path) -> Result<(), StepError> {
    unmount_all(rootfs)?;
    // A directory with files in it is not only a mount point, and stays.
    let _ = fs::remove_dir(rootfs);
    Ok(())
}

/// Unmounts until nothing is mounted there; a filesystem that stays busy is only detached.
pub fn unmount_all(rootfs: &Path) -> Result<(), StepError> {
    let mut busy = 0;
    loop {
        let lazy = if busy > BUSY_TRIES {
            UnmountFlags::DETACH
        } else {
            UnmountFlags::empty()
        };
        match unmount_once(rootfs, lazy | UnmountFlags::NOFOLLOW) {
            // There may be a further mount underneath.
            Ok(()) => {}
            // EINVAL: nothing is mounted on the root filesystem's path.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(Errno::BUSY) if busy <= BUSY_TRIES => {
                busy += 1;
                thread::sleep(BUSY_PAUSE);
            }
            Err(errno) => return Err(failed(format!("unmount {}", rootfs.display()))(errno)),
        }
    }
}

// The place of a mount's `target` below the root filesystem.
//
// The image provides the files there, and may contain a symlink `/data -> /etc`. The kernel
// resolves the target as if the root filesystem were `/` (openat2(2), RESOLVE_IN_ROOT), so no link
// leads out of it.

/// The path to mount on. It must exist, as for mount(2).
fn resolve_target(rootfs: &Path, target: &str) -> io::Result<PathBuf> {
    if target.trim_matches('/').is_empty() {
        return Ok(rootfs.to_owned());
    }
    let root = File::open(rootfs)?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let target_fd = openat2(&root, target, flags, Mode::empty(), ResolveFlags::IN_ROOT)?;
    read_link(format!("/proc/self/fd/{}", target_fd.as_raw_fd()))
}

// The `loop` option: a file with a filesystem becomes a block device while it is mounted.
//
// The kernel names a free device, but does not reserve the device: the first process that attaches
// gets the device. After EBUSY the shim requests a new device. The device detaches the file by
// itself after its last user (LO_FLAGS_AUTOCLEAR). The open descriptor is a user: the shim closes
// the descriptor after the filesystem is mounted.

const CONTROL: &str = "/dev/loop-control";
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

/// An attached device.
#[derive(Debug)]
struct LoopDevice {
    /// The device to mount.
    pub path: PathBuf,
    _until_it_is_mounted: File,
}

impl LoopDevice {
    /// Attaches a file.
    pub fn attach(file: &Path, mode: LoopMode) -> io::Result<Self> {
        let control = open(Path::new(CONTROL), true)?;
        let file = open(file, !mode.read_only)?;
        for _ in 0..TRIES {
            let path = PathBuf::from(format!("/dev/loop{}", free_loop_device(&control)?));
            let device = open(&path, !mode.read_only)?;
            match attach_loop_device(&device, &file, mode) {
                Ok(()) => {
                    return Ok(Self {
                        path,
                        _until_it_is_mounted: device,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(PAUSE),
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "others were faster with every free loop device",
        ))
    }
}

fn open(path: &Path, writable: bool) -> io::Result<File> {
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("open {}: {error}", path.display()))
    };
    OpenOptions::new()
        .read(true)
        .write(writable)
        .open(path)
        .map_err(named)
}

// Filesystems of a user-space program: `fuse.NAME` and `fuse3.NAME`, through mount.fuse(8).
//
// The helper starts the program NAME, which goes into the background after it has mounted, and
// stays there until it is unmounted. Its output goes to a memory file: a pipe would stay open as
// long as the filesystem is mounted.

/// The limit of output that is kept for the error.
const MAX_MESSAGE: u64 = 2048;

/// A FUSE mount.
#[derive(Debug, PartialEq, Eq)]
struct Fuse<'a> {
    helper: &'static str,
    program: &'a str,
}

impl<'a> Fuse<'a> {
    /// The FUSE mount of this filesystem type; `None` if the type is not FUSE.
    fn of_type(kind: &'a str) -> Option<Self> {
        let helpers = [("fuse.", "mount.fuse"), ("fuse3.", "mount.fuse3")];
        helpers.into_iter().find_map(|(prefix, helper)| {
            Some(Self {
                helper,
                program: kind.strip_prefix(prefix)?,
            })
        })
    }

    /// `mount.fuse3 SOURCE TARGET -o OPTION... -t PROGRAM`; the helper sorts the options.
    pub fn mount(&self, mount: &Mount, target: &Path) -> io::Result<()> {
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
    use std::fs::create_dir;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_in_the_image_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let rootfs = dir.path().join("rootfs");
        create_dir(&rootfs).unwrap();
        create_dir(rootfs.join("etc")).unwrap();
        symlink("/etc", rootfs.join("data")).unwrap();
        symlink("../../..", rootfs.join("up")).unwrap();
        assert_eq!(
            resolve_target(&rootfs, "/data").unwrap(),
            rootfs.join("etc")
        );
        assert_eq!(
            resolve_target(&rootfs, "up/etc").unwrap(),
            rootfs.join("etc")
        );
        assert_eq!(resolve_target(&rootfs, "/").unwrap(), rootfs);
        assert!(resolve_target(&rootfs, "missing").is_err());
    }

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
