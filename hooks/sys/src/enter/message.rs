//! The messages between the agent and the child in a container's mount namespace: fixed sizes.

use rustix::io::Errno;

use crate::replace::{ReplaceError, Step};

/// A step for the child, with the index of the replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Open(u16),
    AttachBeneath(u16),
    Tuck(u16),
    Detach(u16),
    SetPropagation(u16),
    Touch(u16),
    Restore(u16),
    MakePrivate(u16),
    Unmount(u16),
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
            Self::MakePrivate(index) => (7, index),
            Self::Unmount(index) => (8, index),
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
            7 => Self::MakePrivate(index),
            8 => Self::Unmount(index),
            _ => return None,
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
        for request in [
            Request::Open,
            Request::AttachBeneath,
            Request::Tuck,
            Request::Detach,
            Request::SetPropagation,
            Request::Touch,
            Request::Restore,
            Request::MakePrivate,
            Request::Unmount,
        ] {
            let request = request(513);
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
