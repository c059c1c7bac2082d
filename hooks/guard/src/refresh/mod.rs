//! Refreshes running containers. Each kind of bind has a module that finds the current files:
//!
//! * [`volumes`]: a `subPath` of a volume that the kubelet, or a CSI driver in the same way, writes
//! * [`mounts`]: a mount that the host mounted anew, with the nested binds
//! * [`files`]: a single file of the host that was replaced
//! * [`host_roots`]: a bind that keeps mounts of the host alive, and the release of its copies
//!
//! [`container`] replaces the stale mounts. In pods the host's subpaths are re-bound first: from
//! then on every restart finds the current file, whatever shim starts the container.

mod container;
mod files;
mod host_roots;
mod mounts;
mod round;
mod volumes;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use bindguard_core::error_chain;
use bindguard_core::evidence::FilePlace;
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{
    KeptMounts, NestedBind, Refused, RefusedReason, SpecBind, SubpathInContainer,
};
use bindguard_core::report::MountResult;
use bindguard_core::spec::{Bind, SpecUsers};
use bindguard_sys::enter::{
    ContainerNamespace, EnterError, Entered, MountNamespace, MountsLock, Replacement,
};
use bindguard_sys::observe::BindSource;
use bindguard_sys::replace::{CloneSettings, NewMount};
use bindguard_sys::{Handle, Mounts, OldKernel, make_folders, unless_absent, write_new_file};

use crate::SourceError;

pub use crate::rebind::{REPLACE_TIMEOUT, VolumeOfPod, rebind_volume};
pub use container::{MAX_MOUNTS_OF_FILE, RefreshAct, Refreshed, find_stale, refresh_container};
pub use files::{
    BoundFiles, FileBind, RunningContainers, Writer, WriterReach, places_by_binds, reach_by_spec,
};
pub use host_roots::{HostRoots, Release, Released, releasable_copies, release_copies};
pub use mounts::BoundMounts;
pub use volumes::{PodVolumes, payload_of_driver};

/// A container's init process, held against reuse of its pid; a child that hangs in a container;
/// and the process that starts the children.
pub use bindguard_sys::enter::{
    Abandoned, HeldProcess, HelperProcess, NamespaceError, ProcessError,
};

/// The result of a mount that is not replaced because of this error.
fn failed(error: impl Error) -> MountResult {
    let error = error_chain(&error);
    MountResult::Failed { error }
}

/// As [`failed`], with the step that failed.
fn failed_to(act: &str, error: impl Error) -> MountResult {
    let error = format!("{act}: {}", error_chain(&error));
    MountResult::Failed { error }
}

/// The same, if the current file cannot be opened.
fn not_opened(error: impl Error) -> MountResult {
    failed_to("open the current file", error)
}

/// The result of a mount whose container changed its mounts during the refresh.
fn changed() -> MountResult {
    let error = "the mount table of the container changed meanwhile".to_owned();
    MountResult::Failed { error }
}

/// The source of a bind that is nested in a volume.
#[derive(Debug)]
pub struct OpenedNested {
    pub file: Handle,
    /// The container's mount of the bind. If that mount is gone, the mount that a runtime would make.
    pub like: MountEntry,
    /// The settings of the new mount.
    pub settings: CloneSettings,
}

/// Files on the host, open while containers are refreshed.
pub trait CurrentFiles {
    /// The mounts of a container that show the files, judged at this moment.
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer>;

    /// The binds of the container's spec that were mounted in one of the `shown` directories and are
    /// gone.
    fn missing_in(&self, _table: &MountTable, _shown: &[SubpathInContainer]) -> Vec<SpecBind> {
        Vec::new()
    }

    /// Probes the sources of these stale mounts together, for the next opens: each silent source
    /// takes time.
    fn probe_sources(&self, _stale: &[&SubpathInContainer]) {}

