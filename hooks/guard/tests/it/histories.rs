//! Generated histories of a pod with two containers: a kubelet, two repairers of which one is
//! killed, and a container that mounts at its own places.
//!
//! After each step: the reader in the first container saw no error, no empty file and no older
//! content after newer; no container lost a mount of its own; the host has the mounts that the
//! kubelet made. At the end, with everything quiet, each existing key is current, and each mount
//! table and propagation is as at the start. `BINDGUARD_SEED` repeats a run.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::RefreshAct;
use bindguard_testing::live::Container;
use bindguard_testing::{bind, rounds, test_if, unmount};
use nix::mount::{MntFlags, umount2};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::refresh_scene::{Scene, can_run, supervised};

const KEYS: u32 = 2;
const PLACES: [&str; KEYS as usize] = ["/etc/app/0", "/etc/app/1"];
/// The content of a file that the second container mounts itself.
const OWN: &str = "own";

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The kubelet writes an update. The old payload stays if AtomicWriter fails to remove it.
    Update {
        keeps_old: bool,
    },
    /// The second key goes, or comes back, by an update.
    Toggle,
    /// The kubelet binds the subpaths again and restarts a container.
    Restart {
        container: usize,
    },
    /// The agent re-binds on the host.
    Rebind,
    Refresh {
        container: usize,
    },
    /// A refresh of the first container is killed before a call, on a kernel with or without
    /// `MOVE_MOUNT_BENEATH`.
    KilledRefresh {
        calls: u32,
        has_beneath: bool,
    },
    /// The second container mounts a file of its own over a place.
    MountOver {
        key: u32,
    },
    /// The second container unmounts its own file.
    UnmountOver {
        key: u32,
    },
    /// The second container replaces the folder of its places by a symlink to the moved folder.
    RenameWay,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<bool>().prop_map(|keeps_old| Step::Update { keeps_old }),
        1 => Just(Step::Toggle),
        1 => (0..2usize).prop_map(|container| Step::Restart { container }),
        2 => Just(Step::Rebind),
        4 => (0..2usize).prop_map(|container| Step::Refresh { container }),
        3 => (0..24u32, any::<bool>())
            .prop_map(|(calls, has_beneath)| Step::KilledRefresh { calls, has_beneath }),
        1 => (0..KEYS).prop_map(|key| Step::MountOver { key }),
        1 => (0..KEYS).prop_map(|key| Step::UnmountOver { key }),
        1 => Just(Step::RenameWay),
    ]
}

struct History {
    scene: Scene,
    containers: Vec<Option<Container>>,
    roots: [tempfile::TempDir; 2],
    version: u64,
    has_second_key: bool,
    /// The newest version that a container showed, by container and key.
    shown: [[u64; KEYS as usize]; 2],
    /// The version under the own mount of the second container, by key.
    covered: [Option<u64>; KEYS as usize],
    /// The versions whose payload is not removed.
    payloads: Vec<u64>,
    mounts: [usize; 2],
    has_moved_way: bool,
    host: Vec<String>,
}

impl History {
    fn new() -> Self {
        let scene = Scene::with_keys(KEYS);
        let mut history = Self {
            scene,
            containers: vec![None, None],
            roots: [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()],
            version: 0,
            has_second_key: true,
            shown: Default::default(),
            covered: Default::default(),
            payloads: Vec::new(),
            mounts: [0; 2],
            has_moved_way: false,
            host: places_of_host(),
        };
        history.update(false);
        history.restart(0);
        history.restart(1);
        history
    }

    fn container(&self, number: usize) -> &Container {
        self.containers[number].as_ref().unwrap()
    }

