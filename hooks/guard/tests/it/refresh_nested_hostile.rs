//! Many, silent and dead binds within a volume, and a refresh that is killed at any moment.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::refresh::RefusedReason;
use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    BoundMounts, HelperProcess, RefreshAct, Refreshed, TuckRecords, refresh_container,
};
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{Fuse, bind, helper, mount_of, mount_tmpfs, mounts_of_host, test_if};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};

use crate::refresh_scene::volume::Scene;
use crate::refresh_scene::{can_run, reason, refusal};

/// A container with a volume at `/data` and volumes in that.
struct Nested {
    scene: Scene,
    count: usize,
}

impl Nested {
    fn new(plugin: &str, count: usize) -> Self {
        let nested = Self {
            scene: Scene::new(),
            count,
        };
        let mut binds = vec![mount_of(&nested.scene.volume(), "/data", "rprivate")];
        for number in 0..count {
            let source = nested.source(plugin, number);
            fs::create_dir_all(&source).unwrap();
            fs::write(source.join("file"), number.to_string()).unwrap();
            binds.push(mount_of(
                &source,
                &format!("/data/{}", name(number)),
                "rprivate",
            ));
        }
        nested.add_places();
        nested.scene.pod.write_spec(&binds);
        nested
    }

    fn source(&self, plugin: &str, number: usize) -> PathBuf {
        let pod = self.scene.pod.directory();
        pod.join(format!("volumes/{plugin}/{}", name(number)))
    }

    fn add_places(&self) {
        for number in 0..self.count {
            fs::create_dir(self.scene.volume().join(name(number))).unwrap();
        }
    }

    fn mount_anew(&self, content: &str) {
        self.scene.mount_anew(content);
        self.add_places();
    }

    fn inside(&self, plugin: &str) -> Vec<Inside> {
        let inner = (0..self.count).map(|number| {
            Inside::of(
                self.source(plugin, number),
                format!("data/{}", name(number)).leak(),
            )
        });
        let outer = Inside::of(self.scene.volume(), "data");
        [outer].into_iter().chain(inner).collect()
    }

    fn refresh_within(
        &self,
        helper: &HelperProcess,
        time: Duration,
        container: &Container,
    ) -> Refreshed {
        let pod = &self.scene.pod;
        let mounts = BoundMounts::open(&pod.bundle(), &pod.directory()).unwrap();
        refresh_container(
            helper,
            time,
            &container.process,
            Some(container.spec()),
            &[&mounts],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::at(&pod.places().kubelet_roots[0].join("tucks")),
        )
        .unwrap()
    }
}

fn name(number: usize) -> String {
    format!("v{number}")
}

const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// None may be lost, and a refresh has its time limit.
#[test_if(can_run)]
fn hundreds_of_binds_come_along() {
    let nested = Nested::new(EMPTY_DIR, 256);
    nested.scene.admit();
    let container = Container::start(nested.scene.root(), &nested.inside(EMPTY_DIR));
    let mounts = container.mounts();
    nested.mount_anew("2");
    let host = mounts_of_host();
    let start = Instant::now();
    let refreshed = nested.scene.refresh(&container);
    let took = start.elapsed();
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?} after {took:?}");
    assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
    assert_eq!(container.read("data/v255/file").as_deref(), Some("255"));
}

/// Each new mount is a descriptor of the agent.
#[test_if(can_run)]
fn a_volume_with_too_many_binds_stays() {
    let nested = Nested::new(EMPTY_DIR, 257);
    nested.scene.admit();
    let container = Container::start(nested.scene.root(), &nested.inside(EMPTY_DIR));
    let mounts = container.mounts();
    nested.mount_anew("2");
    let refreshed = nested.scene.refresh(&container);
    let refused = reason(&refreshed);
    assert!(refused.ends_with("257 instead of 256"), "{refused}");
    assert_eq!(refusal(&refreshed), RefusedReason::ManyNestedBinds);
    assert_eq!(container.mounts(), mounts);
}

/// Each silent source takes the time of a probe.
#[test_if(can_run)]
fn silent_sources_do_not_delay_a_refresh_beyond_its_time() {
    for (plugin, are_gone) in [(CSI, false), (EMPTY_DIR, true)] {
        let Some(mut fuse) = Fuse::mounted() else {
            return;
        };
        fuse.begin();
        let nested = Nested::new(plugin, 10);
        let sources = (0..10).map(|number| nested.source(plugin, number));
        let sources: Vec<_> = sources.collect();
        if !are_gone {
            sources.iter().for_each(|source| mount_tmpfs(source));
        }
        nested.scene.admit();
        let mut binds = nested.inside(plugin);
        if are_gone {
            binds.truncate(1);
        }
        let container = Container::start(nested.scene.root(), &binds);
        nested.mount_anew("2");
        for source in &sources {
            bind(&fuse.path(), source);
        }
        let start = Instant::now();
        let refreshed = nested.refresh_within(helper(), Duration::from_secs(1), &container);
        let took = start.elapsed();
        drop(fuse.device.take());
        for source in &sources {
            umount2(source, MntFlags::MNT_DETACH).unwrap();
        }
        assert!(took < Duration::from_secs(60), "{plugin}: {took:?}");
        assert!(refreshed.is_out_of_time, "{refreshed:?}");
    }
}

