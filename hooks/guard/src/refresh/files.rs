//! The single files that a container engine bound (moby#15793), or that a pod has as hostPath.
//!
//! The host path comes from the container's own spec. Every round walks the path anew, from `/` on,
//! and keeps the folders open while the way is judged. A container may be able to write a folder.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::evidence::{FileKind, FilePlace, Reach};
use bindguard_core::kubelet::{Plugin, VolumeSubpath, Writer};
use bindguard_core::mount_table::{MountAttributes, MountEntry, MountTable, Propagation};
use bindguard_core::paths::lies_in;
use bindguard_core::refresh::{
    BoundFile, Refused, RefusedReason, SubpathInContainer, Way, files_in_container,
};
use bindguard_core::spec::{Bind, RequestedPropagation, SpecView};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, HostWalk, Mounts, WalkError, open_without_waiting, walk_host_path};

use crate::probes::Probes;
use crate::refresh::current_files::CurrentFiles;
use crate::refresh::current_files::PodFolder;
use crate::refresh::current_files::{folders_on_the_way, refuse_writable_way};
use crate::refresh::outcome::NotReplaced;
use crate::refresh::round::{PlaceError, place_of};
use crate::refresh::running::RunningContainers;

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
            },
            errors,
        )
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
        way: &Way,
        file: &FilePlace,
        stale: &SubpathInContainer,
    ) -> Result<(), Refused> {
        let mount = &stale.mount;
        let relied_on = way.relied_on(mount, self.started)?;
        let to_write = !mount.is_read_only();
        refuse_writable_way(way, &relied_on, (file, to_write), self.others)
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

    fn has(&self, stale: &SubpathInContainer) -> bool {
        self.binds_of(stale).next().is_some()
    }

    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, NotReplaced> {
        let bind = self.binds_of(stale).next().ok_or(NotReplaced::KeyGone)?;
        let refused = |reason| Err(Refused::new(reason, &stale.mount.mount_point).into());
        let is_shared = |mount: &MountEntry| mount.propagation.peer_group.is_some();
        // A new mount there would reach the host and other containers.
        if stale.parent.as_ref().is_none_or(is_shared) {
            return refused(RefusedReason::ParentIsShared);
        }
        if is_shared(&stale.mount) {
            return refused(RefusedReason::MountIsShared);
        }
        let WalkedWay { way, file, .. } = WalkedWay::of(bind)?;
        if let Some(refused) = way.mount_point() {
            return Err(refused.into());
        }
        let (file, place) = file.ok_or(NotReplaced::KeyGone)?;
        self.judge(&way, &place, stale)?;
        Ok(file)
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
            ..
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

// Errors on the way to a file that a container engine bound.

/// Why a bound file cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum BoundFileError {
    /// The path could not be walked.
    #[error("walk to a bound file")]
    Walk(#[from] WalkError),
    /// A daemon or server on the way is silent.
    #[error("{} does not answer", .0.display())]
    Silent(PathBuf),
    /// The directory of the file is gone.
    #[error("the directory {} is gone", .0.display())]
    NoDirectory(PathBuf),
    /// The place of a folder or of the file is not known.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

// A bind of a container's spec, and its source on the host as it is now.

/// A bind of a container's spec.
#[derive(Debug)]
pub(super) struct SpecifiedBind {
    pub(super) index: usize,
    /// The source; the kernel's name of a source in the folder of the pod.
    pub(super) source: PathBuf,
    pub(super) destination: PathBuf,
    pub(super) settings: CloneSettings,
    pub(super) denied: MountAttributes,
    pub(super) is_shared: bool,
    /// True for a source in the folder of the pod: only root can change the way.
    pub(super) is_in_pod: bool,
    /// True if the host may mount the source anew.
    pub(super) is_volume: bool,
}

impl SpecifiedBind {
    pub(super) fn of(bind: &Bind<'_>, is_volume: bool) -> Self {
        Self {
            index: bind.index(),
            source: bind.source().to_owned(),
            destination: bind.destination().to_owned(),
            settings: settings_of(bind),
            denied: bind.denied(),
            is_shared: bind.propagation() == RequestedPropagation::Shared,
            is_in_pod: false,
            is_volume,
        }
    }

    pub(super) fn of_pod(bind: &Bind<'_>, pod: &PodFolder) -> Self {
        let in_pod = pod.path_in(bind.source());
        let Some(source) = in_pod.filter(|source| source != pod.path()) else {
            return Self::of(bind, false);
        };
        let is_volume = !is_of_kubelet_written_volume(&source, pod.path());
        Self {
            source,
            is_in_pod: true,
            ..Self::of(bind, is_volume)
        }
    }

    /// The source, if it is a mount point now and no server has to answer.
    pub(super) fn open_mount_point(&self) -> Option<(Handle, FilePlace)> {
        let (handle, source) = BindSource::open_without_waiting(&self.source)?;
        let place = self.place_of_mount_point(&source)?;
        Some((handle, place))
    }

    /// The source, the place of the source, and the mount that a runtime would make of the source.
    /// `None` if a symlink leads elsewhere.
    pub(super) fn open_source(&self) -> Option<(Handle, FilePlace, MountEntry)> {
        let (handle, source) = BindSource::open_without_waiting(&self.source)?;
        if source.path != self.source {
            return None;
        }
        let place = source.place()?;
        let mount = MountEntry {
            mount_point: self.destination.clone(),
            attributes: source.mount.attributes.with_denied_by(self.denied),
            propagation: Propagation::default(),
            ..MountEntry::clone(&source.mount)
        };
        Some((handle, place, mount))
    }

    /// The place of an opened file. `None` unless the source of the spec is a mount point, and the
    /// file is the root of that mount.
    pub(super) fn place_of(&self, file: &Handle, mounts: &Mounts) -> Option<FilePlace> {
        self.place_of_mount_point(&BindSource::of(file, mounts)?)
    }

    fn place_of_mount_point(&self, opened: &BindSource) -> Option<FilePlace> {
        let is_mount_point = opened.path == self.source && opened.mount.mount_point == self.source;
        opened.place().filter(|_| is_mount_point)
    }
}

/// The place of a source of the spec. `None` for a relative path, or if a server would have to
/// answer.
pub(super) fn place_of_source(source: &Path) -> Option<FilePlace> {
    let found = BindSource::open_without_waiting(source).filter(|_| source.is_absolute());
    found?.1.place()
}

fn settings_of(bind: &Bind<'_>) -> CloneSettings {
    CloneSettings {
        below: bind.is_recursive().then(|| bind.denied_below()),
        denied: Some(bind.denied()),
        leaves_flags: bind.leaves_flags(),
        requested: bind.propagation(),
    }
}

/// True for a volume that the kubelet updates through `..data`, and for the volume's subpaths,
/// which `refresh::volumes` refreshes.
fn is_of_kubelet_written_volume(source: &Path, pod: &Path) -> bool {
    let root = pod.parent().and_then(Path::parent);
    let subpath = root.and_then(|root| VolumeSubpath::from_path(source, [root]));
    let mut written = Plugin::all().filter(|plugin| plugin.writer() == Writer::Kubelet);
    written.any(|plugin| {
        let volumes = pod.join("volumes").join(plugin.folder());
        match &subpath {
            Some(subpath) => fs::symlink_metadata(volumes.join(subpath.volume())).is_ok(),
            None => lies_in(source, &volumes),
        }
    })
}
