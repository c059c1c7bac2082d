//! Generated histories of a CSI volume in two containers. The driver mounts the volume anew or leaves
//! the volume unmounted. The daemon stops to answer and answers again, /run is full, a refresh is
//! killed, and a container mounts over the volume.
//!
//! After each step: no container shows older content after newer, an empty folder or a daemon that
//! never answered; no own mount is lost; a refresh changed no mount of the host. At the end, with
//! everything quiet, both containers are current, and each mount table and propagation is as at the
//! start. `BINDGUARD_SEED` repeats a run.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    BoundMounts, REPLACE_TIMEOUT, RefreshAct, TuckRecords, refresh_container,
};
use bindguard_guard::{Attempt, admit};
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::scene::Daemon;
use bindguard_testing::{
    Folder, Pod, bind, helper, mount_of, mount_tmpfs, mounts_of_host, rounds, test_if, unmount,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use crate::histories::run_histories;
use crate::refresh_scene::{can_run, supervised};
use crate::refresh_without_record::work;

/// The content of a folder that the second container mounts itself.
const OWN: &str = "own";

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The driver mounts the volume anew.
    MountAnew,
    /// The same with a daemon, which may stop before it answers.
    MountDaemon {
        is_stopped: bool,
    },
    /// The driver unmounts the volume.
    Unmount,
    /// No daemon answers.
    Stop,
    /// All daemons answer again.
    Continue,
    /// The kubelet starts a container anew, if the volume is mounted without a daemon.
    Restart {
        container: usize,
    },
    Refresh {
        container: usize,
    },
    /// A refresh of the first container is killed before a call, on a kernel with or without
    /// `MOVE_MOUNT_BENEATH`.
    KilledRefresh {
        calls: u32,
        has_beneath: bool,
    },
    /// The second container mounts a folder of its own over the volume.
    MountOver,
    UnmountOver,
    /// /run, with the bundles and the records, has no room.
    FillRun,
    FreeRun,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::MountAnew),
        2 => any::<bool>().prop_map(|is_stopped| Step::MountDaemon { is_stopped }),
        1 => Just(Step::Unmount),
        1 => Just(Step::Stop),
        1 => Just(Step::Continue),
        1 => (0..2usize).prop_map(|container| Step::Restart { container }),
        5 => (0..2usize).prop_map(|container| Step::Refresh { container }),
        3 => (0..40u32, any::<bool>())
            .prop_map(|(calls, has_beneath)| Step::KilledRefresh { calls, has_beneath }),
        1 => Just(Step::MountOver),
        1 => Just(Step::UnmountOver),
        1 => Just(Step::FillRun),
        1 => Just(Step::FreeRun),
    ]
}

/// A device as mountinfo prints it.
type Device = (u32, u32);

struct DaemonOfVolume {
    process: Daemon,
    /// The folder that the daemon shows.
    _folder: Folder,
    is_stopped: bool,
    /// False if the daemon was stopped before the volume could show it.
    has_answered: bool,
}

struct History {
    pod: Pod,
    roots: [tempfile::TempDir; 2],
    containers: [Option<Container>; 2],
    version: u64,
    /// The version of each filesystem that the driver mounted, and its daemon's number.
    mounted: HashMap<Device, (u64, Option<usize>)>,
    daemons: Vec<DaemonOfVolume>,
    /// The newest version that a container showed.
    shown: [u64; 2],
    is_covered: bool,
    is_full: bool,
    mounts: [usize; 2],
}

impl History {
    fn new() -> Self {
        let (tmpfs, size) = (Some("tmpfs"), Some("size=512k"));
        mount(tmpfs, "/run", tmpfs, MsFlags::empty(), size).unwrap();
        let pod = Pod::with_keys(0);
        for (folder, place) in [("/run/bundle", pod.bundle()), ("/run/tucks", records(&pod))] {
            fs::create_dir(folder).unwrap();
            fs::create_dir_all(&place).unwrap();
            bind(folder.as_ref(), &place);
        }
        fs::create_dir_all(volume(&pod)).unwrap();
        let mut history = Self {
            pod,
            roots: [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()],
            containers: [None, None],
            version: 0,
            mounted: HashMap::new(),
            daemons: Vec::new(),
            shown: [0; 2],
            is_covered: false,
            is_full: false,
            mounts: [0; 2],
        };
        history.take(Step::MountAnew);
        history.restart(0);
        history.restart(1);
        history
    }

    fn container(&self, number: usize) -> &Container {
        self.containers[number].as_ref().unwrap()
    }

