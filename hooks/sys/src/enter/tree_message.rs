//! The messages between the agent and the child that completes a tree of new mounts.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use bindguard_core::mount_table::MountAttributes;
use rustix::io::Errno;

use super::descriptor_message::{receive_message, send_message};
use super::message::Reply;
use super::tree_part::{TreeChange, TreePart};
use crate::replace::ReplaceError;

const RESTRICT: u8 = 0;
const ATTACH: u8 = 1;
const TRY_ATTACH: u8 = 2;

/// Bytes before the path: the kind and the attributes.
const HEAD: usize = 1 + 8;

/// The longest path of the kernel.
const MAX_PATH: usize = 4096;

/// Sends a part.
///
/// # Errors
/// If the child is gone.
pub(super) fn send_part(part: &TreePart, socket: BorrowedFd<'_>) -> Result<(), Errno> {
    let none = MountAttributes::from_bits(0);
    let (kind, attributes, mount) = match &part.change {
        TreeChange::Restrict(attributes) => (RESTRICT, *attributes, None),
        TreeChange::Attach(new) => (ATTACH, none, Some(new.mount.as_fd())),
        TreeChange::TryAttach(new) => (TRY_ATTACH, none, Some(new.mount.as_fd())),
    };
    let mut bytes = vec![kind];
    bytes.extend(attributes.bits().to_le_bytes());
    bytes.extend_from_slice(part.path.as_os_str().as_bytes());
    send_message(socket, &bytes, mount.as_slice())
}

/// Receives a part; `None` if the agent is gone.
pub(super) fn receive_part(socket: BorrowedFd<'_>) -> Option<TreePart> {
    let mut bytes = [0; HEAD + MAX_PATH];
    let (size, mut descriptors) = receive_message(socket, &mut bytes).ok()?;
    part_of(bytes.get(..size)?, descriptors.pop())
}

fn part_of(bytes: &[u8], mount: Option<OwnedFd>) -> Option<TreePart> {
    let (head, path) = bytes.split_at_checked(HEAD)?;
    let (kind, attributes) = head.split_first()?;
    let bits = u64::from_le_bytes(attributes.try_into().ok()?);
    let new = mount.map(|mount| crate::replace::NewMount { mount });
    Some(TreePart {
        path: PathBuf::from(OsStr::from_bytes(path)),
        change: match *kind {
            RESTRICT => TreeChange::Restrict(MountAttributes::from_bits(bits)),
            ATTACH => TreeChange::Attach(new?),
            TRY_ATTACH => TreeChange::TryAttach(new?),
            _ => return None,
        },
    })
}

/// The child's answer.
#[derive(Debug)]
pub(super) enum TreeReply {
    /// A step is done.
    Done,
    /// The completed tree.
    Tree(OwnedFd),
    /// A step failed: nothing follows.
    Failed(ReplaceError),
}

/// Sends an answer. If the agent is gone, the answer is not needed.
pub(super) fn send_reply(socket: BorrowedFd<'_>, reply: &TreeReply) {
    let (done, tree) = match reply {
        TreeReply::Done => (Ok(()), None),
        TreeReply::Tree(tree) => (Ok(()), Some(tree.as_fd())),
        TreeReply::Failed(error) => (Err(*error), None),
    };
    let _ = send_message(socket, &Reply(done).to_bytes(), tree.as_slice());
}

/// Receives an answer; `None` if the child ended.
pub(super) fn receive_reply(socket: BorrowedFd<'_>) -> Option<TreeReply> {
    let mut bytes = [0; Reply::SIZE];
    let (size, mut descriptors) = receive_message(socket, &mut bytes).ok()?;
    let reply = Reply::from_bytes(bytes).filter(|_| size == Reply::SIZE)?;
    Some(match (reply.0, descriptors.pop()) {
        (Ok(()), Some(tree)) => TreeReply::Tree(tree),
        (Ok(()), None) => TreeReply::Done,
        (Err(error), _) => TreeReply::Failed(error),
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::descriptor_message::sockets;
    use super::*;
    use crate::replace::{NewMount, Step};

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let (ours, theirs) = sockets().unwrap();
        let mount = || NewMount {
            mount: File::open("/").unwrap().into(),
        };
        let read_only = MountAttributes::from_options("ro".as_ref());
        for (change, kind) in [
            (TreeChange::Restrict(read_only), "Restrict"),
            (TreeChange::Attach(mount()), "Attach"),
            (TreeChange::TryAttach(mount()), "TryAttach"),
        ] {
            let path = "a b/c".into();
            send_part(&TreePart { path, change }, ours.as_fd()).unwrap();
            let received = receive_part(theirs.as_fd()).unwrap();
            assert_eq!(received.path, PathBuf::from("a b/c"));
            assert!(
                format!("{:?}", received.change).starts_with(kind),
                "{kind}: {received:?}"
            );
        }
        let error = ReplaceError::Failed(Step::OpenMountPoint, Errno::LOOP);
        send_reply(ours.as_fd(), &TreeReply::Failed(error));
        let failed = receive_reply(theirs.as_fd());
        assert!(matches!(failed, Some(TreeReply::Failed(it)) if it == error));
        send_reply(
            ours.as_fd(),
            &TreeReply::Tree(File::open("/").unwrap().into()),
        );
        let tree = receive_reply(theirs.as_fd());
        assert!(matches!(tree, Some(TreeReply::Tree(_))));
        assert!(part_of(&[ATTACH; HEAD], None).is_none());
        drop(ours);
        assert!(receive_part(theirs.as_fd()).is_none());
    }
}
