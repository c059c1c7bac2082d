//! A pod of a kubelet, in a mount namespace of the calling thread's own. The pod has a configMap,
//! keys that are bound as subpaths, and a bundle that names the subpaths.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use serde_json::{Value, json};

use crate::folder::Folder;
use crate::namespace::bind;

/// The spec that containerd wrote for a kubelet's pod, 14 KB without its mounts: most of a spec is
/// not about binds.
const REAL_SPEC: &str = include_str!("../../core/tests/fixtures/kubelet-1.36/config-hostroot.json");

/// A pod with a container and a configMap.
pub struct Pod {
    folder: Folder,
    keys: u32,
}

impl Pod {
    /// A pod with a configMap of `keys` keys; the bundle's spec binds each key.
    pub fn with_keys(keys: u32) -> Self {
        let pod = Self {
            folder: Folder::new(),
            keys,
        };
        fs::create_dir_all(pod.volume()).unwrap();
        fs::create_dir_all(pod.subpath(0).parent().unwrap()).unwrap();
        fs::create_dir(pod.bundle()).unwrap();
        pod.update(0);
        for key in 0..keys {
            fs::write(pod.subpath(key), "").unwrap();
            bind(
                &pod.volume().join(format!("..data/{key}")),
                &pod.subpath(key),
            );
        }
        pod.write_spec(&[]);
        pod
    }

    pub fn bundle(&self) -> PathBuf {
        self.folder.path().join("bundle")
    }

    pub fn config(&self) -> PathBuf {
        self.bundle().join("config.json")
    }

    pub fn directory(&self) -> PathBuf {
        self.folder.path().join("kubelet/pods/uid-1")
    }

    pub fn volume(&self) -> PathBuf {
        self.directory()
            .join("volumes/kubernetes.io~configmap/conf")
    }

    pub fn subpath(&self, key: u32) -> PathBuf {
        self.directory()
            .join(format!("volume-subpaths/conf/app/{key}"))
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

    /// As AtomicWriter does it; every key's content is the number.
    pub fn update(&self, number: u64) {
        let old = fs::read_link(self.volume().join("..data"));
        self.update_keeping_old(number);
        if let Ok(old) = old {
            // A file of it may be a mount point for a moment: AtomicWriter does not try again.
            let _ = fs::remove_dir_all(self.volume().join(old));
        }
    }

    /// The same, but for the removal of the old payload, the last step.
    pub fn update_keeping_old(&self, number: u64) {
        let timestamp = format!("..2026_11_21_05_10_00.{number}");
        let payload = self.volume().join(&timestamp);
        fs::create_dir(&payload).unwrap();
        (0..self.keys)
            .for_each(|key| fs::write(payload.join(key.to_string()), number.to_string()).unwrap());
        symlink(&timestamp, self.volume().join("..data_tmp")).unwrap();
        fs::rename(
            self.volume().join("..data_tmp"),
            self.volume().join("..data"),
        )
        .unwrap();
    }

    /// A spec that binds every key, and more.
    pub fn write_spec(&self, more: &[Value]) {
        let keys = (0..self.keys)
            .map(|key| mount_of(&self.subpath(key), &format!("/etc/app/{key}"), "rprivate"));
        let mounts: Vec<Value> = keys.chain(more.iter().cloned()).collect();
        let mut spec: Value = serde_json::from_str(REAL_SPEC).unwrap();
        (spec["mounts"], spec["linux"]["rootfsPropagation"]) = (mounts.into(), "rslave".into());
        fs::write(self.config(), spec.to_string()).unwrap();
    }
}

/// A bind as the CRI writes it.
pub fn mount_of(source: &Path, destination: &str, propagation: &str) -> Value {
    json!({"type": "bind", "source": source, "destination": destination, "options": ["rbind", propagation, "ro"]})
}