    /// As AtomicWriter does it.
    fn update(&mut self, keeps_old: bool) {
        self.version += 1;
        let volume = self.scene.pod.volume();
        let old = fs::read_link(volume.join("..data")).unwrap();
        let timestamp = payload(self.version);
        fs::create_dir(volume.join(&timestamp)).unwrap();
        for key in 0..KEYS {
            if key == 0 || self.has_second_key {
                let file = volume.join(&timestamp).join(key.to_string());
                fs::write(file, self.version.to_string()).unwrap();
            }
        }
        symlink(&timestamp, volume.join("..data_tmp")).unwrap();
        fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
        self.payloads.push(self.version);
        if !keeps_old {
            // A file is a mount point for a moment: AtomicWriter does not try again.
            let _ = fs::remove_dir_all(volume.join(old));
        }
    }

    /// The kernel unmounts what is mounted on a file that is removed. The kubelet removes old
    /// payloads, and the agent removes those that the kubelet left.
    fn note_removed_payloads(&mut self) {
        let volume = self.scene.pod.volume();
        self.payloads
            .retain(|version| fs::exists(volume.join(payload(*version))).unwrap());
        for covered in &mut self.covered {
            *covered = covered.filter(|version| self.payloads.contains(version));
        }
    }

    /// The kubelet's `doBindSubPath`, then a new container: the old one has ended.
    fn restart(&mut self, number: usize) {
        if !self.has_second_key {
            // The kubelet fails, and the container waits for the key.
            return;
        }
        if let Some(ended) = self.containers[number].take()
            && number == 0
        {
            seen_is_right(ended);
        }
        for key in 0..KEYS {
            let (file, subpath) = (self.file(key), self.scene.pod.subpath(key));
            if fs::read_to_string(&subpath).ok() != fs::read_to_string(&file).ok() {
                while umount2(&subpath, MntFlags::MNT_DETACH).is_ok() {}
                bind(&file, &subpath);
            }
        }
        let binds = self.scene.binds(KEYS);
        self.roots[number] = tempfile::tempdir().unwrap();
        let root = self.roots[number].path();
        let started = match number {
            0 => Container::start(root, &binds).reading(),
            _ => Container::start_in_user_namespace(root, &binds),
        };
        self.mounts[number] = started.mounts();
        self.containers[number] = Some(started);
        self.shown[number] = Default::default();
        if number == 1 {
            self.covered = Default::default();
            self.has_moved_way = false;
        }
    }

