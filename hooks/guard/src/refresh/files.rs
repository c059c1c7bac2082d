//! The single files that a container engine bound (moby#15793), or that a pod has as hostPath, and
//! the ways to sources on the host.
//!
//! The host path comes from the container's own spec. Every round walks the path anew, from `/` on,
//! and keeps the folders open while the way is judged. A container may be able to write a folder.

use std::fmt::Debug;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::evidence::{FileKind, FilePlace, Reach};
use bindguard_core::mount_table::{MountAttributes, MountTable};
use bindguard_core::refresh::{
    BoundFile, Refused, RefusedReason, ReliedOn, SubpathInContainer, Way, WayFolder, can_lead,
    files_in_container,
};
use bindguard_core::report::MountResult;
use bindguard_core::spec::{MountMakers, RequestedPropagation, SpecView};
use bindguard_core::text::{lies_below, lies_in};
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, Mounts, walk_host_path};
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

use crate::SourceError;
use crate::probes::Probes;
use crate::refresh::{CurrentFiles, changed, not_opened, place_of, place_of_source, refuse_shared};

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
        let mut binds = Vec::new();
        for bind in spec.binds() {
            let source = bind.source();
            if let (true, Some(directory), Some(name)) =
                (source.is_absolute(), source.parent(), source.file_name())
            {
                binds.push(Self {
                    directory: directory.to_owned(),
                    name: name.into(),
                    destination: bind.destination().to_owned(),
                    denied: bind.denied,
                });
            }
        }
        binds
    }

    /// The binds of a pod's spec whose sources are outside the kubelets' folders. The kubelet and
    /// the pod write into the kubelets' folders, whose binds have their own refreshes.
    pub fn of_pod(spec: &SpecView<'_>, kubelet_roots: &[PathBuf]) -> Vec<Self> {
        let mut binds = Self::of_spec(spec);
        binds.retain(|bind| {
            let mut roots = kubelet_roots.iter();
            !roots.any(|root| lies_in(&bind.directory, root))
        });
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
        match mounts.open_without_waiting(&self.source()) {
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
        mut binds: Vec<FileBind>,
        init: u32,
        others: &'a dyn RunningContainers,
    ) -> (Self, Vec<SourceError>) {
        binds.retain(|bind| !bind.is_of_directory());
        let ways = binds.iter().map(WalkedWay::of);
        let errors = ways.filter_map(Result::err).collect();
        let files = Self {
            binds,
            started: start_time(init),
            others,
        };
        (files, errors)
    }

    /// The binds that are followed.
    pub fn binds(&self) -> &[FileBind] {
        &self.binds
    }
}

impl CurrentFiles for BoundFiles<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let mut files = Vec::new();
        for bind in &self.binds {
            // While the way cannot be walked, nothing is known of the bind's mounts. A file that is
            // replaced at this moment has no place: the mount counts as stale, and the next round
            // sees the new file.
            if let Ok(walked) = WalkedWay::of(bind) {
                files.push(BoundFile {
                    directory: bind.directory.clone(),
                    name: bind.name.clone(),
                    destination: bind.destination.clone(),
                    place: walked.directory,
                    current: walked.file.map(|(_, place)| place),
                });
            }
        }
        files_in_container(table, &files)
    }

    /// Refuses a way that a container or a user may have changed since the start of the container.
    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult> {
        let mut binds = Vec::new();
        for bind in &self.binds {
            if bind.directory == stale.volume && bind.name == stale.sub_path {
                binds.push(bind);
            }
        }
        let bind = *binds.first().ok_or(MountResult::KeyGone)?;
        refuse_shared(stale)?;
        let WalkedWay { way, file, .. } = WalkedWay::of(bind).map_err(not_opened)?;
        if let Some(refused) = way.mount_point() {
            return Err(refused.into());
        }
        let (file, place) = file.ok_or(MountResult::KeyGone)?;
        let relied_on = way.relied_on(&stale.mount, self.started)?;
        let to_write = !stale.mount.is_read_only();
        refuse_writable_way(&way, &relied_on, (&place, to_write), self.others)?;
        // The container may have remounted its mount, or have mounted a file of its own with the same
        // name.
        let here = |bind: &&FileBind| bind.destination == stale.mount.mount_point;
        let made = match binds[..] {
            [only] => Some(only),
            _ => binds.into_iter().find(here),
        };
        let settings = CloneSettings {
            denied: made.map(|bind| bind.denied).unwrap_or_default(),
            ..CloneSettings::default()
        };
        Ok((file, settings))
    }
}

impl WalkedWay {
    fn of(bind: &FileBind) -> Result<Self, SourceError> {
        let source = bind.source();
        if !bind.answers() {
            let source = source.display();
            return Err(SourceError::new(format!("{source} does not answer")));
        }
        let (way, named_in, end) = walk(&source)?;
        let Some(folder) = named_in.and_then(|index| way.folders.get(index)) else {
            let directory = bind.directory.display();
            let why = format!("the directory {directory} is gone");
            return Err(SourceError::new(why));
        };
        let directory = folder.place.clone();
        let file = match end {
            Some(file) => Some(place_of(&file, &Mounts::default()).map(|place| (file, place))?),
            None => None,
        };
        Ok(Self {
            way,
            directory,
            file,
        })
    }
}

/// Walks a path. Returns the way, the index of the folder in which the path's last name was looked
/// up, and the file at the end.
fn walk(path: &Path) -> Result<(Way, Option<usize>, Option<Handle>), SourceError> {
    let walk = walk_host_path(path).map_err(SourceError::of("walk to a bound file"))?;
    let mounts = Mounts::default();
    let mut folders = Vec::with_capacity(walk.folders.len());
    for folder in &walk.folders {
        folders.push(WayFolder {
            path: folder.handle.path().to_owned(),
            place: place_of(&folder.handle, &mounts)?,
            owner: folder.owner,
            mode: folder.mode,
            born: folder.born,
        });
    }
    let look_ups = walk.look_ups;
    Ok((Way { folders, look_ups }, walk.named_in, walk.end))
}

