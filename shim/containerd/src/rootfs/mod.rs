//! The container's root filesystem: the snapshotter's mounts, on `rootfs` in the bundle.
//!
//! Usually an overlay, sometimes id-mapped. A devmapper or erofs snapshotter uses block devices or
//! images, a lazy-pulling snapshotter a FUSE filesystem. Everything is mounted on a separate
//! thread, and a failure unmounts the earlier mounts. No mount or unmount reads the mount table:
//! with ten thousand mounts on a node the reading would be the main cost.

mod fuse;
mod id_map;
#[cfg(test)]
mod live;
mod loop_device;
mod mount_options;
mod overlay;
mod target;
mod unmount;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use containerd_shim_protos::types::mount::Mount;
use nix::mount::MsFlags;
use rustix::fs::StatVfsMountFlags;

use crate::blocking::run_blocking;
use crate::step::{StepError, failed};
use fuse::Fuse;
use id_map::MappedNamespace;
use loop_device::LoopDevice;
use mount_options::MountOptions;
use unmount::{unmount_all, unmount_and_remove};

/// The flags for access times.
const ATIME: MsFlags = MsFlags::MS_NOATIME
    .union(MsFlags::MS_NODIRATIME)
    .union(MsFlags::MS_RELATIME)
    .union(MsFlags::MS_STRICTATIME);
const OVERLAY: &str = "overlay";
/// Beside the root filesystem, and only during the mount.
const MAPPED_LAYERS: &str = "mapped-layers";

/// Mounts all in order; unmounts them again after a failure.
pub(crate) async fn mount(mounts: Vec<Mount>, rootfs: PathBuf) -> Result<(), StepError> {
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
pub(crate) async fn unmount(rootfs: PathBuf) -> Result<(), StepError> {
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
        target::resolve(rootfs, &mount.target).map_err(mount_failed("resolve the target of"))?;
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
        overlay::mount_with_long_options(&mount.type_, source, options.flags, data, target)
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
