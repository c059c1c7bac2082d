//! A pod with a subpath of a volume that containers write, in a mount namespace of the calling
//! thread's own.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::report::Outcome;
use bindguard_guard::{Admission, Attempt, admit};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::folder::Folder;
use crate::namespace::{bind, skipped};
use crate::pod::mount_of;

/// The outcome of a bind that was re-bound in the first try.
pub const REBOUND: Option<Outcome> = Some(Outcome::Rebound { tries: 1 });

/// A pod with a subpath, and the subpath's volume.
pub struct Scene {
    pub folder: Folder,
    pub volume: PathBuf,
}

impl Scene {
    /// A volume in a folder of the pod's own.
    pub fn of_plugin(plugin: &str) -> Self {
        let folder = Folder::new();
        let volume = folder
            .path()
            .join(format!("kubelet/pods/uid-1/volumes/{plugin}/data"));
        Self::with_volume(folder, volume)
    }

    /// Two volumes that a sidecar can mount in: an emptyDir without a mount, and a mounted local
    /// volume.
    pub fn with_and_without_a_mount() -> [Self; 2] {
        let mounted = Self::of_plugin("kubernetes.io~local-volume");
        tmpfs(&mounted.volume);
        [Self::of_plugin("kubernetes.io~empty-dir"), mounted]
    }

    /// A volume somewhere on the host.
    pub fn of_host_path() -> Self {
        let folder = Folder::new();
        let volume = folder.path().join("srv/data");
        Self::with_volume(folder, volume)
    }

    fn with_volume(folder: Folder, volume: PathBuf) -> Self {
        fs::create_dir_all(&volume).unwrap();
        fs::create_dir(folder.path().join("bundle")).unwrap();
        let scene = Self { folder, volume };
        fs::create_dir_all(scene.subpath().parent().unwrap()).unwrap();
        scene.write_spec(&[&scene.subpath()]);
        scene
    }

    /// Writes a spec with these binds; at first it has only the subpath.
    pub fn write_spec(&self, sources: &[&Path]) {
        let mounts: Vec<_> = sources
            .iter()
            .map(|source| mount_of(source, "/data", "rprivate"))
            .collect();
        let spec = json!({"mounts": mounts, "linux": {}, "annotations": {}});
        fs::write(self.bundle().join("config.json"), spec.to_string()).unwrap();
    }

    pub fn bundle(&self) -> PathBuf {
        self.folder.path().join("bundle")
    }

    pub fn subpath(&self) -> PathBuf {
        self.folder
            .path()
            .join("kubelet/pods/uid-1/volume-subpaths/data/app/0")
    }

    /// A subpath of a file that a container replaced since.
    pub fn with_replaced(self, file: &str) -> Self {
        fs::write(self.volume.join(file), "old").unwrap();
        let scene = self.bound(file);
        fs::remove_file(scene.volume.join(file)).unwrap();
        fs::write(scene.volume.join(file), "new").unwrap();
        scene
    }

    /// Binds a file or directory of the volume, as the kubelet does.
    pub fn bound(self, sub_path: &str) -> Self {
        let target = self.volume.join(sub_path);
        if fs::metadata(&target).unwrap().is_dir() {
            fs::create_dir(self.subpath()).unwrap()
        } else {
            fs::write(self.subpath(), "").unwrap()
        }
        bind(&target, &self.subpath());
        self
    }

    pub fn policy(&self) -> Policy {
        Policy::default()
    }

    pub fn places(&self) -> Places {
        Places {
            kubelet_roots: vec![self.folder.path().join("kubelet")],
            ..Places::default()
        }
    }

    /// The same policy, but no container may start with a bind that cannot be repaired.
    pub fn refusing(&self) -> Policy {
        Policy {
            unmounted_volumes: Alarm::Refuse,
            dead_sources: Alarm::Refuse,
            ..self.policy()
        }
    }

    pub fn admitted(&self, policy: &Policy) -> Admission {
        admit(&self.bundle(), policy, &self.places(), Attempt::First)
    }

    /// The only bind's verdict, reason and outcome.
    pub fn finding(&self, policy: &Policy) -> (&'static str, String, Option<Outcome>) {
        let report = self.admitted(policy).report;
        let [bind] = &report.binds[..] else {
            panic!("{report:?}")
        };
        (
            bind.verdict().as_str(),
            bind.reason().unwrap_or_default(),
            bind.outcome.clone(),
        )
    }

    /// The content of the subpath's file for the container, which is `state` in a directory.
    pub fn content(&self) -> String {
        let (subpath, inside) = (self.subpath(), self.subpath().join("state"));
        fs::read_to_string(if fs::metadata(&subpath).unwrap().is_dir() {
            inside
        } else {
            subpath
        })
        .unwrap()
    }

    pub fn mounts_at_subpath(&self) -> usize {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        table
            .lines()
            .filter(|line| line.split(' ').nth(4) == self.subpath().to_str())
            .count()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        while self.mounts_at_subpath() > 0 {
            umount2(&self.subpath(), MntFlags::MNT_DETACH).unwrap();
        }
        while umount2(&self.volume, MntFlags::MNT_DETACH).is_ok() {}
    }
}

pub fn tmpfs(at: &Path) {
    mount(
        Some("tmpfs"),
        at,
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
}

/// A FUSE daemon that shows a folder at a mount point: bindfs(1).
pub struct Daemon(Child);

impl Daemon {
    /// `None`, with a printed reason, if there is no bindfs.
    pub fn showing(folder: &Path, at: &Path) -> Option<Self> {
        let Ok(daemon) = Command::new("bindfs").arg("-f").arg(folder).arg(at).spawn() else {
            skipped("no bindfs here");
            return None;
        };
        let daemon = Self(daemon);
        let began = Instant::now();
        while fs::metadata(at).unwrap().dev() == fs::metadata(at.parent().unwrap()).unwrap().dev() {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "bindfs did not mount"
            );
            thread::sleep(Duration::from_millis(5));
        }
        Some(daemon)
    }

    /// SIGSTOP: the daemon does not answer until SIGCONT.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}
