//! The container's root filesystem: the snapshotter's mounts, on `rootfs` in the bundle.
//!
//! Usually an overlay, sometimes id-mapped. A devmapper or erofs snapshotter uses block devices or
//! images, a lazy-pulling snapshotter a FUSE filesystem. Everything is mounted on a separate
//! thread, and a failure unmounts the earlier mounts. No mount or unmount reads the mount table:
//! with ten thousand mounts on a node the reading would be the main cost.
//!
//! fstab's options are converted for mount(2): flags, propagation and the rest for the filesystem
//! itself. Three options need more than mount(2), as with mount(8): `loop`, and the pair `uidmap=` and
//! `gidmap=`. The table is mount(8)'s. A change of propagation needs a separate call, see mount(2),
//! so it is kept separately.
//!
//! Overlays with very many layers, and id-mapped mounts: `uidmap=0:100000:65536` and `gidmap=…`,
//! which containerd sends for containers in a user namespace.
//!
//! ```text
//!   child in a new user namespace ── /proc/PID/uid_map, gid_map ── /proc/PID/ns/user ──► fd, the child is killed
//!   open_tree(CLONE) ── mount_setattr(IDMAP, fd) ── move_mount
//! ```
//! The kernel accepts a mapping only as a user namespace, and only for a detached mount. So a clone
//! is mapped and attached. An overlay cannot be mapped itself; its lower directories are. Their
//! common parent is cloned, mapped and mounted beside the root filesystem until the overlay, which
//! keeps references, is mounted. See mount_setattr(2), "ID-mapped mounts", and user_namespaces(7).

