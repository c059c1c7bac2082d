//! The single files that a container engine bound (moby#15793), or that a pod has as hostPath.
//!
//! The host path comes from the container's own spec. Every round walks the path anew, from `/` on,
//! and keeps the folders open while the way is judged. A container may be able to write a folder.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::evidence::{FileKind, FilePlace, Reach};
use bindguard_core::mount_table::{MountAttributes, MountEntry, MountTable};
use bindguard_core::paths::lies_in;
use bindguard_core::refresh::{
    BoundFile, Refused, RefusedReason, ReliedOn, SubpathInContainer, Way, WayFolder,
    files_in_container,
};
use bindguard_core::spec::SpecView;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{
    Handle, HostWalk, Mounts, OpenedTarget, WalkedFolder, open_without_waiting, walk_host_path,
};

use super::bound_file_error::BoundFileError;
use super::current_files::CurrentFiles;
use super::outcome::NotReplaced;
use super::running::RunningContainers;
use crate::probes::Probes;

/// A bind of a spec whose source has a name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileBind {
    /// The directory of the source on the host.
    pub directory: PathBuf,
    /// The name of the source there.
    pub name: PathBuf,
    /// The path in the container.
    pub destination: PathBuf,
    /// The permissions that the spec denies.
    pub denied: MountAttributes,
}

impl FileBind {
    /// The binds of a spec. The open shows which sources are directories.
    pub fn of_spec(spec: &SpecView<'_>) -> Vec<Self> {
        let binds = spec
            .binds()
            .iter()
            .filter(|bind| bind.source().is_absolute());
        let named = binds.filter_map(|bind| {
            let (directory, name) = bind.source().parent().zip(bind.source().file_name())?;
            Some(Self {
                directory: directory.to_owned(),
                name: name.into(),
                destination: bind.destination().to_owned(),
                denied: bind.denied(),
            })
        });
        named.collect()
    }

    /// The binds of a pod's spec whose sources are outside the kubelets' folders. The kubelet and
    /// the pod write into the kubelets' folders, whose binds have their own refreshes.
    pub fn of_pod(spec: &SpecView<'_>, kubelet_roots: &[PathBuf]) -> Vec<Self> {
        let is_of_kubelet = |bind: &Self| {
            let mut roots = kubelet_roots.iter();
            roots.any(|root| lies_in(&bind.directory, root))
        };
        let mut binds = Self::of_spec(spec);
        binds.retain(|bind| !is_of_kubelet(bind));
        binds
    }

    /// True if the source is a directory at this moment. A container sees the new files of a
    /// directory by itself. False for a source of a daemon or server that is silent.
    pub fn is_of_directory(&self) -> bool {
        let walk = self.answers().then(|| walk_host_path(&self.source()));
        let end = walk.and_then(|walk| walk.ok()?.end);
        end.and_then(|end| end.identity().ok())
            .is_some_and(|identity| identity.kind == FileKind::Directory)
    }

    /// True if no server or daemon has to answer on the way to the source.
    pub fn is_local(&self) -> bool {
        let mounts = Mounts::default();
        match open_without_waiting(&self.source(), |handle| mounts.is_local(handle)) {
            Ok(handle) => mounts.is_local(&handle),
            Err(error) => error.kind() == ErrorKind::NotFound,
        }
    }

    /// False if a daemon or server on the way to the source is silent: a walk would wait for its
    /// answer.
    pub fn answers(&self) -> bool {
        let reaches = || Probes::for_create().reaches(&[self.source()]);
        self.is_local() || !matches!(reaches()[..], [Reach::Silent(_) | Reach::NotProbed])
    }

    /// The path on the host.
    pub fn source(&self) -> PathBuf {
        self.directory.join(&self.name)
    }
}

/// The single files that a container's spec binds.
#[derive(Debug)]
pub struct BoundFiles<'a> {
    binds: Vec<FileBind>,
    /// The time since 1970 at which the container's init started; `None` if unknown.
    started: Option<Duration>,
    others: &'a dyn RunningContainers,
    may_be_on_shared: bool,
}