    /// Called before the new mount of this file is attached beneath the stale mount.
    ///
    /// # Errors
    /// If the stale mount must stay, because a later refresh would not know the new mount.
    fn note_replacement(
        &self,
        _stale: &SubpathInContainer,
        _file: &Handle,
        _new: &NewMount,
    ) -> Result<(), MountResult> {
        Ok(())
    }

    /// Called before the stale mount is detached, if the mount beneath is not the mount of
    /// [`Self::note_replacement`]: propagation attaches a copy.
    ///
    /// # Errors
    /// As there.
    fn note_arrived(
        &self,
        _stale: &SubpathInContainer,
        _beneath: &MountEntry,
    ) -> Result<(), MountResult> {
        Ok(())
    }

    /// Called after a new mount has replaced a stale mount, with the container's current table.
    fn note_attached(&self, _new: &SubpathInContainer, _table: &MountTable) {}

    /// The mounts below a stale mount that go with that mount, by the container's table; `None` if
    /// a mount is replaced only without mounts below.
    ///
    /// # Errors
    /// If a mount below must not be lost.
    fn mounts_below(
        &self,
        _stale: &SubpathInContainer,
        _table: &MountTable,
    ) -> Result<Option<KeptMounts>, MountResult> {
        Ok(None)
    }

    /// Opens the source of a bind that is nested in a stale mount, for a new mount, and records the
    /// place of that source.
    ///
    /// # Errors
    /// If the bind must stay as it is.
    fn open_nested(&self, _nested: &NestedBind) -> Result<OpenedNested, MountResult> {
        Err(changed())
    }

    /// Opens the file or directory that a stale mount should show now, with the settings of the new
    /// mount.
    ///
    /// # Errors
    /// [`MountResult::KeyGone`] if there is none, or if the mount must stay.
    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult>;
}

/// A bind of a spec.
#[derive(Debug)]
struct SpecifiedBind {
    index: usize,
    /// The source; the kernel's name of a source in the folder of the pod.
    source: PathBuf,
    destination: PathBuf,
    /// The settings of new mounts in place of the container's.
    settings: CloneSettings,
    /// True for a source in the folder of the pod: only root can change the way.
    is_in_pod: bool,
    /// True if the host may mount the source anew.
    is_volume: bool,
}

impl SpecifiedBind {
    fn of(bind: &Bind<'_>, is_volume: bool) -> Self {
        Self {
            index: bind.index,
            source: bind.source().to_owned(),
            destination: bind.destination().to_owned(),
            settings: CloneSettings {
                below: bind.is_recursive.then_some(bind.denied_below),
                denied: bind.denied,
                leaves_flags: bind.leaves_flags,
                requested: bind.propagation,
            },
            is_in_pod: false,
            is_volume,
        }
    }

    /// True if the stale mount is that of the bind.
    fn is_of(&self, stale: &SubpathInContainer) -> bool {
        self.source == stale.volume && self.destination == stale.mount.mount_point
    }

    /// The source. `None` if a symlink leads elsewhere, or if a server would have to answer.
    fn open(&self) -> Option<(Handle, BindSource)> {
        let opened = BindSource::open_without_waiting(&self.source);
        opened.filter(|(_, source)| source.path == self.source)
    }
}

fn mounts_of_host() -> Result<MountTable, SourceError> {
    let host = bindguard_sys::read_mount_table();
    host.map_err(SourceError::of("compare with the mounts of the host"))
}

/// Refuses a mount whose replacement would reach the host and other containers.
fn refuse_shared(stale: &SubpathInContainer) -> Result<(), Refused> {
    let reason = if stale.parent.as_ref().is_none_or(MountEntry::is_shared) {
        RefusedReason::ParentIsShared
    } else if stale.mount.is_shared() {
        RefusedReason::MountIsShared
    } else {
        return Ok(());
    };
    Err(Refused::new(reason, &stale.mount.mount_point))
}