#[cfg(test)]
mod live;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_sys::{make_folders, map_ids};
use containerd_shim_protos::types::mount::Mount;
use nix::mount::MsFlags;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{
    CWD, MemfdFlags, Mode, OFlags, ResolveFlags, StatVfsMountFlags, memfd_create, openat2,
};
use rustix::io::Errno;
use rustix::mount::{
    MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount as unmount_once,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::kernel::{self, LoopMode, attach_loop_device, free_loop_device};
use crate::work::run_blocking;
use crate::work::{Result, failed};

/// The flags for access times.
const ATIME: MsFlags = MsFlags::MS_NOATIME
    .union(MsFlags::MS_NODIRATIME)
    .union(MsFlags::MS_RELATIME)
    .union(MsFlags::MS_STRICTATIME);
const OVERLAY: &str = "overlay";
/// Beside the root filesystem, and only during the mount.
const MAPPED_LAYERS: &str = "mapped-layers";

/// The number of attempts to unmount a busy root filesystem before it is only detached.
const BUSY_TRIES: u32 = 10;
const BUSY_PAUSE: Duration = Duration::from_millis(20);

const LOOP_CONTROL: &str = "/dev/loop-control";
const LOOP_TRIES: u32 = 100;
const LOOP_PAUSE: Duration = Duration::from_millis(5);

/// The limit of a FUSE program's output that is kept for the error.
const MAX_MESSAGE: u64 = 2048;

/// Mounts all in order; unmounts them again after a failure.
pub async fn mount(mounts: Vec<Mount>, rootfs: PathBuf) -> Result<()> {
    if mounts.is_empty() {
        return Ok(());
    }
    in_thread(rootfs, move |rootfs| mount_all(&mounts, rootfs)).await
}

/// Unmounts everything on the mount point and removes the directory. A directory without a mount is
/// no error.
pub async fn unmount(rootfs: PathBuf) -> Result<()> {
    in_thread(rootfs, unmount_and_remove).await
}

async fn in_thread(
    rootfs: PathBuf,
    work: impl FnOnce(&Path) -> Result<()> + Send + 'static,
) -> Result<()> {
    let step = format!("work on {} in a thread", rootfs.display());
    run_blocking(move || work(&rootfs))
        .await
        .map_err(failed(step))?
}

fn mount_all(mounts: &[Mount], rootfs: &Path) -> Result<()> {
    make_folders(rootfs, 0o711)
        .map_err(failed(format!("make the mount point {}", rootfs.display())))?;
    for mount in mounts {
        mount_one(mount, rootfs).inspect_err(|_| {
            if let Err(left) = unmount_all(rootfs) {
                log::warn!(error:% = error_chain(&left); "a half mounted root filesystem stays");
            }
        })?;
    }
    Ok(())
}

fn mount_one(mount: &Mount, rootfs: &Path) -> Result<()> {
    let place = rootfs.join(mount.target.trim_start_matches('/'));
    let mount_failed = |step| {
        failed::<io::Error>(format!(
            "failed to mount rootfs component: {step} {} {} on {}",
            mount.type_,
            mount.source,
            place.display()
        ))
    };
    let target =
        resolve_target(rootfs, &mount.target).map_err(mount_failed("resolve the target of"))?;
    if let Some(programs) = fuse_programs(&mount.type_) {
        return mount_by_fuse(programs, mount, &target).map_err(mount_failed("mount"));
    }
    let options =
        MountOptions::parse(&mount.options).map_err(failed(format!("mount {}", mount.source)))?;
    let mut id_map = None;
    if let Some((users, groups)) = &options.id_map {
        let map = MappedNamespace::new(users, groups).map_err(mount_failed("map the ids of"))?;
        id_map = Some(map);
    }

    // A remount without data changes flags only, and those are applied by the calls that follow.
    if !options.flags.contains(MsFlags::MS_REMOUNT) || !options.data.is_empty() {
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

/// The path of a mount's `target` below the root filesystem. It must exist, as for mount(2).
///
/// The image provides the files there, and may contain a symlink `/data -> /etc`. The kernel
/// resolves the target as if the root filesystem were `/` (openat2(2), RESOLVE_IN_ROOT), so no link
/// leads out of it.
fn resolve_target(rootfs: &Path, target: &str) -> io::Result<PathBuf> {
    if target.trim_matches('/').is_empty() {
        return Ok(rootfs.to_owned());
    }
    let root = File::open(rootfs)?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let target_fd = openat2(&root, target, flags, Mode::empty(), ResolveFlags::IN_ROOT)?;
    fs::read_link(format!("/proc/self/fd/{}", target_fd.as_raw_fd()))
}

/// mount(2), with its preparations: a loop device, or layers with mapped ids.
fn mount_itself(
    mount: &Mount,
    rootfs: &Path,
    target: &Path,
    options: &MountOptions,
    id_map: Option<&MappedNamespace>,
) -> io::Result<()> {
    let mut source = PathBuf::from(&mount.source);
    // Both are held until the filesystem is mounted.
    let _device;
    let _layers;
    if let Some(mode) = options.loop_device {
        (source, _device) = attach_to_loop_device(&source, mode)?;
    }
    let mut data = options.data.clone();
    if let Some(map) = id_map
        && mount.type_ == OVERLAY
    {
        (_layers, data) = map.layers(&data, rootfs.with_file_name(MAPPED_LAYERS))?;
    }
    mount_with_long_options(&mount.type_, &source, options.flags, &data, target)
}

/// Gives a bind its flags. In a user namespace the flags of a mount from outside are locked, see
/// mount_namespaces(7): the kernel refuses a call that leaves out a locked flag. Then the locked
/// flags are kept, and so is the mount's atime mode, which the kernel keeps when the call has no
/// atime flag.
fn remount(target: &Path, flags: MsFlags) -> io::Result<()> {
    let done = call(None, target, None, flags | MsFlags::MS_REMOUNT, None);
    if !matches!(&done, Err(error) if error.kind() == io::ErrorKind::PermissionDenied) {
        return done;
    }
    let has = rustix::fs::statvfs(target)?.f_flag;
    let mut kept = flags.difference(ATIME);
    for (flag, lockable) in [
        (StatVfsMountFlags::RDONLY, MsFlags::MS_RDONLY),
        (StatVfsMountFlags::NOSUID, MsFlags::MS_NOSUID),
        (StatVfsMountFlags::NODEV, MsFlags::MS_NODEV),
        (StatVfsMountFlags::NOEXEC, MsFlags::MS_NOEXEC),
    ] {
        if has.contains(flag) {
            kept |= lockable;
        }
    }
    call(None, target, None, kept | MsFlags::MS_REMOUNT, None)
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

/// Unmounts, and removes the mount point. If a bundle still has one, containerd 2 reads the node's
/// whole mount table before it removes the bundle, see `UnmountRecursive` in its `mount` package.
fn unmount_and_remove(rootfs: &Path) -> Result<()> {
    unmount_all(rootfs)?;
    // A directory with files in it is not only a mount point, and stays.
    let _ = fs::remove_dir(rootfs);
    Ok(())
}

/// Unmounts until nothing is mounted there; a filesystem that stays busy is only detached.
fn unmount_all(rootfs: &Path) -> Result<()> {
    let mut busy = 0;
    loop {
        let mut flags = UnmountFlags::NOFOLLOW;
        if busy > BUSY_TRIES {
            flags |= UnmountFlags::DETACH;
        }
        match unmount_once(rootfs, flags) {
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

/// The `loop` option: a file with a filesystem becomes a block device while it is mounted. Returns
/// the device's path, and the device, which must stay open until it is mounted.
///
/// The kernel names a free device, but does not reserve the device: the first process that attaches
/// gets the device. After EBUSY the shim requests a new device. The device detaches the file by
/// itself after its last user (LO_FLAGS_AUTOCLEAR). The open descriptor is a user: the shim closes
/// the descriptor after the filesystem is mounted.
fn attach_to_loop_device(file: &Path, mode: LoopMode) -> io::Result<(PathBuf, File)> {
    let control = open(Path::new(LOOP_CONTROL), true)?;
    let file = open(file, !mode.read_only)?;
    for _ in 0..LOOP_TRIES {
        let path = PathBuf::from(format!("/dev/loop{}", free_loop_device(&control)?));
        let device = open(&path, !mode.read_only)?;
        match attach_loop_device(&device, &file, mode) {
            Ok(()) => return Ok((path, device)),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                thread::sleep(LOOP_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
    let why = "others were faster with every free loop device";
    Err(io::Error::new(io::ErrorKind::ResourceBusy, why))
}

fn open(path: &Path, writable: bool) -> io::Result<File> {
    let opened = OpenOptions::new().read(true).write(writable).open(path);
    opened
        .map_err(|error| io::Error::new(error.kind(), format!("open {}: {error}", path.display())))
}

/// The mount of a user-space program's filesystem: `fuse.NAME` and `fuse3.NAME`, through
/// mount.fuse(8).
///
/// The helper starts the program NAME, which goes into the background after it has mounted, and
/// stays there until it is unmounted. Its output goes to a memory file: a pipe would stay open as
/// long as the filesystem is mounted.
fn mount_by_fuse((helper, program): (&str, &str), mount: &Mount, target: &Path) -> io::Result<()> {
    // `mount.fuse3 SOURCE TARGET -o OPTION... -t PROGRAM`; the helper sorts the options.
    let mut output = File::from(memfd_create("mount-helper-output", MemfdFlags::CLOEXEC)?);
    let mut command = Command::new(helper);
    command.arg(&mount.source).arg(target);
    for option in &mount.options {
        command.args(["-o", option]);
    }
    command
        .args(["-t", program])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?);
    kernel::with_default_signals(&mut command);
    let status = command
        .status()
        .map_err(|error| io::Error::new(error.kind(), format!("{helper}: {error}")))?;
    if status.success() {
        return Ok(());
    }
    let mut message = Vec::new();
    output.rewind()?;
    output.take(MAX_MESSAGE).read_to_end(&mut message)?;
    let message = String::from_utf8_lossy(&message).trim().replace('\n', "; ");
    Err(io::Error::other(format!(
        "{helper} {program}: {status}: {message}"
    )))
}

/// The helper and the program of a filesystem type; `None` if the type is not FUSE.
fn fuse_programs(kind: &str) -> Option<(&'static str, &str)> {
    match kind.split_once('.')? {
        ("fuse", program) => Some(("mount.fuse", program)),
        ("fuse3", program) => Some(("mount.fuse3", program)),
        _ => None,
    }
}

/// An option that sets flags, the option that clears them, and the flags.
const OPTIONS: [(&str, &str, MsFlags); 15] = [
    ("bind", "", MsFlags::MS_BIND),
    ("defaults", "", MsFlags::empty()),
    ("dirsync", "", MsFlags::MS_DIRSYNC),
    ("mand", "nomand", MsFlags::MS_MANDLOCK),
    ("noatime", "atime", MsFlags::MS_NOATIME),
    ("nodev", "dev", MsFlags::MS_NODEV),
    ("nodiratime", "diratime", MsFlags::MS_NODIRATIME),
    ("noexec", "exec", MsFlags::MS_NOEXEC),
    ("nosuid", "suid", MsFlags::MS_NOSUID),
    ("rbind", "", MsFlags::MS_BIND.union(MsFlags::MS_REC)),
    ("relatime", "norelatime", MsFlags::MS_RELATIME),
    ("remount", "", MsFlags::MS_REMOUNT),
    ("ro", "rw", MsFlags::MS_RDONLY),
    ("strictatime", "nostrictatime", MsFlags::MS_STRICTATIME),
    ("sync", "async", MsFlags::MS_SYNCHRONOUS),
];

/// With an `r` before the name, for all mounts below as well.
const PROPAGATION: [(&str, MsFlags); 4] = [
    ("private", MsFlags::MS_PRIVATE),
    ("shared", MsFlags::MS_SHARED),
    ("slave", MsFlags::MS_SLAVE),
    ("unbindable", MsFlags::MS_UNBINDABLE),
];

/// Options that containerd's mount manager should have applied and removed; the filesystem would
/// not know them.
const INTERNAL: &str = "X-containerd.";

/// A mount's options, sorted by their destination.
#[derive(Debug, PartialEq, Eq)]
struct MountOptions {
    /// For the mount itself.
    flags: MsFlags,
    /// For a second call; empty if the options do not change it.
    propagation: MsFlags,
    /// For the filesystem, in order.
    data: Vec<String>,
    /// The source is a file, to be mounted through a loop device.
    loop_device: Option<LoopMode>,
    /// The mappings of users and of groups.
    id_map: Option<(String, String)>,
}

impl MountOptions {
    /// Sorts the options.
    fn parse(options: &[String]) -> Result<Self> {
        let (mut flags, mut propagation) = (MsFlags::empty(), MsFlags::empty());
        let (mut data, mut is_loop, mut users, mut groups) = (Vec::new(), false, None, None);
        for option in options {
            let known = OPTIONS
                .iter()
                .find(|(set, clear, _)| option == set || (option == clear && !option.is_empty()));
            if let Some((set, _, bits)) = known {
                flags.set(*bits, option == set);
                continue;
            }
            let (kind, depth) = match option.strip_prefix('r') {
                Some(kind) => (kind, MsFlags::MS_REC),
                None => (&**option, MsFlags::empty()),
            };
            if let Some((_, bits)) = PROPAGATION.iter().find(|(name, _)| *name == kind) {
                propagation = *bits | depth;
                continue;
            }
            if option.starts_with(INTERNAL) {
                return Err(format!("the option {option:?} is not supported").into());
            }
            match option.split_once('=').unwrap_or((option, "")) {
                ("loop", "") => is_loop = true,
                ("uidmap", map) => users = Some(map.to_owned()),
                ("gidmap", map) => groups = Some(map.to_owned()),
                _ => data.push(option.clone()),
            }
        }
        let mut loop_device = None;
        if is_loop {
            let before = data.len();
            // An option of the loop device, not of the filesystem.
            data.retain(|option| option != "direct-io");
            loop_device = Some(LoopMode {
                read_only: flags.contains(MsFlags::MS_RDONLY),
                direct_io: data.len() < before,
            });
        }
        // As in containerd's own mounts, users without groups map nothing, nor groups without
        // users.
        Ok(Self {
            flags,
            propagation,
            data,
            loop_device,
            id_map: users.zip(groups),
        })
    }
}

/// A page, less the final NUL. mount(2) silently cuts a longer string.
const MAX_OPTIONS: usize = 4096 - 1;
const LOWER: &str = "lowerdir=";

/// mount(2), with shortened options if they are too long.
///
/// mount(2) takes a page of options. An image of about sixty layers needs more, with all layers
/// below a directory of the snapshotter. So the lower directories are named relative to this
/// directory, which is the working directory of mount(2). All threads share the working directory,
/// hence unshare(CLONE_FS) first, on a thread that ends after the mount.
fn mount_with_long_options(
    kind: &str,
    source: &Path,
    flags: MsFlags,
    options: &[String],
    target: &Path,
) -> io::Result<()> {
    let mut data = options.join(",");
    if kind == OVERLAY
        && data.len() > MAX_OPTIONS
        && let Some((directory, short)) = with_layers_below(options, Path::new(""))
    {
        unshare(CloneFlags::CLONE_FS)?;
        std::env::set_current_dir(directory)?;
        data = short.join(",");
    }
    if data.len() > MAX_OPTIONS {
        return Err(io::Error::new(
            io::ErrorKind::ArgumentListTooLong,
            "more options than mount(2) takes",
        ));
    }
    call(Some(source), target, Some(kind), flags, Some(&data))
}

/// The lower directories' common parent, and the options with the lower directories below another
/// place. An empty place gives names relative to the parent.
fn with_layers_below(options: &[String], place: &Path) -> Option<(PathBuf, Vec<String>)> {
    let lower = options.iter().find_map(|word| word.strip_prefix(LOWER))?;
    let layers: Vec<&Path> = lower.split(':').map(Path::new).collect();
    let parent = common_parent(&layers)?;
    let mut names = Vec::new();
    for layer in layers {
        let name = place.join(layer.strip_prefix(&parent).ok()?);
        names.push(name.to_str()?.to_owned());
    }
    let mut options = options.to_vec();
    for word in &mut options {
        if word.starts_with(LOWER) {
            *word = format!("{LOWER}{}", names.join(":"));
        }
    }
    Some((parent, options))
}

/// The lowest directory above all paths; `None` for `/`.
fn common_parent(paths: &[&Path]) -> Option<PathBuf> {
    let mut parent = paths.first()?.parent()?.to_owned();
    while !paths
        .iter()
        .all(|path| path.starts_with(&parent) && *path != parent)
    {
        parent = parent.parent()?.to_owned();
    }
    (parent != Path::new("/") && parent.is_absolute()).then_some(parent)
}

/// A mapping as a user namespace, the only form that the kernel accepts.
struct MappedNamespace {
    namespace: File,
}

impl MappedNamespace {
    /// Parses the options' values: `container:host:size`, several separated by commas.
    fn new(users: &str, groups: &str) -> io::Result<Self> {
        let [users, groups] = [lines(users)?, lines(groups)?];
        let child = NamespaceChild(kernel::child_in_user_namespace()?);
        let folder = PathBuf::from(format!("/proc/{}", child.0.as_raw_nonzero()));
        fs::write(folder.join("uid_map"), users)?;
        fs::write(folder.join("gid_map"), groups)?;
        let namespace = File::open(folder.join("ns/user"))?;
        Ok(Self { namespace })
    }

    /// Maps the ids of the mount on `target`. No process may use the mount yet, because a mapped
    /// clone replaces the mount.
    fn apply(&self, target: &Path) -> io::Result<()> {
        let mapped = self.clone_of(target, false)?;
        unmount_once(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
        attach(&mapped, target)
    }

    /// Names the lower directories by a mapped mount at `directory`. Drop it when the overlay is
    /// mounted.
    fn layers(
        &self,
        words: &[String],
        directory: PathBuf,
    ) -> io::Result<(MappedLayers, Vec<String>)> {
        let (parent, options) = with_layers_below(words, &directory).ok_or_else(|| {
            let why = match words.iter().any(|word| word.starts_with(LOWER)) {
                true => "the lower directories have no common parent",
                false => "no lowerdir to map",
            };
            io::Error::new(io::ErrorKind::InvalidInput, why)
        })?;
        let mapped = self.clone_of(&parent, true)?;
        DirBuilder::new().mode(0o700).create(&directory)?;
        let layers = MappedLayers { directory };
        attach(&mapped, &layers.directory)?;
        Ok((layers, options))
    }

    fn clone_of(&self, path: &Path, read_only: bool) -> io::Result<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE;
        let clone = open_tree(CWD, path, flags)?;
        map_ids(clone.as_fd(), self.namespace.as_fd(), read_only)?;
        Ok(clone)
    }
}

/// The mapped parent of an overlay's lower directories; unmounted when dropped.
struct MappedLayers {
    directory: PathBuf,
}

impl Drop for MappedLayers {
    fn drop(&mut self) {
        // Unmounted already, or never mounted; without the directory there is nothing to remove
        // either.
        let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        let _ = unmount_once(&self.directory, flags);
        if let Err(error) = fs::remove_dir(&self.directory) {
            log::warn!(
                path:% = self.directory.display(), error:%;
                "cannot remove the mount point of an overlay's mapped layers"
            );
        }
    }
}

fn attach(tree: &OwnedFd, target: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(tree, "", CWD, target, flags)?)
}

/// `container host size`, the format of /proc/PID/uid_map.
fn lines(mapping: &str) -> io::Result<String> {
    let mut lines = String::new();
    for range in mapping.split(',') {
        let numbers: Result<Vec<u32>, _> = range.split(':').map(str::parse).collect();
        match numbers.as_deref() {
            Ok([inside, outside, size]) => lines += &format!("{inside} {outside} {size}\n"),
            _ => {
                let why = format!("{mapping:?} is no mapping of ids (container:host:size)");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
        }
    }
    Ok(lines)
}

/// The child for which the kernel creates a user namespace.
struct NamespaceChild(Pid);

impl Drop for NamespaceChild {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        // ECHILD: the reaper of orphans was faster.
        let _ = waitpid(Some(self.0), WaitOptions::empty());
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
            fuse_programs("fuse3.bindfs"),
            Some(("mount.fuse3", "bindfs"))
        );
        assert_eq!(fuse_programs("fuse.sshfs"), Some(("mount.fuse", "sshfs")));
        for other in ["fuse", "fuseblk", "overlay"] {
            assert_eq!(fuse_programs(other), None);
        }
    }
}

#[cfg(test)]
mod options_tests {
    use super::*;

    fn parse(line: &str) -> Result<MountOptions> {
        MountOptions::parse(&line.split(',').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn an_overlay_keeps_its_own_options_in_order() {
        let options = parse("index=off,workdir=/w,upperdir=/u,lowerdir=/a:/b").unwrap();
        assert!(options.flags.is_empty() && options.propagation.is_empty());
        assert_eq!(
            options.data,
            ["index=off", "workdir=/w", "upperdir=/u", "lowerdir=/a:/b"]
        );
    }

    #[test]
    fn later_options_win_and_propagation_is_separate() {
        let options = parse("rbind,ro,rw,ro,rslave").unwrap();
        assert_eq!(
            options.flags,
            MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY
        );
        assert_eq!(options.propagation, MsFlags::MS_SLAVE | MsFlags::MS_REC);
        assert_eq!(parse("ro,rw").unwrap().flags, MsFlags::empty());
    }

    #[test]
    fn options_that_need_more_than_a_mount() {
        let options = parse("ro,loop,direct-io,errors=continue").unwrap();
        assert_eq!(
            options.loop_device,
            Some(LoopMode {
                read_only: true,
                direct_io: true
            })
        );
        assert_eq!(options.data, ["errors=continue"]);
        assert_eq!(parse("ro,direct-io").unwrap().loop_device, None);
        let options = parse("uidmap=0:1000:1,gidmap=0:2000:1").unwrap();
        assert_eq!(options.id_map, Some(("0:1000:1".into(), "0:2000:1".into())));
        assert_eq!(parse("uidmap=0:1000:1").unwrap().id_map, None);
    }

    #[test]
    fn an_unsupported_option_is_an_error() {
        assert_eq!(
            parse("ro,X-containerd.mkfs.fs=ext4")
                .unwrap_err()
                .to_string(),
            "the option \"X-containerd.mkfs.fs=ext4\" is not supported"
        );
    }

    #[test]
    fn the_table_is_sorted_and_has_no_doubles() {
        assert!(OPTIONS.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(PROPAGATION.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn an_unknown_option_is_the_filesystems() {
        for option in ["", "r", "rro", "rrslave", "rrw"] {
            let options = parse(option).unwrap();
            assert!(options.flags.is_empty() && options.propagation.is_empty());
            assert_eq!(options.data, [option]);
        }
    }
}

#[cfg(test)]
mod overlay_tests {
    use std::fs;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(',').map(str::to_owned).collect()
    }

    fn shorten(line: &str) -> Option<(PathBuf, Vec<String>)> {
        with_layers_below(&words(line), Path::new(""))
    }

    #[test]
    fn layers_become_relative_and_the_rest_stays() {
        let (directory, short) =
            shorten("workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=/s/12/fs:/s/3/fs,index=off")
                .unwrap();
        assert_eq!(directory, Path::new("/s"));
        assert_eq!(
            short,
            words("workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=12/fs:3/fs,index=off")
        );
    }

    #[test]
    fn without_a_common_directory_nothing_is_shortened() {
        assert_eq!(shorten("lowerdir=/a/fs:/b/fs"), None);
        assert_eq!(shorten("upperdir=/a"), None);
        assert_eq!(shorten("lowerdir=/a/b:/a"), None);
    }

    /// In a mount namespace of its own thread.
    fn mount_hundred_layers(dir: &Path) -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        call(
            None,
            Path::new("/"),
            None,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None,
        )?;
        call(
            Some(Path::new("layers")),
            dir,
            Some("tmpfs"),
            MsFlags::empty(),
            None,
        )?;
        let layers: Vec<PathBuf> = (0..100)
            .map(|n| dir.join(format!("{n:0>30}")).join("fs"))
            .collect();
        for (n, layer) in layers.iter().enumerate() {
            fs::create_dir_all(layer)?;
            fs::write(layer.join(format!("from-{n}")), "")?;
        }
        let [upper, work, merged] = ["upper", "work", "merged"].map(|name| dir.join(name));
        for directory in [&upper, &work, &merged] {
            fs::create_dir(directory)?;
        }
        let lower: Vec<_> = layers
            .iter()
            .map(|layer| layer.display().to_string())
            .collect();
        let words = [
            format!("workdir={}", work.display()),
            format!("upperdir={}", upper.display()),
            format!("lowerdir={}", lower.join(":")),
        ];
        let source = Path::new("overlay");
        mount_with_long_options("overlay", source, MsFlags::empty(), &words, &merged)?;
        fs::metadata(merged.join("from-0"))
            .and(fs::metadata(merged.join("from-99")))
            .map(drop)
    }

    #[test]
    fn a_hundred_layers_are_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let here = std::env::current_dir().unwrap();
        let path = dir.path().to_owned();
        match thread::spawn(move || mount_hundred_layers(&path))
            .join()
            .unwrap()
        {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                eprintln!("SKIPPED: no right to mount")
            }
            result => result.unwrap(),
        }
        assert_eq!(std::env::current_dir().unwrap(), here);
    }

    #[test]
    fn mappings_are_read_or_refused() {
        assert_eq!(
            lines("0:1000:1,1:100000:65535").unwrap(),
            "0 1000 1\n1 100000 65535\n"
        );
        for wrong in ["", "0:1", "0:1:2:3", "a:b:c", "0:-1:1"] {
            assert!(lines(wrong).is_err(), "{wrong}");
        }
    }
}
