//! The kernel's own SMB server, and its client on the same machine: ksmbd and cifs, SMB 3.1.1 over
//! loopback.

mod mountd;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bindguard_testing::skipped;
use mountd::{Mountd, PASSWORD, USER};
use nix::mount::{MsFlags, mount};

const KILL: &str = "/sys/class/ksmbd-control/kill_server";

/// The machine's only server, and the folder that it shares.
pub struct Server {
    folder: tempfile::TempDir,
    mountd: Option<Mountd>,
}

impl Server {
    /// `None`, with a printed reason, if the kernel has no ksmbd or no client.
    pub fn start() -> Option<Self> {
        let has_client =
            fs::read_to_string("/proc/filesystems").is_ok_and(|all| all.contains("\tcifs\n"));
        if !has_client || fs::metadata(KILL).is_err() {
            skipped("this kernel has no ksmbd and no cifs loaded: `make kernels` has");
            return None;
        }
        // In smb2_open: opinfo_put of NULL in 6.1, and now and then a list that is corrupt in 6.12.
        if fs::read_to_string("/proc/sys/kernel/osrelease")
            .unwrap()
            .starts_with("6.")
        {
            skipped("this kernel's ksmbd may die of a file that is opened");
            return None;
        }
        let mut server = Self {
            folder: tempfile::tempdir().unwrap(),
            mountd: None,
        };
        server.begin();
        Some(server)
    }

    /// A folder of the share: what a pod's volume names.
    pub fn share(&self) -> PathBuf {
        let share = self.folder.path().join("volume");
        fs::create_dir_all(&share).unwrap();
        share
    }

    /// Mounts as mount.cifs(8) does: `share`, or a directory in it.
    pub fn mount(&self, share: &str, at: &Path, options: &str) {
        let options = format!("ip=127.0.0.1,user={USER},pass={PASSWORD},vers=3.1.1,{options}");
        let source = format!("//127.0.0.1/{share}");
        mount(
            Some(source.as_str()),
            at,
            Some("cifs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .unwrap();
    }

    /// Begins to serve, or does so again.
    pub fn begin(&mut self) {
        let began = Instant::now();
        self.mountd = loop {
            match Mountd::start(self.folder.path()) {
                Ok(mountd) => break Some(mountd),
                // It is still busy with ending.
                Err(error)
                    if error.kind() == ErrorKind::InvalidInput
                        && began.elapsed() < Duration::from_secs(60) =>
                {
                    thread::sleep(Duration::from_millis(50));
                }
                Err(error) => panic!("start ksmbd: {error}"),
            }
        };
    }

    /// Stops the server: connections are refused.
    pub fn stop(&mut self) {
        fs::write(KILL, "hard").unwrap();
        self.mountd = None;
    }

    /// Runs `work` while nothing arrives at the server. A waiting call gets an answer in the end,
    /// so that a test fails and does not hang.
    pub fn cut_off_during<T>(&self, work: impl FnOnce() -> T) -> T {
        loopback("down");
        let (over, wait) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let _ = wait.recv_timeout(Duration::from_secs(60));
                loopback("up");
            });
            let done = work();
            drop(over);
            done
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::write(KILL, "hard");
    }
}

fn loopback(state: &str) {
    let done = Command::new("ip")
        .args(["link", "set", "lo", state])
        .status();
    assert!(
        done.is_ok_and(|status| status.success()),
        "ip link set lo {state}"
    );
}

/// Drops the names, attributes and pages in the client's caches.
pub fn forget() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}
