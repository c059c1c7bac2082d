//! A user namespace for an idmapped mount whose bind has ids of its own.
//!
//! A child is forked into it, and waits until the agent has written its ids and opened it. The
//! namespace lives on by its descriptor.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;

use bindguard_core::spec::IdMaps;
use nix::libc;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::fork::ChildProcess;

/// A new user namespace that maps these ids.
///
/// # Errors
/// If the kernel refuses.
pub fn user_namespace_of(ids: &IdMaps) -> io::Result<File> {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Until the other end closes.
    let wait = || _ = rustix::io::read(&theirs, &mut [0; 1]);
    let child = ChildProcess::start(libc::CLONE_NEWUSER, &[theirs.as_raw_fd()], wait)?;
    let process = format!("/proc/{}", child.pid());
    fs::write(format!("{process}/uid_map"), ids.users.to_proc())?;
    fs::write(format!("{process}/gid_map"), ids.groups.to_proc())?;
    let users = File::open(format!("{process}/ns/user"))?;
    child.kill();
    drop(ours);
    Ok(users)
}
