//! The single files that a container engine bound (moby#15793), or that a pod has as hostPath.
//!
//! The host path comes from the container's own spec. Every round walks the path anew, from `/` on,
//! and keeps the folders open while the way is judged. A container may be able to write a folder.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use bindguard_core::evidence::{FileKind, FilePlace, Reach};
use bindguard_core::mount_table::{MountAttributes, MountTable};
use bindguard_core::paths::lies_in;
use bindguard_core::refresh::{BoundFile, SubpathInContainer, Way, files_in_container};
use bindguard_core::report::MountResult;
use bindguard_core::spec::SpecView;
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, HostWalk, Mounts, walk_host_path};
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::SourceError;
use crate::probes::Probes;
use crate::refresh::current_files::{
    CurrentFiles, RunningContainers, folders_on_the_way, not_opened, place_of, refuse_shared,
    refuse_writable_way,
};

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

    /// The binds of the file that a stale mount should show.
    fn binds_of(&self, stale: &SubpathInContainer) -> impl Iterator<Item = &FileBind> {
        let binds = self.binds.iter();
        binds.filter(|bind| bind.directory == stale.volume && bind.name == stale.sub_path)
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

    /// Refuses a way that a container or a user may have changed since the start of the container.
    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, MountResult> {
        let bind = self.binds_of(stale).next();
        let bind = bind.ok_or(MountResult::KeyGone)?;
        refuse_shared(stale)?;
        let WalkedWay { way, file, .. } = WalkedWay::of(bind).map_err(not_opened)?;
        if let Some(refused) = way.mount_point() {
            return Err(refused.into());
        }
        let (file, place) = file.ok_or(MountResult::KeyGone)?;
        let relied_on = way.relied_on(&stale.mount, self.started)?;
        let to_write = !stale.mount.is_read_only();
        refuse_writable_way(&way, &relied_on, (&place, to_write), self.others)?;
        Ok(file)
    }
}

impl WalkedWay {
    fn of(bind: &FileBind) -> Result<Self, SourceError> {
        let source = bind.source();
        if !bind.answers() {
            return Err(SourceError::new(format!(
                "{} does not answer",
                source.display()
            )));
        }
        let HostWalk {
            folders,
            look_ups,
            named_in,
            end,
            ..
        } = walk_host_path(&source)
            .map_err(|error| SourceError::of("walk to a bound file", error))?;
        let mounts = Mounts::default();
        let on_the_way = folders_on_the_way(&folders, &mounts)?;
        let named_in = named_in.and_then(|index| on_the_way.get(index));
        let Some(directory) = named_in.map(|folder| folder.place.clone()) else {
            let directory = bind.directory.display();
            return Err(SourceError::new(format!(
                "the directory {directory} is gone"
            )));
        };
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

/// The time since 1970 at which a process started; `None` if the start time is unreadable.
fn start_time(pid: u32) -> Option<Duration> {
    let ticks = HeldProcess::open(pid).ok()?.start_time().ok()?;
    let since_boot =
        Duration::from_millis(ticks.checked_mul(1000)? / clock_ticks_per_second().max(1));
    let boot = duration(clock_gettime(ClockId::Realtime))?
        .checked_sub(duration(clock_gettime(ClockId::Boottime))?)?;
    boot.checked_add(since_boot)
}

fn duration(time: Timespec) -> Option<Duration> {
    Some(Duration::new(
        u64::try_from(time.tv_sec).ok()?,
        u32::try_from(time.tv_nsec).ok()?,
    ))
}
