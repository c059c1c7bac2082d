//! What an admission costs among many mounts: a pod's 30 binds with nothing stale, and one stale subpath mended.
//!
//! Beside it, in the same run, what a reader of mountinfo pays before it has decided anything. Needs root; everything
//! happens in a mount namespace of the bench's own. Compare within one run only.

#![allow(clippy::unwrap_used, reason = "a bench that cannot be set up has nothing to say")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bindguard_core::policy::Policy;
use bindguard_guard::{Attempt, admit};
use bindguard_sys::read_mount_table;
use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const SIZES: [usize; 4] = [100, 1_000, 10_000, 30_000];
const SUBPATHS: u32 = 5;
const OTHERS: u32 = 24;

/// A kubelet's folders with one configMap of five keys, each bound as a subpath, and a bundle that names them.
struct Pod {
    folder: tempfile::TempDir,
}

impl Pod {
    fn new() -> Self {
        let pod = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir_all(pod.volume()).unwrap();
        fs::create_dir_all(pod.subpath(0).parent().unwrap()).unwrap();
        pod.update(0);
        for key in 0..SUBPATHS {
            fs::write(pod.subpath(key), "").unwrap();
            bind(&pod.volume().join(format!("..data/{key}")), &pod.subpath(key));
        }
        fs::write(pod.folder.path().join("config.json"), pod.spec()).unwrap();
        pod
    }

    fn pod_directory(&self) -> PathBuf {
        self.folder.path().join("kubelet/pods/uid-1")
    }

    fn volume(&self) -> PathBuf {
        self.pod_directory().join("volumes/kubernetes.io~configmap/conf")
    }

    fn subpath(&self, key: u32) -> PathBuf {
        self.pod_directory().join(format!("volume-subpaths/conf/app/{key}"))
    }

    /// As AtomicWriter does it.
    fn update(&self, number: u64) {
        let timestamp = format!("..2026_11_21_05_10_00.{number}");
        let payload = self.volume().join(&timestamp);
        fs::create_dir(&payload).unwrap();
        (0..SUBPATHS).for_each(|key| fs::write(payload.join(key.to_string()), timestamp.as_bytes()).unwrap());
        let old = fs::read_link(self.volume().join("..data"));
        symlink(&timestamp, self.volume().join("..data_tmp")).unwrap();
        fs::rename(self.volume().join("..data_tmp"), self.volume().join("..data")).unwrap();
        if let Ok(old) = old {
            fs::remove_dir_all(self.volume().join(old)).unwrap();
        }
    }

    fn spec(&self) -> String {
        let bind = |source: PathBuf, to: String| serde_json::json!({"type": "bind", "source": source, "destination": to, "options": ["rbind", "rprivate", "ro"]});
        let subpaths = (0..SUBPATHS).map(|key| bind(self.subpath(key), format!("/etc/app/{key}")));
        let others = (0..OTHERS).map(|n| bind(self.pod_directory(), format!("/other/{n}")));
        let root =
            serde_json::json!({"type": "bind", "source": "/", "destination": "/host", "options": ["rbind", "rslave"]});
        let mounts: Vec<_> = subpaths.chain(others).chain([root]).collect();
        serde_json::json!({"ociVersion": "1.1.0", "mounts": mounts, "linux": {"rootfsPropagation": "rslave"}})
            .to_string()
    }

    fn policy(&self) -> Policy {
        Policy { kubelet_roots: vec![self.folder.path().join("kubelet")], ..Policy::default() }
    }

    fn admit(&self) -> usize {
        let admission = admit(self.folder.path(), &self.policy(), Attempt::First);
        assert!(admission.report.problems.is_empty());
        admission.report.binds.iter().filter(|bind| bind.outcome.is_some()).count()
    }
}

fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
}

/// A shared `/`, as systemd sets it up, without the host seeing any of it.
fn own_namespace() {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    for flags in [MsFlags::MS_PRIVATE, MsFlags::MS_SHARED] {
        mount(None::<&str>, "/", None::<&str>, flags | MsFlags::MS_REC, None::<&str>).unwrap();
    }
}

fn admissions(criterion: &mut Criterion) {
    own_namespace();
    let (pod, crowd) = (Pod::new(), tempfile::tempdir().unwrap());
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
            b.iter(|| assert_eq!(pod.admit(), 0));
        });
        group.bench_function(BenchmarkId::from_parameter("30 binds, 5 stale ones mended"), |b| {
            let update = || {
                number += 1;
                pod.update(number);
            };
            b.iter_batched(update, |()| assert_eq!(pod.admit(), SUBPATHS as usize), BatchSize::PerIteration);
        });
        group.bench_function(BenchmarkId::from_parameter("mountinfo read and parsed, for comparison"), |b| {
            b.iter(|| read_mount_table().unwrap());
        });
        group.finish();
    }
}

criterion_group!(benches, admissions);
criterion_main!(benches);
