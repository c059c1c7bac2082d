//! The staging mount of a dead CSI volume.
//!
//! A driver mounts a volume once for the node (staging) and binds that mount for each pod
//! (publish). Many drivers mount only staging anew after a restart: blobfuse, k8s-csi-s3. The bind
//! stays dead, and only a new pod gets a new bind.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::evidence::Reach;
use bindguard_core::kubelet::{Plugin, STAGING_MOUNT};
use bindguard_sys::{Handle, Mounts};

use crate::csi_record::csi_record_in;
use crate::probes::Probes;

/// Limit of staging folders that are compared.
const MAX_FOLDERS: usize = 4096;

/// The advice for a dead volume whose staging mount answers.
const STAGING_ALIVE: &str = "host mount dead, staging alive: its driver does not mount the volume of a running pod anew; only a new pod gets the new mount";

/// The reason why a volume is dead, with the advice if only the staging mount of the volume
/// answers.
pub fn dead_volume(volume: &Path, words: String, probes: &Probes) -> String {
    match staging_mount(volume).is_some_and(|staging| is_alive(&staging, probes)) {
        true => format!("{words}; {STAGING_ALIVE}"),
        false => words,
    }
}

/// The staging mount of the volume that is published at this path,
/// `<root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount`, by the kubelet's records. No folder
/// on the way is in a volume.
fn staging_mount(publish: &Path) -> Option<PathBuf> {
    let csi = Plugin::csi();
    let folder = publish
        .parent()
        .filter(|_| publish.ends_with(csi.below()))?;
    let root = folder.ancestors().nth(5)?;
    if folder.parent()?.file_name()? != csi.folder() {
        return None;
    }
    let volume = csi_record_in(folder)?;
    let is_mounted = |staging: &PathBuf| {
        let handle = Handle::of(staging).map(Handle::unqueried);
        let mount = handle
            .ok()
            .and_then(|handle| Mounts::default().mount_of(&handle).ok());
        mount.is_some_and(|mount| mount.is_mount_point)
    };
    let folders = fs::read_dir(volume.staging_folders(root)?)
        .into_iter()
        .flatten();
    let folders = folders
        .flatten()
        .take(MAX_FOLDERS)
        .map(|entry| entry.path());
    let mut of_volume = folders
        .filter(|folder| csi_record_in(folder).is_some_and(|record| record.is_of_volume(&volume)));
    let staging = of_volume.next().map(|folder| folder.join(STAGING_MOUNT));
    let staging = staging.or_else(|| volume.old_staging_mount(root));
    staging.filter(is_mounted)
}

fn is_alive(staging: &Path, probes: &Probes) -> bool {
    matches!(probes.reaches(&[staging.to_owned()])[..], [Reach::Alive])
}