    /// The second container has a bundle of its own.
    fn bundle(&self, number: usize) -> PathBuf {
        match number {
            0 => self.pod.bundle(),
            _ => "/run/bundle-1".into(),
        }
    }

    fn restart(&mut self, number: usize) {
        // The first mount of a container in a user namespace cannot be that of a daemon: its flags are
        // locked.
        let of_tmpfs = self.mounted.get(&device_of(&volume(&self.pod)));
        if self.is_full || of_tmpfs.is_none_or(|(_, daemon)| daemon.is_some()) {
            return;
        }
        if let Some(ended) = self.containers[number].take()
            && number == 0
        {
            self.seen_is_right(ended);
        }
        let bundle = self.bundle(number);
        fs::create_dir_all(&bundle).unwrap();
        let bind = mount_of(&volume(&self.pod), "/data", "rprivate");
        self.pod.write_spec(&[bind]);
        if number == 1 {
            fs::copy(self.pod.config(), bundle.join("config.json")).unwrap();
        }
        let (policy, places) = (self.pod.policy(), self.pod.places());
        let admission = admit(&bundle, &policy, &places, Attempt::First);
        assert!(admission.is_provable, "{admission:?}");
        self.roots[number] = tempfile::tempdir().unwrap();
        let root = self.roots[number].path();
        let binds = [Inside::of(volume(&self.pod), "data")];
        let started = match number {
            0 => Container::start(root, &binds).reading(),
            _ => Container::start_in_user_namespace(root, &binds),
        };
        self.mounts[number] = started.mounts();
        self.containers[number] = Some(started);
        self.shown[number] = 0;
        if number == 1 {
            self.is_covered = false;
        }
    }

    /// The reader waits while its daemon is stopped.
    fn seen_is_right(&mut self, reader: Container) {
        self.take(Step::Continue);
        let seen = reader.stop();
        assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
    }

    fn is_stopped(&self, daemon: Option<usize>) -> bool {
        daemon.is_some_and(|number| self.daemons[number].is_stopped)
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::MountAnew => {
                self.take(Step::Unmount);
                self.version += 1;
                mount_tmpfs(&volume(&self.pod));
                let file = volume(&self.pod).join("0");
                fs::write(file, self.version.to_string()).unwrap();
                self.note_mounted(None);
            }
            Step::MountDaemon { is_stopped } => {
                let folder = Folder::new();
                fs::write(folder.path().join("0"), (self.version + 1).to_string()).unwrap();
                self.take(Step::Unmount);
                let Some(process) = Daemon::showing(folder.path(), &volume(&self.pod)) else {
                    return;
                };
                self.version += 1;
                if is_stopped {
                    process.signal(Signal::SIGSTOP);
                }
                self.daemons.push(DaemonOfVolume {
                    process,
                    _folder: folder,
                    is_stopped,
                    has_answered: !is_stopped,
                });
                self.note_mounted(Some(self.daemons.len() - 1));
            }
            Step::Unmount => while umount2(&volume(&self.pod), MntFlags::MNT_DETACH).is_ok() {},
            Step::Stop | Step::Continue => {
                let signal = match step {
                    Step::Stop => Signal::SIGSTOP,
                    _ => Signal::SIGCONT,
                };
                for daemon in &mut self.daemons {
                    daemon.process.signal(signal);
                    daemon.is_stopped = signal == Signal::SIGSTOP;
                    daemon.has_answered |= !daemon.is_stopped;
                }
            }
            Step::Restart { container } => self.restart(container),
            Step::Refresh { container } => {
                let (bundle, pod) = (self.bundle(container), self.pod.directory());
                let mounts = BoundMounts::open(&bundle, &pod).unwrap();
                let container = self.container(container);
                // A refresh that fails is repeated.
                let _ = refresh_container(
                    helper(),
                    REPLACE_TIMEOUT,
                    &container.process,
                    Some(container.spec()),
                    &[&mounts],
                    RefreshAct::Replace(Notify::None),
                    &TuckRecords::at(&records(&self.pod)),
                );
            }
            Step::KilledRefresh { calls, has_beneath } if self.can_work() => {
                let records = records(&self.pod);
                let work = work(&self.pod, &records, self.container(0), has_beneath);
                supervised::work_killed_after(calls, &work);
            }
            Step::MountOver if !self.is_covered => {
                self.container(1).run_inside(|| {
                    mount_tmpfs("/data".as_ref());
                    fs::write("/data/0", OWN).unwrap();
                });
                self.is_covered = true;
            }
            Step::UnmountOver if self.is_covered => {
                self.container(1).run_inside(|| unmount("/data".as_ref()));
                self.is_covered = false;
            }
            Step::FillRun => {
                let mut file = fs::File::create("/run/full").unwrap();
                while file.write_all(&[0; 4096]).is_ok() {}
                self.is_full = true;
            }
            Step::FreeRun => {
                let _ = fs::remove_file("/run/full");
                self.is_full = false;
            }
            Step::KilledRefresh { .. } | Step::MountOver | Step::UnmountOver => {}
        }
    }

    /// The supervised program expects that its refresh has a result.
    fn can_work(&self) -> bool {
        !self.is_full && self.daemons.iter().all(|it| !it.is_stopped)
    }

    fn note_mounted(&mut self, daemon: Option<usize>) {
        let device = device_of(&volume(&self.pod));
        self.mounted.insert(device, (self.version, daemon));
    }

    fn check(&mut self) {
        for number in 0..2 {
            let init = self.container(number).process.pid();
            let place = format!("/proc/{init}/root/data");
            let read = || fs::read_to_string(Path::new(&place).join("0")).unwrap();
            if number == 1 && self.is_covered {
                assert_eq!(read(), OWN, "an own mount is lost");
                continue;
            }
            let device = device_of(place.as_ref());
            let Some((version, daemon)) = self.mounted.get(&device) else {
                panic!("container {number} shows no mount of the volume: {device:?}");
            };
            let newest = &mut self.shown[number];
            assert!(
                version >= newest,
                "container {number}: {version} after {newest}"
            );
            *newest = *version;
            let has_answered = daemon.is_none_or(|it| self.daemons[it].has_answered);
            assert!(has_answered, "container {number} shows a silent daemon");
            if !self.is_stopped(*daemon) {
                assert_eq!(read(), version.to_string(), "container {number}");
            }
        }
    }

    /// Everything is quiet: both containers become current.
    fn end(mut self) {
        for step in [
            Step::FreeRun,
            Step::Continue,
            Step::UnmountOver,
            Step::MountAnew,
        ] {
            self.take(step);
        }
        let start = Instant::now();
        while self.shown != [self.version; 2] {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "version {}, shown {:?}",
                self.version,
                self.shown
            );
            self.take(Step::Refresh { container: 0 });
            self.take(Step::Refresh { container: 1 });
            self.check();
        }
        for number in 0..2 {
            let container = self.container(number);
            let mounts = (container.mounts(), self.mounts[number]);
            assert_eq!(mounts.0, mounts.1, "mounts of {number}");
            for place in ["/", "/data"] {
                let propagation = container.propagation_at(place);
                assert!(propagation.is_empty(), "{place} of {number}");
            }
        }
        let left = fs::read_dir(records(&self.pod)).unwrap().count();
        assert_eq!(left, 0, "records are left");
        let reader = self.containers[0].take().unwrap();
        self.seen_is_right(reader);
    }
}

