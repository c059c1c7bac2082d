//! The attributes of a new mount before Linux 5.12: mount(8)'s `remount,bind`, which needs an
//! attached mount.

use std::os::fd::OwnedFd;

use bindguard_core::mount_table::MountAttributes;
use rustix::io::Errno;
use rustix::mount::MountFlags;

use crate::handle::Handle;

use super::new_mount::copy_of;

/// A copy of a mount of this thread's namespace, which gets these attributes first.
pub(super) fn clone_remounted(
    mount: &OwnedFd,
    attributes: MountAttributes,
) -> Result<OwnedFd, Errno> {
    let flags = MountFlags::BIND | remount_flags(attributes);
    rustix::mount::mount_remount(Handle::link_of(mount), flags, "")?;
    copy_of(mount)
}

/// The flags of mount(2) for the bits of mount_setattr(2). Without a flag for access times, mount(2)
/// leaves access times as they are.
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
