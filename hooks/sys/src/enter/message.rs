//! The messages between the agent and the child in a container's mount namespace: fixed sizes, no
//! heap.

use rustix::io::Errno;

/// A request: what to do with one of the replacements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Open(u16),
    AttachBeneath(u16),
    Tuck(u16),
    Detach(u16),
    SetPropagation(u16),
    Touch(u16),
    Restore(u16),
}

impl Request {
    pub(super) const SIZE: usize = 3;

    pub(super) fn to_bytes(self) -> [u8; Self::SIZE] {
        let (code, index) = match self {
            Self::Open(index) => (0, index),
            Self::AttachBeneath(index) => (1, index),
            Self::Tuck(index) => (2, index),
            Self::Detach(index) => (3, index),
            Self::SetPropagation(index) => (4, index),
            Self::Touch(index) => (5, index),
            Self::Restore(index) => (6, index),
        };
        let [low, high] = index.to_le_bytes();
        [code, low, high]
    }

    pub(super) fn from_bytes([code, low, high]: [u8; Self::SIZE]) -> Option<Self> {
        let index = u16::from_le_bytes([low, high]);
        Some(match code {
            0 => Self::Open(index),
            1 => Self::AttachBeneath(index),
            2 => Self::Tuck(index),
            3 => Self::Detach(index),
            4 => Self::SetPropagation(index),
            5 => Self::Touch(index),
            6 => Self::Restore(index),
            _ => return None,
        })
    }
}

macro_rules! steps {
    ($($(#[$about:meta])* $step:ident = $words:literal,)*) => {
        /// A step of the child in a container.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum EnterStep {
            $($(#[$about])* $step,)*
        }

        impl EnterStep {
            const ALL: &[Self] = &[$(Self::$step),*];

            /// The step in words.
            pub fn words(self) -> &'static str {
                match self {
                    $(Self::$step => $words,)*
                }
            }
        }
    };
}

steps! {
    /// `open("/proc/self/fd")`
    OpenProc = "opening /proc/self/fd",
    /// `setns(2)`
    Enter = "entering the container's mount namespace",
    /// `openat2(2)` of the mount point.
    OpenMountPoint = "opening the mount point in the container",
    /// `statx(2)` of the stale mount and of the new one.
    CompareTypes = "comparing the types of the old and the current file",
    /// `openat2(2)` of the parent folder.
    OpenFolder = "opening the folder of the mount point in the container",
    /// `openat2(2)` of the mount that the folder is on.
    OpenParent = "opening the parent mount in the container",
    /// `move_mount(2)` with `MOVE_MOUNT_BENEATH`.
    AttachBeneath = "attaching the new mount beneath the stale one",
    /// The container's parent mount becomes shared for a moment.
    ShareParent = "making the parent mount shared",
    /// `open_tree(2)` of the folder.
    CopyFolder = "copying the parent mount",
    /// `unshare(2)`
    Unshare = "making a helper mount namespace",
    /// The helper's mounts become private.
    MakePrivate = "making the helper's mounts private",
    /// The copy is attached in the helper namespace.
    AttachCopy = "attaching the copy of the parent mount",
    /// The new mount is attached in the copy, and propagates.
    AttachNew = "attaching the new mount to the copy",
    /// `setns(2)` back into the container.
    Return = "returning to the container's mount namespace",
    /// The parent's propagation is set as it was.
    RestoreParent = "restoring the propagation of the parent mount",
    /// `umount2(2)` with `MNT_DETACH`.
    Detach = "detaching the stale mount",
    /// The new mount's propagation is set.
    SetPropagation = "setting the propagation of the new mount",
    /// The folder of the mount point is copied, writable.
    CopyForTouch = "copying the folder of the mount point",
    /// `utimensat(2)` of the file beneath the mount.
    Touch = "touching the file beneath the mount",
}

/// A step of the child that failed, with the kernel's error.
pub(super) type Failure = (EnterStep, Errno);

pub(super) fn at(step: EnterStep) -> impl Fn(Errno) -> Failure {
    move |errno| (step, errno)
}

/// The child's answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    Done,
    /// Another mount is at the place.
    OtherMount,
    /// The current file has another type than the old one.
    OtherType,
    Failed(EnterStep, Errno),
}

impl Reply {
    pub(super) const SIZE: usize = 6;

    pub(super) fn to_bytes(self) -> [u8; Self::SIZE] {
        let (code, step, errno) = match self {
            Self::Done => (0, 0, 0),
            Self::OtherMount => (1, 0, 0),
            Self::OtherType => (3, 0, 0),
            Self::Failed(step, errno) => (2, step as u8, errno.raw_os_error()),
        };
        let [a, b, c, d] = errno.to_le_bytes();
        [code, step, a, b, c, d]
    }

    pub(super) fn from_bytes([code, step, a, b, c, d]: [u8; Self::SIZE]) -> Option<Self> {
        Some(match code {
            0 => Self::Done,
            1 => Self::OtherMount,
            3 => Self::OtherType,
            2 => {
                let number = i32::from_le_bytes([a, b, c, d]);
                let errno = (1..4096)
                    .contains(&number)
                    .then(|| Errno::from_raw_os_error(number))?;
                Self::Failed(*EnterStep::ALL.get(usize::from(step))?, errno)
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        for request in [
            Request::Open,
            Request::AttachBeneath,
            Request::Tuck,
            Request::Detach,
            Request::SetPropagation,
            Request::Touch,
            Request::Restore,
        ] {
            let request = request(513);
            assert_eq!(Request::from_bytes(request.to_bytes()), Some(request));
        }
        for step in EnterStep::ALL {
            let reply = Reply::Failed(*step, Errno::INVAL);
            assert_eq!(Reply::from_bytes(reply.to_bytes()), Some(reply));
        }
        for reply in [Reply::Done, Reply::OtherMount, Reply::OtherType] {
            assert_eq!(Reply::from_bytes(reply.to_bytes()), Some(reply));
        }
        assert_eq!(Reply::from_bytes([2, 200, 0, 0, 0, 0]), None);
    }
}