/// The place of a source of the spec. `None` for a relative path, or if a server would have to
/// answer.
fn place_of_source(source: &Path) -> Option<FilePlace> {
    let found = BindSource::open_without_waiting(source).filter(|_| source.is_absolute());
    found?.1.place()
}

/// The place of a file in its filesystem.
fn place_of(file: &Handle, mounts: &Mounts) -> Result<FilePlace, SourceError> {
    let path = file.path().display();
    let mount = mounts
        .mount_of(file)
        .map_err(SourceError::of(format!("find the mount of {path}")))?;
    let resolved = file
        .resolved_path()
        .map_err(SourceError::of(format!("resolve {path}")))?;
    let place = mount.entry.place_in_filesystem(&resolved);
    Ok(FilePlace {
        device: mount.entry.device,
        path: place.ok_or_else(|| SourceError::new(format!("{path} is not below its mount")))?,
    })
}

// A running container: its init, held against reuse of its pid, and the mount namespace that its
// runtime made; and the record of its mounts that become shared for a moment. Sandboxes, whose
// mounts the node's kernel does not show, are refused.

/// Time limit of a step in the container.
const STEP_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between two tries to get the lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(5);

/// The name of gVisor's program and of its processes (`runsc/sandbox/sandbox.go`).
const GVISOR: &[u8] = b"runsc";

/// Why a container could not be refreshed at all.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// Its spec is not known: nothing says which user namespace its mounts belong to.
    #[error("its spec is not known: the container runtime reports none")]
    NoSpec,
    /// Its init process is not in the mount namespace that its runtime made.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Its init process could not be read, for example because it ended.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Its init process is in the node's own mount namespace: it is no container of runc or crun.
    #[error(
        "process {0} is in the node's own mount namespace, as with Kata and other sandboxes, which are not supported"
    )]
    MountsOfNode(u32),
    /// Its init process is the kernel of gVisor, which has mounts of its own.
    #[error("process {0} is gVisor's sandbox, which is not supported")]
    Sandbox(u32),
    #[error(transparent)]
    OldKernel(#[from] OldKernel),
    /// Its mounts cannot be compared with the host's.
    #[error(transparent)]
    Compare(#[from] SourceError),
    /// Another refresh works on the container, or the container holds the lock of its own
    /// namespace.
    #[error("another refresh has locked its mount namespace for {} ms", .0.as_millis())]
    Locked(Duration),
}

impl RefreshError {
    /// True if a later refresh may succeed without any change. For example, another refresh has the
    /// lock, a reader of the process was late, or the process is about to end.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Locked(_) => true,
            Self::Process(error) | Self::Namespace(NamespaceError::Process(error)) => {
                !matches!(error, ProcessError::Table { .. })
            }
            Self::NoSpec
            | Self::Namespace(_)
            | Self::MountsOfNode(_)
            | Self::Sandbox(_)
            | Self::OldKernel(_)
            | Self::Compare(_) => false,
        }
    }
}

/// A running container: its init, and the mount namespace that its runtime made. All checks and
/// entries use the same descriptor of the namespace.
#[derive(Debug)]
struct Container<'a> {
    process: &'a HeldProcess,
    spec: &'a SpecUsers,
    namespace: ContainerNamespace,
}

impl<'a> Container<'a> {
    /// The container with this init. `spec` is the runtime's record of the container, `None` if
    /// unknown.
    ///
    /// # Errors
    /// If the process ended, is no process of a container, or left the mount namespace that its
    /// runtime made.
    fn open(process: &'a HeldProcess, spec: Option<&'a SpecUsers>) -> Result<Self, RefreshError> {
        let namespace = process.mount_namespace()?;
        refuse_sandbox(process, &namespace)?;
        let spec = spec.ok_or(RefreshError::NoSpec)?;
        Ok(Self {
            process,
            spec,
            namespace: namespace.accepted(process, spec.namespace())?,
        })
    }