/// The way to a file at a moment.
#[derive(Debug)]
struct WalkedWay {
    way: Way,
    /// The place of the directory in which the bind's name was looked up.
    directory: FilePlace,
    file: Option<(Handle, FilePlace)>,
}

impl<'a> BoundFiles<'a> {
    /// The files of these binds, and the errors of those that cannot be followed. Binds of
    /// directories are left out. `init` is the pid of the container's init, `others` are the
    /// running containers that may be able to write a folder on the way to a file.
    pub fn open(
        binds: Vec<FileBind>,
        init: u32,
        others: &'a dyn RunningContainers,
    ) -> (Self, Vec<BoundFileError>) {
        let binds: Vec<_> = binds
            .into_iter()
            .filter(|bind| !bind.is_of_directory())
            .collect();
        let errors = binds
            .iter()
            .filter_map(|bind| WalkedWay::of(bind).err())
            .collect();
        (
            Self {
                binds,
                started: super::running::started(init),
                others,
                may_be_on_shared: true,
            },
            errors,
        )
    }

    /// The same, without files on a mount that is shared with the host: attaching a new mount there
    /// would reach the host and other pods.
    #[must_use]
    pub fn without_shared(self) -> Self {
        Self {
            may_be_on_shared: false,
            ..self
        }
    }

    /// The binds that are followed.
    pub fn binds(&self) -> impl Iterator<Item = &FileBind> {
        self.binds.iter()
    }

    /// The binds of the file that a stale mount should show.
    fn binds_of(&self, stale: &SubpathInContainer) -> impl Iterator<Item = &FileBind> {
        let binds = self.binds.iter();
        binds.filter(|bind| bind.directory == stale.volume && bind.name == stale.sub_path)
    }

    /// Refuses a way that a container or a user may have changed since the start of the container.
    fn judge(
        &self,
        walked: &WalkedWay,
        file: &FilePlace,
        stale: &SubpathInContainer,
    ) -> Result<(), Refused> {
        let mount = &stale.mount;
        let relied_on = walked.way.relied_on(mount, self.started)?;
        let to_write = !mount.is_read_only();
        refuse_writable_way(&walked.way, &relied_on, (file, to_write), self.others)
    }
}

/// Refuses a way to a file if a running container may write a folder that the way relies on, and
/// has no access to the file. With `to_write`, read access is no access.
pub(super) fn refuse_writable_way(
    way: &Way,
    relied_on: &[ReliedOn<'_>],
    (file, to_write): (&FilePlace, bool),
    others: &dyn RunningContainers,
) -> Result<(), Refused> {
    if relied_on.is_empty() {
        return Ok(());
    }
    let mut first = None;
    for container in others.tables() {
        let Ok(container) = container else {
            return Err(way.refusal(&relied_on[0], RefusedReason::MountsUnknown));
        };
        let leads =
            |relied_on: &ReliedOn<'_>| container.can_lead(&relied_on.folder.place, file, to_write);
        let led = relied_on.iter().position(leads);
        first = first.into_iter().chain(led).min();
        if first == Some(0) {
            break;
        }
    }
    match first.and_then(|first: usize| relied_on.get(first)) {
        Some(relied_on) => Err(way.refusal(relied_on, relied_on.reason)),
        None => Ok(()),
    }
}

impl CurrentFiles for BoundFiles<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let files: Vec<BoundFile> = self.binds.iter().filter_map(observe).collect();
        files_in_container(table, &files)
    }

    /// The container may have remounted its mount, or have mounted a file of its own with the same
    /// name.
    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        let binds: Vec<&FileBind> = self.binds_of(stale).collect();
        let here = |bind: &&FileBind| bind.destination == stale.mount.mount_point;
        let bind = match binds[..] {
            [only] => Some(only),
            _ => binds.into_iter().find(here),
        };
        CloneSettings {
            denied: bind.map(|bind| bind.denied),
            ..CloneSettings::default()
        }
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Option<Result<OpenedTarget, NotReplaced>> {
        let bind = self.binds_of(stale).next()?;
        let refused = |reason| Some(Err(Refused::new(reason, &stale.mount.mount_point).into()));
        let is_shared = |mount: &MountEntry| mount.propagation.peer_group.is_some();
        if !self.may_be_on_shared && stale.parent.as_ref().is_none_or(is_shared) {
            return refused(RefusedReason::ParentIsShared);
        }
        if !self.may_be_on_shared && is_shared(&stale.mount) {
            return refused(RefusedReason::MountIsShared);
        }
        let walked = match WalkedWay::of(bind) {
            Ok(walked) => walked,
            Err(error) => return Some(Err(error.into())),
        };
        if let Some(refused) = walked.way.mount_point() {
            return Some(Err(refused.into()));
        }
        let file = match &walked.file {
            None => None,
            Some((_, place)) => match self.judge(&walked, place, stale) {
                Ok(()) => walked.file.map(|(file, _)| file),
                Err(refused) => return Some(Err(refused.into())),
            },
        };
        Some(Ok(OpenedTarget {
            timestamp: None,
            file,
        }))
    }
}

