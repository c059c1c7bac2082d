//! The cost of an admission among many mounts: a pod's 30 binds with nothing stale, and with five
//! stale subpaths repaired, and of the proof after the create.
//!
//! The same run also measures the time to read mountinfo, for comparison. Needs root; everything
//! happens in the bench's own mount namespace. Compare results within a single run only.

#![allow(
    clippy::unwrap_used,
    reason = "a bench that cannot be set up has nothing to say"
)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use bindguard_guard::{Attempt, admit, prove_container};
use bindguard_sys::read_mount_table;
use bindguard_testing::live::{Container, Inside, make_mounts};
use bindguard_testing::{Folder, Pod, bind, mount_of, own_namespace};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use nix::mount::{MsFlags, mount};
use rustix::time::{ClockId, clock_gettime};

const SIZES: [usize; 4] = [100, 1_000, 10_000, 30_000];
const CONTAINER_MOUNTS: [usize; 3] = [30, 100, 300];
const SUBPATHS: u32 = 5;
const OTHERS: u32 = 16;
const HOST_PATHS: [&str; 8] = [
    "/etc",
    "/usr/share",
    "/lib",
    "/opt",
    "/sys",
    "/dev",
    "/proc",
    "/var/log",
];

/// Five keys of a configMap, directories of the pod, directories of the host, and the host's root.
fn pod_with_30_binds() -> Pod {
    let pod = Pod::with_keys(SUBPATHS);
    let others =
        (0..OTHERS).map(|n| mount_of(&pod.directory(), &format!("/other/{n}"), "rprivate"));
    let host_paths =
        HOST_PATHS.map(|path| mount_of(Path::new(path), &format!("/host-path{path}"), "rprivate"));
    let root = mount_of(Path::new("/"), "/host", "rslave");
    pod.write_spec(&others.chain(host_paths).chain([root]).collect::<Vec<_>>());
    pod
}

/// Admits the pod's bundle; returns the number of repaired binds.
fn repaired_binds(pod: &Pod) -> usize {
    let admission = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First);
    assert!(admission.report.problems.is_empty());
    admission
        .report
        .binds
        .iter()
        .filter(|bind| bind.outcome.is_some())
        .count()
}

/// The processor time of the calling thread: wall time also depends on the machine's other work.
fn work(rounds: u64, mut once: impl FnMut()) -> Duration {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let before = now();
    (0..rounds).for_each(|_| once());
    now() - before
}

fn admissions(criterion: &mut Criterion) {
    if !own_namespace() {
        return;
    }
    let (pod, crowd) = (pod_with_30_binds(), tempfile::tempdir().unwrap());
    mount(
        Some("crowd"),
        crowd.path(),
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    mount(
        None::<&str>,
        crowd.path(),
        None::<&str>,
        MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .unwrap();
    let (mut number, mut made) = (0, 0);
    for size in SIZES {
        for n in made..size {
            let place = crowd.path().join(n.to_string());
            fs::create_dir(&place).unwrap();
            bind(crowd.path(), &place);
        }
        made = size;
        let mut group = criterion.benchmark_group(format!("{size} mounts"));
        group.sample_size(20);
        group.bench_function(
            BenchmarkId::from_parameter("30 binds, nothing stale"),
            |b| {
                b.iter_custom(|rounds| work(rounds, || assert_eq!(repaired_binds(&pod), 0)));
            },
        );
        group.bench_function(
            BenchmarkId::from_parameter("30 binds, 5 stale repaired"),
            |b| {
                b.iter_custom(|rounds| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..rounds {
                        number += 1;
                        pod.update(number);
                        spent += work(1, || assert_eq!(repaired_binds(&pod), SUBPATHS as usize));
                    }
                    spent
                });
            },
        );
        group.bench_function(
            BenchmarkId::from_parameter("mountinfo read and parsed, for comparison"),
            |b| {
                b.iter_custom(|rounds| work(rounds, || drop(read_mount_table().unwrap())));
            },
        );
        group.finish();
    }
}

/// The comparison of a new container's mounts with the record of its admission, in the shim.
fn proofs(criterion: &mut Criterion) {
    if !own_namespace() {
        return;
    }
    let (pod, root) = (Pod::with_keys(0), tempfile::tempdir().unwrap());
    let (host, policy) = (Folder::new(), pod.policy());
    pod.write_spec(&[mount_of(host.path(), "/data", "rprivate")]);
    assert!(admit(&pod.bundle(), &policy, &pod.places(), Attempt::First).is_provable);
    let mut group = criterion.benchmark_group("proof of a container");
    for size in CONTAINER_MOUNTS {
        let data = Inside::of(host.path().to_owned(), "data");
        let container = Container::start_with(root.path(), &[data], || make_mounts(size));
        let pid = container.process.pid();
        let prove = || {
            let proved = prove_container(&pod.bundle(), pid, &policy, &pod.places());
            assert_eq!(proved.report.unproven, 0);
        };
        group.bench_function(BenchmarkId::new("mounts", size), |b| {
            b.iter_custom(|rounds| work(rounds, prove));
        });
        fs::remove_dir_all(root.path().join("many")).unwrap();
    }
    group.finish();
}

criterion_group!(benches, admissions, proofs);
criterion_main!(benches);