    fn file(&self, key: u32) -> std::path::PathBuf {
        self.scene.pod.volume().join(format!("..data/{key}"))
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Update { keeps_old } => self.update(keeps_old),
            Step::Toggle => {
                self.has_second_key = !self.has_second_key;
                self.update(false);
            }
            Step::Restart { container } => self.restart(container),
            Step::Rebind => self.scene.rebind(),
            Step::Refresh { container } => {
                self.scene.rebind();
                let act = RefreshAct::Replace(Notify::None);
                self.scene.refresh_only(self.container(container), act);
            }
            Step::KilledRefresh { calls, has_beneath } => {
                self.scene.rebind();
                let mut refresh = self.scene.refresh_program(self.container(0));
                refresh.has_beneath = has_beneath;
                supervised::killed_after(calls, &refresh);
            }
            Step::MountOver { key } if self.can_cover(key) => {
                self.container(1).run_inside(|| {
                    fs::write("/own", OWN).unwrap();
                    bind("/own".as_ref(), PLACES[key as usize].as_ref());
                });
                self.covered[key as usize] = Some(self.shown[1][key as usize]);
            }
            Step::UnmountOver { key } if self.covered[key as usize].is_some() => {
                let place = PLACES[key as usize];
                self.container(1).run_inside(|| unmount(place.as_ref()));
                self.covered[key as usize] = None;
            }
            Step::RenameWay if !self.has_moved_way && self.covered == [None, None] => {
                self.container(1).run_inside(|| {
                    fs::rename("/etc/app", "/etc/moved").unwrap();
                    symlink("moved", "/etc/app").unwrap();
                });
                self.has_moved_way = true;
            }
            Step::MountOver { .. } | Step::UnmountOver { .. } | Step::RenameWay => {}
        }
    }

    /// Nothing can be mounted over a file that is removed.
    fn can_cover(&self, key: u32) -> bool {
        let shown = self.shown[1][key as usize];
        !self.has_moved_way
            && self.covered[key as usize].is_none()
            && self.payloads.contains(&shown)
    }

    fn check(&mut self) {
        self.note_removed_payloads();
        for number in 0..2 {
            for key in 0..KEYS {
                let place = PLACES[key as usize];
                let text = self.container(number).read(&place[1..]);
                if number == 1 && self.covered[key as usize].is_some() {
                    assert_eq!(text.as_deref(), Some(OWN), "an own mount is lost");
                    continue;
                }
                let text = text.unwrap_or_else(|| panic!("container {number}: no {place}"));
                let version: u64 = text.parse().unwrap_or_else(|_| panic!("{place}: {text:?}"));
                let newest = &mut self.shown[number][key as usize];
                assert!(version >= *newest, "{place}: {version} after {newest}");
                assert!(version <= self.version, "{place}: {version}");
                *newest = version;
            }
        }
        assert_eq!(places_of_host(), self.host, "the host's mounts");
    }

    /// Everything is quiet: each existing key becomes current.
    fn end(mut self) {
        for key in 0..KEYS {
            self.take(Step::UnmountOver { key });
        }
        let keys = if self.has_second_key { KEYS } else { 1 };
        // Another refresh may have left a lock for a moment.
        let start = Instant::now();
        loop {
            self.take(Step::Refresh { container: 0 });
            self.take(Step::Refresh { container: 1 });
            self.check();
            let current = self
                .shown
                .iter()
                .all(|shown| (0..keys).all(|key| shown[key as usize] == self.version));
            if current {
                break;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "version {}, shown {:?}",
                self.version,
                self.shown
            );
        }
        for number in 0..2 {
            let container = self.container(number);
            assert_eq!(
                container.mounts(),
                self.mounts[number],
                "mounts of {number}"
            );
            assert!(container.propagation_at("/").is_empty(), "/ of {number}");
            for place in PLACES {
                let place = match number == 1 && self.has_moved_way {
                    true => place.replace("app", "moved"),
                    false => place.to_owned(),
                };
                assert!(
                    container.propagation_at(&place).is_empty(),
                    "{place} of {number}"
                );
            }
        }
        let records = fs::read_dir(self.scene.records().directory());
        assert_eq!(records.map_or(0, Iterator::count), 0, "records are left");
        if let Some(reader) = self.containers[0].take() {
            seen_is_right(reader);
        }
    }
}

fn payload(version: u64) -> String {
    format!("..2026_11_21_05_10_01.{version}")
}

fn seen_is_right(reader: Container) {
    let seen = reader.stop();
    assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
}

/// The mount points of the host's table, sorted.
fn places_of_host() -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let mut places = Vec::new();
    for line in table.lines() {
        let place = line.split(' ').nth(4).unwrap_or_default();
        if !Path::new(place).starts_with("/proc") {
            places.push(place.to_owned());
        }
    }
    places.sort_unstable();
    places
}

#[test_if(can_run)]
fn no_history_loses_a_file_or_a_mount() {
    let histories = proptest::collection::vec(steps(), 4..16);
    run_histories(rounds(60, 20_000), &histories, |steps| {
        let mut history = History::new();
        for step in steps {
            history.take(step);
            history.check();
        }
        history.end();
    });
}

/// Runs generated histories; a history fails by a panic.
pub fn run_histories<S: Strategy>(cases: u32, histories: &S, run: impl Fn(S::Value)) {
    let seed = std::env::var("BINDGUARD_SEED").ok();
    let seed = seed.and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| rounds(1, u64::from(std::process::id())));
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        cases,
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let result = TestRunner::new_with_rng(config, rng).run(histories, |history| {
        run(history);
        Ok(())
    });
    println!("seed {seed}");
    if let Err(error) = result {
        panic!("seed {seed}: {error}");
    }
}
