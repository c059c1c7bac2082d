//! The kernel's own NFS server, and its client on the same machine: nfsd(7), NFS version 4.2 over
//! loopback.
//!
//! This code replaces exportfs(8) and rpc.mountd(8): it fills the server's caches in advance with
//! every answer that they would request. See the kernel's
//! Documentation/filesystems/nfs/rpc-cache.rst.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bindguard_testing::skipped;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};

const CONTROL: &str = "/proc/fs/nfsd";
const CACHES: &str = "/proc/net/rpc";
/// INSECURE_PORT, ASYNC, NOSUBTREECHECK and FSID of the kernel's uapi/linux/nfsd/export.h
const EXPORT_FLAGS: u32 = 0x2 | 0x10 | 0x400 | 0x2000;
const NEVER: u32 = i32::MAX as u32;

/// The machine's only server, and the folder that it exports.
pub struct Server {
    folder: tempfile::TempDir,
}

impl Server {
    /// `None`, with a printed reason, if the kernel has no nfsd, or another nfsd is running.
    pub fn start() -> Option<Self> {
        let has =
            |name| fs::read_to_string("/proc/filesystems").is_ok_and(|all| all.contains(name));
        if !has("\tnfsd\n") || !has("\tnfs4\n") {
            skipped("this kernel has no nfsd and no NFS 4 loaded: `make kernels` has");
            return None;
        }
        // kernel BUG at net/sunrpc/svc.c:568
        if fs::read_to_string("/proc/sys/kernel/osrelease")
            .unwrap()
            .starts_with("5.")
        {
            skipped("this kernel's nfsd crashes when it stops");
            return None;
        }
        match mount(
            Some("nfsd"),
            CONTROL,
            Some("nfsd"),
            MsFlags::empty(),
            None::<&str>,
        ) {
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(errno) => panic!("mount {CONTROL}: {errno}"),
        }
        if read("threads") != "0" {
            skipped("another nfsd runs here");
            return None;
        }
        let server = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let clients = server.folder.path().join("clients");
        fs::create_dir(&clients).unwrap();
        // The directory of the server's records of clients; newer kernels use a daemon. Without the
        // records, the server begins with a grace period that cannot be ended, in which no client
        // can open a file.
        let _ = control("nfsv4recoverydir", clients.to_str().unwrap());
        // Version 3 would want rpcbind.
        for (file, value) in [
            ("versions", "-3"),
            ("nfsv4leasetime", "10"),
            ("nfsv4gracetime", "10"),
        ] {
            control(file, value).unwrap();
        }
        // Linux 7's client may hold a directory delegation from the server, and then answers from
        // its own cache.
        let _ = fs::write("/sys/module/nfsv4/parameters/directory_delegations", "N");
        server.begin();
        Some(server)
    }

    /// A folder of the export: what a pod's volume names.
    pub fn share(&self) -> PathBuf {
        let share = self.folder.path().join("share");
        fs::create_dir_all(&share).unwrap();
        share
    }

    /// Mounts with the options of the kubelet's mount.nfs(8). The client keeps attributes for its
    /// default time.
    pub fn mount(&self, at: &Path) {
        self.mount_with(at, "");
    }

    /// As `mount`, but never with the filesystem of an older mount of the share.
    pub fn mount_unshared(&self, at: &Path) {
        self.mount_with(at, ",nosharecache");
    }

    fn mount_with(&self, at: &Path, more: &str) {
        let options =
            "vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1,proto=tcp,hard,timeo=600,retrans=2";
        mount(
            Some("127.0.0.1:/share"),
            at,
            Some("nfs"),
            MsFlags::empty(),
            Some(format!("{options}{more}").as_str()),
        )
        .unwrap();
    }

    /// Begins to serve, or does so again.
    pub fn begin(&self) {
        if read("portlist").is_empty() {
            control("portlist", "tcp 2049").unwrap();
        }
        control("threads", "4").unwrap();
        // There are no clients whose locks it would have to wait for.
        let _ = control("v4_end_grace", "Y");
        let folder = self.folder.path().display();
        let (anonymous, root) = (65534, r"\x00000000");
        for (cache, entry) in [
            ("auth.unix.ip", format!("nfsd 127.0.0.1 {NEVER} tests")),
            ("nfsd.fh", format!("tests 1 {root} {NEVER} {folder}")),
            (
                "nfsd.export",
                format!("tests {folder} {NEVER} {EXPORT_FLAGS} {anonymous} {anonymous} 0"),
            ),
        ] {
            fs::write(format!("{CACHES}/{cache}/channel"), entry + "\n").unwrap();
        }
    }

    /// Stops the server: calls on a hard mount wait.
    pub fn stop(&self) {
        control("threads", "0").unwrap();
    }

    /// Runs `work` while the server is stopped. A waiting call gets an answer in the end, so that a
    /// test fails and does not hang.
    pub fn stopped_during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.stop();
        let (over, wait) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let _ = wait.recv_timeout(Duration::from_secs(60));
                self.begin();
            });
            let done = work();
            drop(over);
            done
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = control("threads", "0");
    }
}

/// Drops the names, attributes and pages in the client's caches.
pub fn forget() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

fn read(file: &str) -> String {
    fs::read_to_string(format!("{CONTROL}/{file}"))
        .unwrap()
        .trim()
        .to_owned()
}

fn control(file: &str, value: &str) -> io::Result<()> {
    fs::write(format!("{CONTROL}/{file}"), format!("{value}\n"))
}