    /// Starts a child in the container.
    fn enter(
        &self,
        helper: &HelperProcess,
        replacements: Vec<Replacement<'_>>,
        until: Instant,
    ) -> Result<Entered, EnterError> {
        Entered::enter(helper, &self.namespace, replacements, STEP_TIMEOUT, until)
    }

    /// Waits for the lock for at most [`STEP_TIMEOUT`].
    fn lock(&self, until: Instant) -> Result<MountsLock<'_>, RefreshError> {
        let start = Instant::now();
        let timeout = STEP_TIMEOUT.min(until.saturating_duration_since(start));
        loop {
            if let Some(lock) = self.namespace.try_lock()? {
                return Ok(lock);
            }
            if start.elapsed() > timeout {
                return Err(RefreshError::Locked(timeout));
            }
            thread::sleep(LOCK_INTERVAL);
        }
    }
}

/// Refuses a sandbox, whose containers have mounts that the node's kernel does not show. Kata names
/// a process in the node's own namespace, gVisor its own kernel. A container whose program or
/// process is named `runsc` loses only its own refresh.
pub(crate) fn refuse_sandbox(
    process: &HeldProcess,
    namespace: &MountNamespace,
) -> Result<(), RefreshError> {
    if namespace.is_own()? {
        return Err(RefreshError::MountsOfNode(process.pid()));
    }
    // The command line would name gVisor's sandbox, too, but a container can block its readers.
    let program = process.program_name()?;
    if program.starts_with(GVISOR) || process.read("comm")?.starts_with(GVISOR) {
        return Err(RefreshError::Sandbox(process.pid()));
    }
    Ok(())
}

// Records of tucks: the mounts of a container that become shared for a moment, as they were
// before.
//
// If the agent and its child are killed in that moment, the next refresh of the container restores
// the propagation from the record. A record lies in a directory of the host that no container
// reaches. A record names its process by pid and start time, and its mount namespace by number.

/// The default directory. It is on a tmpfs: pids and mount ids begin anew with each boot.
const DIRECTORY: &str = "/run/bindguard/tucks";

/// The directory of the records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TuckRecords {
    directory: PathBuf,
}

impl Default for TuckRecords {
    fn default() -> Self {
        Self::at(Path::new(DIRECTORY))
    }
}