/// The drivers of several volumes may hang at the same time.
#[test_if(can_run)]
fn silent_sources_do_not_keep_another_volume_from_its_refresh() {
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    fuse.begin();
    let nested = Nested::new(CSI, 4);
    let sources: Vec<_> = (0..4).map(|number| nested.source(CSI, number)).collect();
    sources.iter().for_each(|source| mount_tmpfs(source));
    nested.scene.admit();
    let container = Container::start(nested.scene.root(), &nested.inside(CSI));
    let (healthy, silent) = sources.split_last().unwrap();
    for source in silent {
        bind(&fuse.path(), source);
    }
    mount_tmpfs(healthy);
    fs::write(healthy.join("file"), "new").unwrap();
    let refreshed = nested.refresh_within(helper(), Duration::from_secs(2), &container);
    let read = container.read("data/v3/file");
    drop(fuse.device.take());
    for source in silent {
        umount2(source, MntFlags::MNT_DETACH).unwrap();
    }
    assert_eq!(read.as_deref(), Some("new"), "{refreshed:?}");
}

const CSI: &str = "kubernetes.io~csi";

/// The driver of both was restarted.
#[test_if(can_run)]
fn a_volume_and_the_volumes_in_it_are_mounted_anew_together() {
    let nested = Nested::new(CSI, 2);
    let publish = |content: &str| {
        for number in 0..2 {
            let source = nested.source(CSI, number);
            mount_tmpfs(&source);
            fs::write(source.join("file"), content).unwrap();
        }
    };
    publish("1");
    nested.scene.admit();
    let container = Container::start(nested.scene.root(), &nested.inside(CSI));
    let mounts = container.mounts();
    for content in ["2", "3"] {
        nested.mount_anew(content);
        for number in 0..2 {
            umount2(&nested.source(CSI, number), MntFlags::MNT_DETACH).unwrap();
        }
        publish(content);
        let host = mounts_of_host();
        let refreshed = nested.scene.refresh(&container);
        assert!(refreshed.is_current(), "{refreshed:?}");
        for file in ["data/0", "data/v0/file", "data/v1/file"] {
            assert_eq!(
                container.read(file).as_deref(),
                Some(content),
                "{refreshed:?}"
            );
        }
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
        let again = nested.scene.refresh(&container);
        assert!(again.mounts.is_empty(), "{again:?}");
    }
}

/// The agent is killed with its children: the next refresh finishes.
#[test_if(can_run)]
fn a_refresh_that_is_killed_loses_no_bind() {
    let nested = Nested::new(EMPTY_DIR, 8);
    nested.scene.admit();
    let container = Container::start(nested.scene.root(), &nested.inside(EMPTY_DIR));
    let mounts = container.mounts();
    let time = Duration::from_secs(5);
    for round in 2..80u64 {
        nested.mount_anew(&round.to_string());
        let host = mounts_of_host();
        // SAFETY: the child ends without returning.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let helper = HelperProcess::start().unwrap();
                nested.refresh_within(&helper, time, &container);
                // SAFETY: ends the process without the exit handlers of the parent.
                unsafe { nix::libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                thread::sleep(Duration::from_micros(round * 400));
                kill(child, Signal::SIGKILL).unwrap();
                waitpid(child, None).unwrap();
            }
        }
        let lost = (0..8).filter(|number| {
            let file = format!("data/{}/file", name(*number));
            container.read(&file).as_deref() != Some(&*number.to_string())
        });
        assert_eq!(lost.count(), 0, "at once after {round}");
        let refreshed = nested.scene.refresh(&container);
        assert!(refreshed.is_current(), "{refreshed:?}");
        assert_eq!(container.read("data/0"), Some(round.to_string()));
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
        assert!(container.propagation_at("/data/v7").is_empty());
    }
}

/// A container may write the volume while its mount is replaced.
#[test_if(can_run)]
fn places_that_change_during_a_refresh_reach_nothing_else() {
    let nested = Nested::new(EMPTY_DIR, 4);
    nested.scene.admit();
    let container = Container::start(nested.scene.root(), &nested.inside(EMPTY_DIR));
    let place = nested.scene.volume().join("v2");
    let exchange = || {
        let away = place.with_file_name("away");
        let _ = fs::rename(&place, &away);
        let _ = symlink("/", &place);
        let _ = fs::remove_file(&place);
        let _ = fs::write(&place, "");
        let _ = fs::remove_file(&place);
        let _ = fs::rename(&away, &place);
        let _ = fs::remove_dir(&place);
        let _ = fs::create_dir(&place);
    };
    for round in 2..12 {
        nested.mount_anew(&round.to_string());
        let host = mounts_of_host();
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    exchange();
                }
            });
            let time = Duration::from_secs(5);
            nested.refresh_within(helper(), time, &container);
            is_done.store(true, Ordering::Relaxed);
        });
        assert_eq!(mounts_of_host(), host);
        let refreshed = nested.scene.refresh(&container);
        for number in [0, 1, 3] {
            let file = format!("data/v{number}/file");
            assert_eq!(
                container.read(&file),
                Some(number.to_string()),
                "{refreshed:?}"
            );
        }
        assert_eq!(
            container.read("data/v2/file").as_deref(),
            Some("2"),
            "{round} {refreshed:?}"
        );
        assert_eq!(
            container.read("data/0"),
            Some(round.to_string()),
            "{round} {refreshed:?}"
        );
    }
}
