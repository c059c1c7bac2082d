//! The cost of reading every mount namespace of a node with 500 containers: `bindguard holders`,
//! and the doctor's `pinned`.
//!
//! Each container is a process in a mount namespace of its own, with a copy of this machine's
//! mounts, about as many as a container's. Five more have a copy of the whole host, with 2,000
//! mounts of pods on it, as monitoring pods do. Needs root.

#![allow(
    clippy::unwrap_used,
    reason = "a bench that cannot be set up has nothing to say"
)]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use bindguard_core::places::Places;
use bindguard_operator::doctor::pinned;
use bindguard_operator::holders::{HoldersReport, MountsToFind, Trial};
use bindguard_operator::namespaces::Proc;
use bindguard_operator::pods::Pods;
use bindguard_testing::{bind, own_namespace};
use criterion::{Criterion, criterion_group, criterion_main};
use nix::mount::{MsFlags, mount};

const CONTAINERS: usize = 500;
const EXPORTERS: usize = 5;
const MOUNTS: usize = 2_000;

/// A process in a namespace of its own, which ends with the bench.
struct Container(Child);

impl Container {
    fn start() -> Self {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "sleep", "1000000"])
            .stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn has_begun(&self) -> bool {
        fs::read_to_string(format!("/proc/{}/comm", self.0.id()))
            .is_ok_and(|comm| comm.trim_end() == "sleep")
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn started(count: usize) -> Vec<Container> {
    let containers: Vec<_> = (0..count).map(|_| Container::start()).collect();
    while !containers.iter().all(Container::has_begun) {
        std::thread::yield_now();
    }
    containers
}

fn holders(criterion: &mut Criterion) {
    if !own_namespace() {
        return;
    }
    let _containers = started(CONTAINERS);
    let crowd = tempfile::tempdir().unwrap();
    mount(
        Some("crowd"),
        crowd.path(),
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    // Without this call each bind would propagate into the earlier binds.
    mount(
        None::<&str>,
        crowd.path(),
        None::<&str>,
        MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .unwrap();
    for n in 0..MOUNTS {
        let place = crowd.path().join(n.to_string());
        fs::create_dir(&place).unwrap();
        bind(crowd.path(), &place);
    }
    let _exporters = started(EXPORTERS);

    let mut group = criterion.benchmark_group(format!(
        "{CONTAINERS} containers, {EXPORTERS} exporters, {MOUNTS} mounts"
    ));
    group.sample_size(10);
    group.bench_function("every namespace read", |b| {
        b.iter(|| Proc::default().namespaces().unwrap())
    });
    let seen = Proc::default().namespaces().unwrap();
    assert!(seen.others.len() >= CONTAINERS + EXPORTERS);
    let one = crowd.path().join("7");
    for (name, path) in [
        ("holders of one mount", one.as_path()),
        ("holders of /", Path::new("/")),
    ] {
        group.bench_function(name, |b| {
            b.iter(|| {
                let wanted = MountsToFind::at_or_below(path, &seen.own);
                let (pods, places) = (Pods::default(), Places::default());
                let report = HoldersReport::find(
                    path,
                    &wanted,
                    &seen.own,
                    &seen.others,
                    &pods,
                    &places,
                    &|_| Trial::default(),
                );
                assert!(report.holders.len() >= EXPORTERS);
            });
        });
    }
    group.bench_function("pinned mounts", |b| {
        b.iter(|| pinned(&seen.own, &seen.others, &[], &Places::default()))
    });
    group.finish();
}

criterion_group!(benches, holders);
criterion_main!(benches);