impl TuckRecords {
    /// The records in this directory, which is made when the first record is written.
    pub fn at(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// True if there is a record of a process with this pid.
    fn has(&self, process: &HeldProcess) -> bool {
        self.path(process).symlink_metadata().is_ok()
    }

    /// Writes these mounts of a container, which are about to become shared. A mount of an earlier
    /// record keeps its entry, which describes the state before the kill.
    ///
    /// # Errors
    /// If the process ended, an earlier record cannot be read, or the disk is full.
    fn keep(
        &self,
        container: &Container<'_>,
        mut mounts: Vec<MountEntry>,
    ) -> Result<(), SourceError> {
        let owner = owner(container).map_err(SourceError::of("read the process before a tuck"))?;
        let earlier = self.load(container.process, &owner)?.unwrap_or_default();
        mounts.retain(|mount| {
            let mut at_its_place = earlier.stack_at(&mount.mount_point);
            !at_its_place.any(|known| known.device == mount.device)
        });
        if mounts.is_empty() {
            return Ok(());
        }
        let kept = MountTable::from_entries([earlier.entries(), &mounts].concat());
        let path = self.path(container.process);
        let new = self.directory.join(format!(".{}", container.process.pid()));
        let mut text = owner.into_bytes();
        text.extend(kept.to_mountinfo());
        self.forget_ended();
        // Renamed: a kill in the middle leaves no half record.
        let written = make_folders(&self.directory, 0o700)
            .and_then(|()| write_new_file(&new, &text, 0o600))
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(at_record("write", &path))
    }

    /// The mounts of a process that tucks made shared, as they were before. A record of an earlier
    /// process, or of another namespace, has another first line, and is removed.
    ///
    /// # Errors
    /// If the record cannot be read.
    fn load(&self, process: &HeldProcess, owner: &str) -> Result<Option<MountTable>, SourceError> {
        let path = self.path(process);
        let text = unless_absent(fs::read(&path));
        let Some(text) = text.map_err(at_record("read", &path))? else {
            return Ok(None);
        };
        let table = text
            .strip_prefix(owner.as_bytes())
            .and_then(|rest| MountTable::from_mountinfo(rest).ok());
        if table.is_none() {
            self.forget(process);
        }
        Ok(table)
    }

    /// Removes the record of a process.
    fn forget(&self, process: &HeldProcess) {
        // A record that stays costs the next refresh a check.
        let _ = fs::remove_file(self.path(process));
    }

    /// Removes the records of processes that ended.
    fn forget_ended(&self) {
        let records = fs::read_dir(&self.directory).into_iter().flatten();
        for entry in records.flatten() {
            let name = entry.file_name();
            let pid = name.to_string_lossy().trim_start_matches('.').parse();
            if let Ok(pid) = pid
                && matches!(HeldProcess::open(pid), Err(ProcessError::Ended(_)))
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn path(&self, process: &HeldProcess) -> PathBuf {
        self.directory.join(process.pid().to_string())
    }
}

fn at_record(act: &str, record: &Path) -> impl FnOnce(io::Error) -> SourceError {
    let record = record.display();
    SourceError::of(format!("record the mounts before a tuck: {act} {record}"))
}

/// The first line of a record: the start time of the process, and the number of its mount
/// namespace.
fn owner(container: &Container<'_>) -> Result<String, ProcessError> {
    let number = container.namespace.number()?;
    Ok(format!("{} {number}\n", container.process.start_time()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;
    use std::thread;

    use bindguard_core::spec::SpecUsers;
    use bindguard_testing::deny_call;
    use nix::errno::Errno;
    use nix::libc;

    use super::*;

    /// The mounts of now, which a killed tuck left shared, replaced the record of the mounts before.
    #[test]
    fn a_record_that_cannot_be_read_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let records = TuckRecords::at(folder.path());
        let own = HeldProcess::open(std::process::id()).unwrap();
        let (namespace, spec) = (own.mount_namespace().unwrap(), SpecUsers::from_spec(b"{}"));
        let spec = &spec.unwrap();
        let container = Container {
            process: &own,
            spec,
            namespace: namespace.accepted(&own, spec.namespace()).unwrap(),
        };
        let mounts = || own.mounts().unwrap().entries()[..1].to_vec();
        let unreadable = records.path(&own);
        symlink(&unreadable, &unreadable).unwrap();
        let kept = records.keep(&container, mounts());
        let error = kept.unwrap_err().to_string();
        assert!(error.contains(": read /"), "{error}");
        assert!(unreadable.read_link().is_ok(), "the record is replaced");
        fs::remove_file(&unreadable).unwrap();
        records.keep(&container, mounts()).unwrap();
        let loaded = records
            .load(&own, &owner(&container).unwrap())
            .unwrap()
            .unwrap();
        assert_eq!(loaded.entries().len(), 1);
    }

    /// An agent without a free descriptor removed the records of all containers.
    #[test]
    fn only_the_record_of_a_process_that_ended_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let records = TuckRecords::at(folder.path());
        let (init, ended) = (folder.path().join("1"), folder.path().join("4194305"));
        for record in [&init, &ended] {
            fs::write(record, "").unwrap();
        }
        records.forget_ended();
        assert!(fs::exists(&init).unwrap() && !fs::exists(&ended).unwrap());
        let forgetting = thread::spawn(move || {
            deny_call(libc::SYS_pidfd_open, Errno::EMFILE);
            records.forget_ended();
        });
        forgetting.join().unwrap();
        assert!(fs::exists(&init).unwrap());
    }
}
