//! The CSI volumes that their drivers write as the kubelet writes a secret: secrets-store, cert-manager.
//!
//! A process that can write the directory of a volume can make `..data` and payloads of its own. So
//! a volume counts only if
//!
//! * it is inline: a claim's volume can be writable for another pod;
//! * no container of the pod has a writable bind of the volume or of a part, also no container that
//!   ended: an init container may have left a `..data`;
//! * its filesystem is local: a FUSE daemon could answer each look-up differently, or never.
//!
//! A container that has the kubelet's root, or may remount, is not looked for: such a container
//! reaches every file of the node.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::kubelet::Plugin;
use bindguard_core::paths::lies_in;
use bindguard_core::refresh::RefusedReason;
use bindguard_sys::{Handle, Mounts, current_payload, open_without_waiting};

use super::pod_folder::PodFolder;
use crate::csi_record::csi_record_in;

/// A volume of a driver.
#[derive(Debug)]
pub(super) struct DriverVolume {
    pub(super) name: PathBuf,
    pub(super) handle: Handle,
}

/// The volumes of the pod with this folder.
pub(super) fn driver_volumes(pod: &Path) -> Vec<DriverVolume> {
    let folders = fs::read_dir(pod.join("volumes").join(Plugin::csi().folder()));
    let folders = folders.into_iter().flatten().flatten();
    let volumes = folders.filter_map(|entry| {
        Some(DriverVolume {
            handle: payload_of_driver(&entry.path())?,
            name: entry.file_name().into(),
        })
    });
    volumes.collect()
}

/// The directory of a driver's volume in this folder of the kubelet. `None` if the volume is not
/// inline, is not local, or lacks AtomicWriter's layout. Waits for no daemon and no server.
pub fn payload_of_driver(folder: &Path) -> Option<Handle> {
    // From here on the kernel has the whole path to the mount point in its cache.
    let _folder = Handle::of(folder).ok()?;
    let directory = folder.join(Plugin::csi().below());
    let mounts = Mounts::default();
    let is_local = |handle: &Handle| mounts.is_local(handle);
    let handle = open_without_waiting(&directory, is_local).ok()?;
    if !is_local(&handle) || current_payload(&handle).is_err() {
        return None;
    }
    csi_record_in(folder)?.is_inline().then_some(handle)
}

/// The reason not to refresh the files of a volume, by the sources of all writable binds of the
/// pod's containers. `None` for `writable`: the binds are not known.
pub(super) fn refusal(
    name: &Path,
    pod: &PodFolder,
    writable: Option<&[PathBuf]>,
) -> Option<RefusedReason> {
    let Some(writable) = writable else {
        return Some(RefusedReason::MountsUnknown);
    };
    let volume = pod
        .path()
        .join("volumes")
        .join(Plugin::csi().folder())
        .join(name);
    let subpaths = pod.path().join("volume-subpaths").join(name);
    let mut writable = writable.iter().filter_map(|source| pod.path_in(source));
    writable
        .any(|source| {
            let is_part = [&volume, &subpaths].iter().any(|of| lies_in(&source, of));
            is_part || lies_in(&volume, &source)
        })
        .then_some(RefusedReason::WritableVolume)
}
