//! What an admission costs among many mounts: a pod's 30 binds with nothing stale, and one stale subpath mended.
//!
//! Beside it, in the same run, what a reader of mountinfo pays before it has decided anything. Needs root; everything
//! happens in a mount namespace of the bench's own. Compare within one run only.

#![allow(clippy::unwrap_used, reason = "a bench that cannot be set up has nothing to say")]

#[path = "../tests/pod/mod.rs"]
mod pod;

use std::fs;
use std::path::Path;

use bindguard_guard::{Attempt, admit};
use bindguard_sys::read_mount_table;
use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use nix::mount::{MsFlags, mount};
use pod::{Pod, bind, mount_of, own_namespace};

const SIZES: [usize; 4] = [100, 1_000, 10_000, 30_000];
const SUBPATHS: u32 = 5;
const OTHERS: u32 = 24;

/// Five keys of a configMap, two dozen other folders, and the host's root.
fn pod_with_30_binds() -> Pod {
    let pod = Pod::with_keys(SUBPATHS);
    let others = (0..OTHERS).map(|n| mount_of(&pod.directory(), &format!("/other/{n}"), "rprivate"));
    let root = mount_of(Path::new("/"), "/host", "rslave");
    pod.write_spec(&others.chain([root]).collect::<Vec<_>>());
    pod
}

/// Admits the pod's bundle; how many binds were mended.
fn mended(pod: &Pod) -> usize {
    let admission = admit(&pod.bundle(), &pod.policy(), Attempt::First);
    assert!(admission.report.problems.is_empty());
    admission.report.binds.iter().filter(|bind| bind.outcome.is_some()).count()
}

fn admissions(criterion: &mut Criterion) {
    if !own_namespace() {
        return;
    }
    let (pod, crowd) = (pod_with_30_binds(), tempfile::tempdir().unwrap());
    mount(Some("crowd"), crowd.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    mount(None::<&str>, crowd.path(), None::<&str>, MsFlags::MS_PRIVATE, None::<&str>).unwrap();
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
        group.bench_function(BenchmarkId::from_parameter("30 binds, nothing stale"), |b| {
            b.iter(|| assert_eq!(mended(&pod), 0));
        });
        group.bench_function(BenchmarkId::from_parameter("30 binds, 5 stale ones mended"), |b| {
            let update = || {
                number += 1;
                pod.update(number);
            };
            b.iter_batched(update, |()| assert_eq!(mended(&pod), SUBPATHS as usize), BatchSize::PerIteration);
        });
        group.bench_function(BenchmarkId::from_parameter("mountinfo read and parsed, for comparison"), |b| {
            b.iter(|| read_mount_table().unwrap());
        });
        group.finish();
    }
}

criterion_group!(benches, admissions);
criterion_main!(benches);
