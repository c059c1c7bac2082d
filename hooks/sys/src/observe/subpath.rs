//! A volume-subpath, its volume, and the file that its sub path leads to today.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::{fs, io};

use bindguard_core::error_chain;
use bindguard_core::evidence::{
    FileIdentity, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
};
use bindguard_core::judge::PathInVolume;
use bindguard_core::kubelet::{DATA_LINK, VolumeLayout, VolumeSubpath, Writer};
use bindguard_core::mount_table::MountAttributes;

use crate::failure::{Failure, failed};
use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::observe::origin::{Bound, SubpathOrigin};
use crate::observe::volume_directory::{HeldVolumeDirectories, HeldVolumeDirectory};
use crate::observe::{mount_at, unreadable};
use crate::read_file::unless_absent;
use crate::target::{TargetError, open_target};

/// An open subpath and its open volume: the descriptors show the same files throughout the
/// inspection.
#[derive(Debug)]
pub struct HeldSubpath {
    subpath: VolumeSubpath,
    itself: Result<Handle, Failure>,
    directory: Option<Rc<HeldVolumeDirectory>>,
    seen: OnceCell<Seen>,
}

/// Evidence about a subpath and its volume that comes from the kernel alone.
#[derive(Debug)]
struct Seen {
    mount: Observed<SubpathMount>,
    origin: SubpathOrigin,
}

impl HeldSubpath {
    /// Opens a subpath and its volume.
    pub fn hold(subpath: VolumeSubpath) -> Self {
        Self::hold_among(subpath, &HeldVolumeDirectories::default())
    }

    /// Opens a subpath. `directories` shares each open volume with further subpaths.
    pub fn hold_among(subpath: VolumeSubpath, directories: &HeldVolumeDirectories) -> Self {
        let directory = directories.of(&subpath);
        let mut itself = Handle::as_written(&subpath.path());
        let writer = directory.as_ref().map(|directory| directory.writer());
        if writer != Some(Writer::Kubelet) {
            itself = itself.map(Handle::unqueried);
        }
        Self {
            subpath,
            itself,
            directory,
            seen: OnceCell::new(),
        }
    }

    /// The path of the open subpath.
    pub fn subpath(&self) -> &VolumeSubpath {
        &self.subpath
    }

    /// Closes the descriptors and returns the subpath.
    pub fn into_subpath(self) -> VolumeSubpath {
        self.subpath
    }

    /// The open subpath, for the repair.
    pub fn handle(&self) -> Option<&Handle> {
        self.itself.as_ref().ok()
    }

    /// The directory from which the sub path starts; `None` before the subpath was inspected.
    pub fn volume(&self) -> Option<&Handle> {
        self.seen.get()?.origin.handle()
    }

    /// The volume's directory, if the kubelet writes the volume: the names of such volumes are
    /// unique in a pod.
    pub fn volume_of_kubelet(&self) -> Option<&Handle> {
        let directory = self.directory.as_ref()?;
        match directory.writer() {
            Writer::Kubelet => directory.handle(),
            Writer::Containers => None,
        }
    }

    /// The attributes that a bind of its target needs, if those of [its
    /// volume's](HeldSubpath::volume) mount do not suffice.
    pub fn attributes_to_keep(&self) -> Option<MountAttributes> {
        self.seen.get()?.origin.attributes_to_keep()
    }

    /// The paths to probe first, because a server or a daemon may have to answer: the subpath's
    /// path, then the target's path if known. Empty on a local filesystem.
    pub fn paths_to_probe(&self, mounts: &Mounts) -> Vec<PathBuf> {
        let Seen { mount, origin } = self.look(mounts);
        let mut paths = vec![self.subpath.path()];
        let mount = match mount {
            Observed::Seen(mount) => mount,
            Observed::Absent => return Vec::new(),
            // The NFS client does not open a file that it knows to be gone: the reason may be an
            // answer.
            Observed::Unreadable(_) => return paths,
        };
        let mut is_local = mount.fs_type.is_local();
        if let Observed::Seen(volume) = &origin.volume {
            is_local &= volume.fs_type.is_local();
            if let Ok(sub_path) = PathInVolume::from_mount(mount, volume) {
                let base = match volume.layout {
                    VolumeLayout::Payload => volume.directory.join(DATA_LINK),
                    VolumeLayout::Plain => volume.directory.clone(),
                };
                paths.push(base.join(&sub_path.path));
            }
        }
        match is_local {
            true => Vec::new(),
            false => paths,
        }
    }

    /// Observes both. `answers` belong to the paths of [`HeldSubpath::paths_to_probe`], in its
    /// order.
    pub fn observe(&self, mounts: &Mounts, answers: &[Reach]) -> SubpathEvidence {
        let probed = self.paths_to_probe(mounts).len();
        let Seen { mount, origin } = self.look(mounts);
        let is_silent = probed > 0 && !answers.get(1).is_some_and(Reach::is_answer);
        let (volume, target) = match (mount, &origin.volume) {
            (Observed::Seen(_), Observed::Seen(_)) if is_silent => (
                origin.volume.clone(),
                Observed::Unreadable("its volume did not answer".to_owned()),
            ),
            (Observed::Seen(mount), Observed::Seen(volume)) => {
                let volume = Volume {
                    layout: origin.layout(mount, volume),
                    ..volume.clone()
                };
                let target = self.target(mount, &volume);
                (Observed::Seen(volume), target)
            }
            _ => (origin.volume.clone(), Observed::Absent),
        };
        let reach = answers.first().cloned().unwrap_or(Reach::NotNeeded);
        let mut mount = mount.clone();
        if let Observed::Seen(mount) = &mut mount
            && mount.fs_type.queries_server_for_attributes()
        {
            mount.identity = self.identity_after(&reach);
        }
        SubpathEvidence {
            mount,
            reach,
            volume,
            target,
        }
    }

