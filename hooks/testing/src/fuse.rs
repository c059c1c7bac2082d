//! A FUSE mount whose daemon is the test: it opens `/dev/fuse`, mounts, and answers nothing. See
//! fuse(4).

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A FUSE mount without answers. Dropping its device is the death of its daemon.
pub struct Fuse {
    folder: tempfile::TempDir,
    pub device: Option<File>,
}

impl Fuse {
    pub fn mounted() -> Option<Self> {
        let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else {
            let _ = writeln!(io::stderr(), "SKIPPED: no /dev/fuse here");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        mount(
            Some("silent"),
            folder.path(),
            Some("fuse"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .unwrap();
        Some(Self {
            folder,
            device: Some(device),
        })
    }

    /// Answers the first request, so that the kernel sends further requests. fuse(4):
    /// `struct fuse_init_out`, version 7.31
    pub fn begin(&mut self) {
        begin(self.device.as_mut().unwrap());
    }

    /// Runs `work`; also returns true if a request arrives meanwhile.
    pub fn receives_a_request_during<T>(&self, work: impl FnOnce() -> T) -> (T, bool) {
        let device = self.device.as_ref().unwrap();
        let has_request = || {
            let timeout = Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            };
            poll(&mut [PollFd::new(device, PollFlags::IN)], Some(&timeout)).unwrap() > 0
        };
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            // A caller that gives up takes its request back: it must be seen meanwhile.
            let listening = scope.spawn(|| {
                loop {
                    let was_done = done.load(Ordering::Acquire);
                    let requested = has_request();
                    if requested || was_done {
                        return requested;
                    }
                }
            });
            let worked = work();
            done.store(true, Ordering::Release);
            (worked, listening.join().unwrap())
        })
    }

    /// Takes a request and never answers.
    pub fn take_request(&mut self) {
        assert!(self.device.as_mut().unwrap().read(&mut [0; 8192]).unwrap() > 0);
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().to_owned()
    }
}

/// Answers the first request of a mount with this device.
pub fn begin(device: &mut File) {
    let mut request = [0; 8192];
    assert!(device.read(&mut request).unwrap() > 16);
    let mut answer = [0; 80];
    answer[..4].copy_from_slice(&80u32.to_ne_bytes());
    answer[8..16].copy_from_slice(&request[8..16]);
    answer[16..20].copy_from_slice(&7u32.to_ne_bytes());
    answer[20..24].copy_from_slice(&31u32.to_ne_bytes());
    answer[36..40].copy_from_slice(&4096u32.to_ne_bytes());
    assert_eq!(device.write(&answer).unwrap(), answer.len());
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.device = None;
        umount2(self.folder.path(), MntFlags::MNT_DETACH).unwrap();
    }
}
