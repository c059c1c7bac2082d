//! Gives attributes to single mounts of a tree that is attached nowhere.
//!
//! mount_setattr(2) refuses a mount below the top of such a tree. So a thread attaches the tree in a
//! mount namespace of its own, sets the attributes there, and copies the result. The namespace ends
//! with the thread.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::{panic, thread};

use bindguard_core::mount_table::MountAttributes;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::MoveMountFlags;

use crate::mount_setattr::mount_setattr;

use super::new_mount::{CloneError, NewMount, tree_of};
use super::step::{ReplaceError, Step, at};
use super::tuck::make_mounts_private;

/// Limit of cached walks to one mount point.
const MAX_TRIES: u32 = 16;

/// The tree with these attributes on the mounts at these paths below its top. Nothing is attached
/// in the caller's namespace.
///
/// # Errors
/// If a path is not the root of a mount, or a server would have to answer on the way.
pub fn restrict_below(
    new: NewMount,
    restrictions: &[(PathBuf, MountAttributes)],
) -> Result<NewMount, CloneError> {
    if restrictions.is_empty() {
        return Ok(new);
    }
    thread::scope(|scope| {
        let namespace = thread::Builder::new()
            .name("restrict".to_owned())
            .spawn_scoped(scope, || in_own_namespace(&new.mount, restrictions))
            .map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                CloneError::Prepare(at(Step::Unshare)(errno))
            })?;
        namespace
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    })
}

fn in_own_namespace(
    tree: &OwnedFd,
    restrictions: &[(PathBuf, MountAttributes)],
) -> Result<NewMount, CloneError> {
    attach(tree).map_err(CloneError::Prepare)?;
    for (path, attributes) in restrictions {
        let set = mount_below(tree, path).and_then(|mount| mount_setattr(&mount, *attributes));
        set.map_err(|source| CloneError::Below {
            path: path.clone(),
            attributes: *attributes,
            source,
        })?;
    }
    let restricted = tree_of(tree).map_err(at(Step::AttachCopy));
    restricted
        .map(NewMount::complete)
        .map_err(CloneError::Prepare)
}

fn attach(tree: &OwnedFd) -> Result<(), ReplaceError> {
    unshare(CloneFlags::CLONE_NEWNS)
        .map_err(|errno| at(Step::Unshare)(Errno::from_raw_os_error(errno as i32)))?;
    make_mounts_private()?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree, c"", CWD, c"/", flags).map_err(at(Step::AttachCopy))
}

/// The kernel keeps each mount point in its cache, and every folder on the way. A filesystem of a
/// server or a daemon is not walked.
fn mount_below(tree: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::CACHED;
    // The mounts change all the time on a busy node: then the kernel gives up a cached walk.
    let mut tries = 0;
    loop {
        match rustix::fs::openat2(tree, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) if tries < MAX_TRIES => tries += 1,
            opened => return Ok(opened?),
        }
    }
}