    /// The identity of the subpath's file, on a filesystem that queries a server. The identity is
    /// read only if the server has just answered.
    fn identity_after(&self, reach: &Reach) -> Observed<FileIdentity> {
        let handle = match &self.itself {
            Ok(handle) => handle,
            Err(error) => return unreadable(error),
        };
        match reach {
            Reach::Silent(_) | Reach::NotProbed | Reach::NotNeeded => {
                Observed::Unreadable("its server did not answer".to_owned())
            }
            Reach::Refused { .. }
                if reach.error_of_dead_source().is_some() || reach.is_not_found() =>
            {
                match handle.kind() {
                    Ok(kind) => Observed::Seen(FileIdentity::of_what_is_gone(kind)),
                    Err(error) => unreadable(&error),
                }
            }
            Reach::Refused { words, .. } => Observed::Unreadable(words.clone()),
            Reach::Alive => identity_of(handle),
        }
    }

    fn look(&self, mounts: &Mounts) -> &Seen {
        self.seen.get_or_init(|| {
            let found = match mount_at(&self.itself, mounts) {
                Ok(found) => found,
                Err(mount) => {
                    let origin = match &self.directory {
                        Some(directory) => SubpathOrigin::of_directory(directory, mounts),
                        None => SubpathOrigin::without(Observed::Absent),
                    };
                    return Seen { mount, origin };
                }
            };
            let entry = &found.entry;
            let identity = match &self.itself {
                _ if entry.fs_type.queries_server_for_attributes() => {
                    Observed::Unreadable("its server was not probed yet".to_owned())
                }
                Ok(handle) => identity_of(handle),
                Err(error) => unreadable(error),
            };
            let mount = SubpathMount {
                root: entry.root.clone(),
                device: entry.device,
                fs_type: entry.fs_type.clone(),
                identity,
                covers_its_equal: found.covers_its_equal(),
            };
            let bound = Bound {
                subpath: &self.subpath,
                entry,
                mount: &mount,
            };
            let origin = bound.origin(self.directory.as_ref(), mounts);
            Seen {
                mount: Observed::Seen(mount),
                origin,
            }
        })
    }

    fn target(&self, mount: &SubpathMount, volume: &Volume) -> Observed<Target> {
        // Without a sub path there is no target; the judge reports the reason.
        let (Ok(sub_path), Some(handle)) = (PathInVolume::from_mount(mount, volume), self.volume())
        else {
            return Observed::Absent;
        };
        if let Some(target) = self.key_in_payload(&sub_path) {
            return Observed::Seen(target);
        }
        let opened = match open_target(handle, &sub_path.path, volume.layout) {
            Ok(opened) => opened,
            Err(TargetError::NoPayload(_)) => return Observed::Absent,
            Err(error) => return Observed::Unreadable(error_chain(&error)),
        };
        let file = opened.file.as_ref().map_or(Observed::Absent, identity_of);
        Observed::Seen(Target {
            timestamp: opened.timestamp,
            file,
        })
    }

    /// The key of a kubelet-written volume, which nearly always exists.
    fn key_in_payload(&self, sub_path: &PathInVolume) -> Option<Target> {
        let directory = self.seen.get()?.origin.directory.as_ref()?;
        let payload = directory.payload()?;
        let key = payload.key(&sub_path.path, directory.handle()?)?;
        Some(Target {
            timestamp: Some(payload.timestamp.clone()),
            file: Observed::Seen(key),
        })
    }
}

fn identity_of(handle: &Handle) -> Observed<FileIdentity> {
    match handle.identity() {
        Ok(identity) => Observed::Seen(identity),
        Err(error) => unreadable(&error),
    }
}

// All volume-subpaths of a node, by the kubelet's folders.

/// Lists the volume-subpaths below a kubelet root, sorted. A missing root has no subpaths.
///
/// The folders above a subpath are the kubelet's own and on its disk; the subpaths themselves are
/// not touched.
///
/// # Errors
/// If a directory cannot be read. A directory that is removed meanwhile is no error: its pod goes
/// away.
pub fn list_subpaths(kubelet_root: &Path) -> Result<Vec<VolumeSubpath>, Failure> {
    let mut found = Vec::new();
    for pod in children(&kubelet_root.join("pods"))? {
        for volume in children(&pod.join("volume-subpaths"))? {
            for container in children(&volume)? {
                for path in children(&container)? {
                    found.extend(VolumeSubpath::from_path(&path, [kubelet_root]));
                }
            }
        }
    }
    found.sort_by_key(VolumeSubpath::path);
    Ok(found)
}

/// True if a subpath is still in its directory. The kubelet removes those of a pod that goes away.
///
/// It reads the directory, which is on the kubelet's disk: opening the subpath itself may wait for
/// a server.
pub fn is_listed(subpath: &VolumeSubpath) -> bool {
    let path = subpath.path();
    let siblings = path.parent().map(children);
    siblings.is_none_or(|siblings| siblings.is_ok_and(|siblings| siblings.contains(&path)))
}

/// The paths in a directory; none if it is missing or a plain file.
///
/// # Errors
/// If the directory cannot be read.
pub fn children(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let list = || {
        let mut paths = Vec::new();
        for entry in unless_absent(fs::read_dir(directory))?
            .into_iter()
            .flatten()
        {
            paths.push(entry?.path());
        }
        Ok(paths)
    };
    list().map_err(failed::<io::Error>("list", directory))
}
