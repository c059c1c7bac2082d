//! A new mount that is attached nowhere: the first step of `mount --bind`.

use std::os::fd::OwnedFd;
use std::path::Path;

use bindguard_core::mount_table::MountAttributes;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MountFlags, OpenTreeFlags};

use crate::fault;
use crate::handle::Handle;
use crate::mount_setattr::mount_setattr;

use super::SwapError;

const STEP: &str = "cloning the mount of the current file";
const ATTRIBUTES: &str = "giving the new mount its attributes";

/// A new mount of this file or directory: open_tree(2). It has the attributes of the mount that it
/// is opened on, or those that are to be kept.
///
/// # Errors
/// [`SwapError::NotPossible`] where attributes are to be kept and the kernel has no
/// mount_setattr(2).
pub(super) fn clone_mount(
    of: &Handle,
    keep: Option<MountAttributes>,
) -> Result<OwnedFd, SwapError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let new = rustix::mount::open_tree(of, "", flags)
        .map_err(|errno| SwapError::from_errno(STEP, errno))?;
    match keep {
        Some(_) if fault::denies_setattr() => return Err(SwapError::not_possible(ATTRIBUTES)),
        Some(attributes) => mount_setattr(&new, attributes)
            .map_err(|error| SwapError::from_io(ATTRIBUTES, error))?,
        None => {}
    }
    Ok(new)
}

/// A clone of the mount at a path of this thread's namespace. The mount gets these attributes
/// first, by a call that all kernels know: `mount -o remount,bind`.
pub(super) fn clone_remounted(
    at: &Path,
    attributes: MountAttributes,
) -> Result<OwnedFd, SwapError> {
    let failed = |errno: Errno| SwapError::from_errno(ATTRIBUTES, errno);
    rustix::mount::mount_remount(at, MountFlags::BIND | remount_flags(attributes), "")
        .map_err(failed)?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    rustix::mount::open_tree(CWD, at, flags).map_err(failed)
}

/// mount(2)'s name of each of mount_setattr(2)'s bits. Without one for access times, it leaves
/// those as they are.
fn remount_flags(attributes: MountAttributes) -> MountFlags {
    let flags = [
        (0x1, MountFlags::RDONLY),
        (0x2, MountFlags::NOSUID),
        (0x4, MountFlags::NODEV),
        (0x8, MountFlags::NOEXEC),
        (0x10, MountFlags::NOATIME),
        (0x20, MountFlags::STRICTATIME),
        (0x80, MountFlags::NODIRATIME),
        // MS_NOSYMFOLLOW
        (0x20_0000, MountFlags::from_bits_retain(0x100)),
    ];
    let bits = attributes.bits();
    let named = flags
        .iter()
        .filter(|(bit, _)| bits & bit != 0)
        .fold(MountFlags::empty(), |all, (_, flag)| all | *flag);
    if bits & 0x30 == 0 {
        named | MountFlags::RELATIME
    } else {
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remount_says_what_the_attributes_say() {
        let flags = |options: &str| remount_flags(MountAttributes::from_options(options.as_ref()));
        assert_eq!(flags("rw,relatime"), MountFlags::RELATIME);
        assert_eq!(flags("rw"), MountFlags::STRICTATIME);
        let strict =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        assert_eq!(
            flags("ro,nosuid,nodev,noexec,noatime"),
            strict | MountFlags::NOATIME
        );
        assert_eq!(
            flags("rw,nodiratime,relatime"),
            MountFlags::NODIRATIME | MountFlags::RELATIME
        );
    }
}