/// `None` while the way cannot be walked: then nothing is known of the bind's mounts.
fn observe(bind: &FileBind) -> Option<BoundFile> {
    let walked = WalkedWay::of(bind).ok()?;
    let FileBind {
        directory,
        name,
        destination,
        denied: _,
    } = bind.clone();
    // A file that is replaced at this moment has no place: the mount counts as stale, and the next
    // round sees the new file.
    let current = walked.file.map(|(_, place)| place);
    Some(BoundFile {
        directory,
        name,
        destination,
        place: walked.directory,
        current,
    })
}

impl WalkedWay {
    fn of(bind: &FileBind) -> Result<Self, BoundFileError> {
        if !bind.answers() {
            return Err(BoundFileError::Silent(bind.source()));
        }
        let HostWalk {
            folders,
            look_ups,
            named_in,
            end,
        } = walk_host_path(&bind.source())?;
        let mounts = Mounts::default();
        let on_the_way = folders_on_the_way(&folders, &mounts)?;
        let named_in = named_in.and_then(|index| on_the_way.get(index));
        let directory = named_in
            .ok_or_else(|| BoundFileError::NoDirectory(bind.directory.clone()))?
            .place
            .clone();
        let file = match end {
            Some(file) => Some(place_of(&file, &mounts).map(|place| (file, place))?),
            None => None,
        };
        Ok(Self {
            way: Way {
                folders: on_the_way,
                look_ups,
            },
            directory,
            file,
        })
    }
}

/// The way to a folder of the host.
pub(super) fn way_to_folder(folder: &Path) -> Result<Way, BoundFileError> {
    let walk = walk_host_path(folder)?;
    Ok(Way {
        folders: folders_on_the_way(&walk.folders, &Mounts::default())?,
        look_ups: walk.look_ups,
    })
}

fn folders_on_the_way(
    folders: &[WalkedFolder],
    mounts: &Mounts,
) -> Result<Vec<WayFolder>, BoundFileError> {
    let folder = |folder: &WalkedFolder| {
        Ok(WayFolder {
            path: folder.handle.path().to_owned(),
            place: place_of(&folder.handle, mounts)?,
            owner: folder.owner,
            mode: folder.mode,
            born: folder.born,
        })
    };
    folders.iter().map(folder).collect()
}

/// The place of a file in its filesystem.
pub(super) fn place_of(file: &Handle, mounts: &Mounts) -> Result<FilePlace, BoundFileError> {
    let directory = || file.path().to_owned();
    let mount = mounts.mount_of(file);
    let mount = mount
        .map_err(|source| BoundFileError::Mount {
            directory: directory(),
            source,
        })?
        .entry;
    let resolved = file.resolved_path();
    let resolved = resolved.map_err(|source| BoundFileError::Resolve {
        directory: directory(),
        source,
    })?;
    let path = mount
        .place_in_filesystem(&resolved)
        .ok_or_else(|| BoundFileError::NotBelow(directory()))?;
    Ok(FilePlace {
        device: mount.device,
        path,
    })
}
