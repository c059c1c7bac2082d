//! The messages between the agent and the child in a container's mount namespace: fixed sizes.

use rustix::io::Errno;

use crate::replace::{ReplaceError, Step};

/// The work of a child with one of the replacements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Opens the mount point, if the stale mount is there.
    Open,
    /// Attaches the new mount beneath the stale one: `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer.
    AttachBeneath,
    /// Attaches the new mount beneath the stale one through propagation. The call can succeed
    /// although the mount did not arrive: check the table. The propagation of the parent mount is
    /// restored in any case.
    Tuck,
    /// Detaches the stale mount. It is no error if that mount was detached already.
    Detach,
    /// Gives a tucked mount the propagation of the mount that it replaced, after that one was
    /// detached.
    SetPropagation,
    /// Sets the times of the file beneath the mount, so that programs that watch its folder get an
    /// event. Fails if the folder is on a read-only filesystem, or is no longer the parent of the
    /// mount point.
    Touch,
    /// Gives an open mount itself the propagation of its line in the replacement.
    Restore,
    /// Makes the stale mount, and the mounts below, private: the detach of these mounts then reaches
    /// no other namespace.
    MakePrivate,
    /// Unmounts the mount, unless it is in use: `EBUSY`.
    Unmount,
}

impl Action {
    /// All actions, in the order of their numbers.
    const ALL: [Self; 9] = [
        Self::Open,
        Self::AttachBeneath,
        Self::Tuck,
        Self::Detach,
        Self::SetPropagation,
        Self::Touch,
        Self::Restore,
        Self::MakePrivate,
        Self::Unmount,
    ];
}

/// A request: an action, and the index of the replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) action: Action,
    pub(super) index: u16,
}

impl Request {
    pub(super) const SIZE: usize = 3;

    pub(super) fn to_bytes(self) -> [u8; Self::SIZE] {
        let [low, high] = self.index.to_le_bytes();
        [self.action as u8, low, high]
    }

    pub(super) fn from_bytes([action, low, high]: [u8; Self::SIZE]) -> Option<Self> {
        Some(Self {
            action: *Action::ALL.get(usize::from(action))?,
            index: u16::from_le_bytes([low, high]),
        })
    }
}

/// The child's answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reply(pub(super) Result<(), ReplaceError>);

impl Reply {
    pub(super) const SIZE: usize = 6;

    pub(super) fn to_bytes(self) -> [u8; Self::SIZE] {
        let (code, step, errno) = match self.0 {
            Ok(()) => (0, 0, 0),
            Err(ReplaceError::OtherMount) => (1, 0, 0),
            Err(ReplaceError::Failed(step, errno)) => (2, step as u8, errno.raw_os_error()),
            Err(ReplaceError::OtherType) => (3, 0, 0),
            Err(ReplaceError::Overtaken) => (4, 0, 0),
        };
        let [a, b, c, d] = errno.to_le_bytes();
        [code, step, a, b, c, d]
    }

    pub(super) fn from_bytes([code, step, a, b, c, d]: [u8; Self::SIZE]) -> Option<Self> {
        Some(Self(match code {
            0 => Ok(()),
            1 => Err(ReplaceError::OtherMount),
            2 => {
                let number = i32::from_le_bytes([a, b, c, d]);
                let errno = (1..4096)
                    .contains(&number)
                    .then(|| Errno::from_raw_os_error(number))?;
                let step = *Step::ALL.get(usize::from(step))?;
                Err(ReplaceError::Failed(step, errno))
            }
            3 => Err(ReplaceError::OtherType),
            4 => Err(ReplaceError::Overtaken),
            _ => return None,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        for action in Action::ALL {
            let request = Request { action, index: 513 };
            assert_eq!(Request::from_bytes(request.to_bytes()), Some(request));
        }
        let failed = Step::ALL
            .iter()
            .map(|step| Err(ReplaceError::Failed(*step, Errno::INVAL)));
        let others = [
            Ok(()),
            Err(ReplaceError::OtherMount),
            Err(ReplaceError::OtherType),
            Err(ReplaceError::Overtaken),
        ];
        for reply in failed.chain(others).map(Reply) {
            assert_eq!(Reply::from_bytes(reply.to_bytes()), Some(reply));
        }
        assert_eq!(Reply::from_bytes([2, 200, 0, 0, 0, 0]), None);
    }
}
