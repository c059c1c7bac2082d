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

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use bindguard_sys::map_ids;
use nix::mount::MsFlags;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{OVERLAY, call};
use crate::kernel::child_in_user_namespace;

/// A page, less the final NUL. mount(2) silently cuts a longer string.
const MAX_OPTIONS: usize = 4096 - 1;
const LOWER: &str = "lowerdir=";

/// mount(2), with shortened options if they are too long.
///
/// mount(2) takes a page of options. An image of about sixty layers needs more, with all layers
/// below a directory of the snapshotter. So the lower directories are named relative to this
/// directory, which is the working directory of mount(2). All threads share the working directory,
/// hence unshare(CLONE_FS) first, on a thread that ends after the mount.
pub fn mount_with_long_options(
    kind: &str,
    source: &Path,
    flags: MsFlags,
    options: &[String],
    target: &Path,
) -> io::Result<()> {
    let mut data = options.join(",");
    if kind == OVERLAY
        && data.len() > MAX_OPTIONS
        && let Some((directory, short)) = shorten(options)
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

/// The lower directories' common parent, and the options with names relative to it.
fn shorten(options: &[String]) -> Option<(PathBuf, Vec<String>)> {
    let layers = lower_directories(options)?;
    let parent = common_parent(&layers)?;
    let mut relative = Vec::new();
    for layer in layers {
        relative.push(layer.strip_prefix(&parent).ok()?.to_str()?);
    }
    let short = with_lower(options, &relative.join(":"));
    Some((parent, short))
}

/// The lower directories in an overlay's options.
fn lower_directories(options: &[String]) -> Option<Vec<&Path>> {
    let lower = options.iter().find_map(|word| word.strip_prefix(LOWER))?;
    Some(lower.split(':').map(Path::new).collect())
}

/// The options with other lower directories.
fn with_lower(options: &[String], lower: &str) -> Vec<String> {
    let mut options = options.to_vec();
    for word in &mut options {
        if word.starts_with(LOWER) {
            *word = format!("{LOWER}{lower}");
        }
    }
    options
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
#[derive(Debug)]
pub struct MappedNamespace {
    namespace: File,
}

impl MappedNamespace {
    /// Parses the options' values: `container:host:size`, several separated by commas.
    pub fn new(users: &str, groups: &str) -> io::Result<Self> {
        let [users, groups] = [lines(users)?, lines(groups)?];
        let child = NamespaceChild(child_in_user_namespace()?);
        let folder = PathBuf::from(format!("/proc/{}", child.0.as_raw_nonzero()));
        fs::write(folder.join("uid_map"), users)?;
        fs::write(folder.join("gid_map"), groups)?;
        let namespace = File::open(folder.join("ns/user"))?;
        Ok(Self { namespace })
    }

    /// Maps the ids of the mount on `target`. No process may use the mount yet, because a mapped
    /// clone replaces the mount.
    pub fn apply(&self, target: &Path) -> io::Result<()> {
        let mapped = self.clone_of(target, false)?;
        unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
        attach(&mapped, target)
    }

    /// Names the lower directories by a mapped mount at `directory`. Drop it when the overlay is
    /// mounted.
    pub fn layers(
        &self,
        words: &[String],
        directory: PathBuf,
    ) -> io::Result<(MappedLayers, Vec<String>)> {
        let unusable = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let lower = lower_directories(words).ok_or_else(|| unusable("no lowerdir to map"))?;
        let parent = common_parent(&lower)
            .ok_or_else(|| unusable("the lower directories have no common parent"))?;
        let mapped = self.clone_of(&parent, true)?;
        DirBuilder::new().mode(0o700).create(&directory)?;
        let layers = MappedLayers { directory };
        attach(&mapped, &layers.directory)?;
        let mut names = Vec::new();
        for path in lower {
            if let Ok(layer) = path.strip_prefix(&parent) {
                names.push(layers.directory.join(layer).display().to_string());
            }
        }
        Ok((layers, with_lower(words, &names.join(":"))))
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
#[derive(Debug)]
pub struct MappedLayers {
    directory: PathBuf,
}

impl Drop for MappedLayers {
    fn drop(&mut self) {
        // Unmounted already, or never mounted; without the directory there is nothing to remove
        // either.
        let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        let _ = unmount(&self.directory, flags);
        if let Err(error) = fs::remove_dir(&self.directory) {
            tracing::warn!(path = %self.directory.display(), %error, "cannot remove the mount point of an overlay's mapped layers");
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
    use std::fs;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(',').map(str::to_owned).collect()
    }

    #[test]
    fn layers_become_relative_and_the_rest_stays() {
        let (directory, short) = shorten(&words(
            "workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=/s/12/fs:/s/3/fs,index=off",
        ))
        .unwrap();
        assert_eq!(directory, Path::new("/s"));
        assert_eq!(
            short,
            words("workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=12/fs:3/fs,index=off")
        );
    }

    #[test]
    fn without_a_common_directory_nothing_is_shortened() {
        assert_eq!(shorten(&words("lowerdir=/a/fs:/b/fs")), None);
        assert_eq!(shorten(&words("upperdir=/a")), None);
        assert_eq!(shorten(&words("lowerdir=/a/b:/a")), None);
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
        match std::thread::spawn(move || mount_hundred_layers(&path))
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
