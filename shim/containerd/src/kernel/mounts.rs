//! System calls for root filesystems: a user namespace for mappings of ids, and loop devices.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, clone};
use nix::unistd::pause;
use rustix::process::{Pid, Signal, set_parent_process_death_signal};

/// Forks a child that is the only member of a new user namespace, and idles until it is killed.
pub fn child_in_user_namespace() -> io::Result<Pid> {
    let mut stack = [0; 16 * 1024];
    let idle = Box::new(|| {
        // If the shim is killed now, the child dies with the thread that forked it.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        loop {
            pause();
        }
    });
    // SAFETY: without CLONE_VM this is a fork: the child has copies of all memory, so it cannot
    // harm the parent. The child makes two system calls that are allowed after a fork of a process
    // with threads, and never returns.
    let child = unsafe {
        clone(
            idle,
            &mut stack,
            CloneFlags::CLONE_NEWUSER,
            Some(libc::SIGCHLD),
        )
    }?;
    Pid::from_raw(child.as_raw()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

// linux/loop.h
const LOOP_SET_FD: libc::Ioctl = 0x4C00;
const LOOP_CLR_FD: libc::Ioctl = 0x4C01;
const LOOP_SET_STATUS64: libc::Ioctl = 0x4C04;
const LOOP_SET_DIRECT_IO: libc::Ioctl = 0x4C08;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

#[repr(C)]
#[derive(Default)]
struct LoopInfo {
    places: [u64; 5],
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    names: [[u64; 8]; 2],
    encrypt_key: [u64; 4],
    init: [u64; 2],
}

#[repr(C)]
#[derive(Default)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// The options for attaching a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoopMode {
    /// Writes are not allowed.
    pub read_only: bool,
    /// Bypass the page cache.
    pub direct_io: bool,
}

/// The number of a loop device that is currently free; `control` is /dev/loop-control.
pub fn free_loop_device(control: &File) -> io::Result<u32> {
    let number = ioctl(control, LOOP_CTL_GET_FREE, 0)?;
    u32::try_from(number).map_err(io::Error::other)
}

/// Attaches a file to a loop device, which detaches the file after the last user. EBUSY: a
/// competing process attached first.
pub fn attach_loop_device(device: &File, file: &File, mode: LoopMode) -> io::Result<()> {
    let mut flags = LO_FLAGS_AUTOCLEAR;
    if mode.direct_io {
        flags |= LO_FLAGS_DIRECT_IO;
    }
    if mode.read_only {
        flags |= LO_FLAGS_READ_ONLY;
    }
    let config = LoopConfig {
        fd: u32::try_from(file.as_raw_fd()).map_err(io::Error::other)?,
        info: LoopInfo {
            flags,
            ..LoopInfo::default()
        },
        ..LoopConfig::default()
    };
    match ioctl(device, LOOP_CONFIGURE, (&raw const config).addr()) {
        // Before Linux 5.8.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
            attach_in_steps(device, file.as_raw_fd(), flags)
        }
        result => result.map(drop),
    }
}

fn attach_in_steps(device: &File, file: RawFd, flags: u32) -> io::Result<()> {
    let fd = usize::try_from(file).map_err(io::Error::other)?;
    ioctl(device, LOOP_SET_FD, fd)?;
    let info = LoopInfo {
        flags,
        ..LoopInfo::default()
    };
    let set = || {
        ioctl(device, LOOP_SET_STATUS64, (&raw const info).addr())?;
        if flags & LO_FLAGS_DIRECT_IO != 0 {
            ioctl(device, LOOP_SET_DIRECT_IO, 1)?;
        }
        Ok(())
    };
    set().inspect_err(|_| drop(ioctl(device, LOOP_CLR_FD, 0)))
}

fn ioctl(device: &File, request: libc::Ioctl, argument: usize) -> io::Result<i32> {
    // SAFETY: private to this file. The argument is a number, or the address of a struct in the
    // kernel's layout that outlives the call and that none of these requests writes to.
    let answer = unsafe { libc::ioctl(device.as_raw_fd(), request, argument) };
    Ok(Errno::result(answer)?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    use super::*;

    #[test]
    fn the_structs_have_the_kernels_sizes() {
        assert_eq!(size_of::<LoopInfo>(), 232);
        assert_eq!(size_of::<LoopConfig>(), 304);
    }

    /// The calls for kernels before 5.8; newer kernels still have them.
    #[test]
    fn attached_by_the_older_calls() {
        let open = |path: &str| OpenOptions::new().read(true).write(true).open(path);
        let Ok(control) = open("/dev/loop-control") else {
            let _ = writeln!(
                io::stderr(),
                "SKIPPED attached_by_the_older_calls: no loop devices"
            );
            return;
        };
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        // a competing process may take the free device first
        let attached = (0..100).find_map(|_| {
            let number = free_loop_device(&control).ok()?;
            let device = open(&format!("/dev/loop{number}")).ok()?;
            let flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
            attach_in_steps(&device, image.as_file().as_raw_fd(), flags)
                .ok()
                .map(|()| (number, device))
        });
        let (number, _device) = attached.unwrap();
        let of_device =
            |name: &str| fs::read_to_string(format!("/sys/block/loop{number}/{name}")).unwrap();
        assert_eq!(of_device("size").trim(), "2048");
        assert_eq!(of_device("loop/autoclear").trim(), "1");
        assert_eq!(of_device("loop/dio").trim(), "1");
    }
}
