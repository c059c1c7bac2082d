//! Any path is a subpath's, a volume's, or none of the kubelet's. A subpath or volume is below the
//! kubelet's root, and names that a container chose lead nowhere else.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use bindguard_core::kubelet::{MountedVolume, Plugin, TimestampDirectory, VolumeSubpath};
use bindguard_core::mount_table::MountRoot;
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::Scope;

/// Panics if a path breaks these properties.
pub fn check(bytes: &[u8]) {
    let path = Path::new(OsStr::from_bytes(bytes));
    let places = Places::default();
    if let Some(subpath) = VolumeSubpath::from_path(path, places.kubelet_roots()) {
        assert_eq!(subpath.path(), path);
        lies_in_a_root(&subpath.pod_directory(), &places);
        for plugin in Plugin::all() {
            lies_in_a_root(&subpath.volume_directory(plugin), &places);
        }
    }
    if let Some(volume) = MountedVolume::from_path(path, places.kubelet_roots()) {
        lies_in_a_root(volume.mount_point(), &places);
        assert!(path.starts_with(volume.mount_point()));
    }
    for scope in [
        Scope::HostRoot,
        Scope::RuntimeDirectories,
        Scope::AnySubmounts,
    ] {
        let _ = SourceKind::from_path(path, &places, scope).name();
    }
    if let Some(timestamp) = TimestampDirectory::from_name(path.as_os_str()) {
        assert!(!timestamp.name().contains('/'));
    }
    let root = MountRoot::from_kernel(bytes);
    assert!(bytes.starts_with(root.path.as_os_str().as_bytes()));
}

fn lies_in_a_root(path: &Path, places: &Places) {
    assert!(
        places
            .kubelet_roots()
            .into_iter()
            .any(|root| path.starts_with(root)),
        "{}",
        path.display()
    );
    assert!(
        !path.components().any(|part| part == Component::ParentDir),
        "{}",
        path.display()
    );
}