impl Drop for History {
    fn drop(&mut self) {
        self.containers = [None, None];
        let places = [volume(&self.pod), self.pod.bundle(), records(&self.pod)];
        for place in places.iter().map(PathBuf::as_path).chain(["/run".as_ref()]) {
            let _ = umount2(place, MntFlags::MNT_DETACH);
        }
    }
}

fn volume(pod: &Pod) -> PathBuf {
    pod.directory().join("volumes/kubernetes.io~csi/pv/mount")
}

fn records(pod: &Pod) -> PathBuf {
    pod.places().kubelet_roots[0].join("tucks")
}

/// Queries no daemon.
fn device_of(path: &Path) -> Device {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).unwrap();
    (found.stx_dev_major, found.stx_dev_minor)
}

#[test_if(can_run)]
fn no_history_of_a_volume_shows_a_wrong_mount() {
    let histories = proptest::collection::vec(steps(), 4..16);
    run_histories(rounds(25, 5000), &histories, run);
}

/// Found by seed 21: the refresh in between knew no mount of the volume and removed the record, and
/// the container's root stayed shared.
#[test_if(can_run)]
fn a_killed_refresh_then_a_refresh_while_the_volume_is_unmounted() {
    for calls in 0..16 {
        let killed = Step::KilledRefresh {
            calls,
            has_beneath: false,
        };
        let refresh = Step::Refresh { container: 0 };
        run(vec![
            Step::MountAnew,
            killed,
            Step::Unmount,
            refresh,
            Step::MountAnew,
        ]);
    }
}

fn run(steps: Vec<Step>) {
    let mut history = History::new();
    for step in steps {
        let host = mounts_of_host();
        history.take(step);
        if matches!(step, Step::Refresh { .. } | Step::KilledRefresh { .. }) {
            assert_eq!(mounts_of_host(), host, "the host's mounts");
        }
        history.check();
    }
    history.end();
}