/// The time since 1970 at which a process started; `None` if the start time is unreadable.
fn start_time(pid: u32) -> Option<Duration> {
    let ticks = HeldProcess::open(pid).ok()?.start_time().ok()?;
    let since_boot =
        Duration::from_millis(ticks.checked_mul(1000)? / clock_ticks_per_second().max(1));
    let now = |clock| Duration::try_from(clock_gettime(clock)).ok();
    let boot = now(ClockId::Realtime)?.checked_sub(now(ClockId::Boottime)?)?;
    boot.checked_add(since_boot)
}

// The ways to sources on the host. A container or a user that may write a folder of a way can lead
// the way to another file.

/// A mount namespace, or a container, that may be able to write folders of the host.
#[derive(Debug)]
pub struct Writer {
    /// The container or the process, for people.
    pub name: String,
    /// The folders that the writer may write.
    pub reach: WriterReach,
}

/// The folders of the host that a writer may write.
#[derive(Debug)]
pub enum WriterReach {
    /// Those that its mounts show.
    Mounts {
        table: MountTable,
        /// Places that `table` may lack.
        hidden: Vec<FilePlace>,
    },
    /// Its mounts are not known: those that its spec gives. A container can hide its mounts in a
    /// namespace of its own, and still write through an open directory.
    Spec(Vec<FilePlace>),
    /// Any folder: neither its mounts nor its spec are known.
    Unknown,
}

/// Finds the writers. A refresh needs them only if the way to a file has a symlink or another
/// folder than before.
pub trait RunningContainers: Debug {
    /// The writers at this moment. Each mount table may be large, so `next` reads a single table. A
    /// container that ended meanwhile is left out.
    fn writers(&self) -> Box<dyn Iterator<Item = Writer>>;
}

/// The places that a container may write by the binds of its spec, also by read-only binds if the
/// container may remount them. `None` if a place is not known.
pub fn places_by_binds(spec: &SpecView<'_>, may_remount: bool) -> Option<Vec<FilePlace>> {
    if spec.overlooked().is_some() {
        return None;
    }
    let host = bindguard_sys::read_mount_table().ok()?;
    let mut places = Vec::new();
    for bind in spec.binds() {
        let source = bind.source();
        if may_remount || !bind.denied.is_read_only() {
            places.push(place_of_source(source)?);
        }
        // A read-only bind leaves the mounts below its source writable. crun binds recursively for
        // every word with an r.
        if may_remount || !bind.denied_below.is_read_only() {
            for mount in host.entries() {
                if lies_below(&mount.mount_point, source) {
                    places.push(FilePlace::root_of(mount));
                }
            }
        }
    }
    Some(places)
}

/// The reach of a container whose mounts are not known, by its spec.
pub fn reach_by_spec(spec: &[u8]) -> WriterReach {
    let makers = MountMakers::from_spec(spec);
    let (Ok(makers), Ok(spec)) = (makers, SpecView::from_bytes(spec)) else {
        return WriterReach::Unknown;
    };
    // Slaves and peers receive later mounts of the host.
    let receives_mounts = spec.binds().iter().any(|bind| {
        use RequestedPropagation as Requested;
        !matches!(bind.propagation, Requested::Private | Requested::Unbindable)
    });
    match places_by_binds(&spec, false) {
        Some(places) if makers.has_binds_alone() && !receives_mounts => WriterReach::Spec(places),
        _ => WriterReach::Unknown,
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
    let mut first: Option<(usize, RefusedReason, String)> = None;
    for Writer { name, reach } in others.writers() {
        let leads = |folder: &FilePlace| match &reach {
            WriterReach::Mounts { table, hidden } => {
                can_lead(table, hidden, folder, file, to_write)
            }
            WriterReach::Spec(places) => places.iter().any(|place| folder.lies_in(place)),
            WriterReach::Unknown => true,
        };
        let mut folders = relied_on.iter();
        let Some(led) = folders.position(|it| leads(&it.folder.place)) else {
            continue;
        };
        if first.as_ref().is_none_or(|(first, ..)| led < *first) {
            let reason = match reach {
                WriterReach::Mounts { .. } => relied_on[led].reason,
                WriterReach::Spec(_) | WriterReach::Unknown => RefusedReason::MountsUnknown,
            };
            first = Some((led, reason, name));
        }
        if led == 0 {
            break;
        }
    }
    match first {
        Some((led, reason, name)) => Err(way.refusal(&relied_on[led], reason).with_error(name)),
        None => Ok(()),
    }
}

/// Refuses the mount point of a stale mount's source if a container or a user may have led the way
/// to `root` elsewhere.
pub(super) fn refuse_unsafe_way(
    stale: &SubpathInContainer,
    root: &Handle,
    others: &dyn RunningContainers,
) -> Result<(), MountResult> {
    let source = &stale.volume;
    let (Some(directory), Some(name)) = (source.parent(), source.file_name()) else {
        return Err(changed());
    };
    let (way, ..) = walk(directory).map_err(not_opened)?;
    let way = way.to_mount_point(name).ok_or_else(changed)?;
    let relied_on = way.all_relied_on()?;
    let place = place_of(root, &Mounts::default()).map_err(not_opened)?;
    let to_write = !stale.mount.is_read_only();
    Ok(refuse_writable_way(
        &way,
        &relied_on,
        (&place, to_write),
        others,
    )?)
}
