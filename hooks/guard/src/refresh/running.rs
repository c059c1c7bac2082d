//! The running containers of the node, and all other processes that may write folders of the host:
//! their names in the folders can lead elsewhere.

use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use bindguard_core::evidence::{FileKind, FilePlace};
use bindguard_core::mount_table::MountTable;
use bindguard_core::paths::lies_below;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_core::spec::{Bind, MountMakers, RequestedPropagation, SpecUsers, SpecView};
use bindguard_sys::enter::{HeldProcess, MountNamespace, ProcessError};
use bindguard_sys::{Mounts, open_without_waiting};
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::inspect::OpenError;
use crate::refresh::files::{SpecifiedBind, place_of_source};
use crate::refresh::host_roots::HostRoots;
use crate::refresh::mounts::BoundMounts;
use crate::refresh::outcome::RefreshError;

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
        /// Places that its table may lack.
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
        if may_remount || !bind.denied().is_read_only() {
            places.push(place_of_source(source)?);
        }
        // A read-only bind leaves the mounts below its source writable. crun binds recursively for
        // every word with an r.
        if may_remount || !bind.denied_below().is_read_only() {
            let mounts = host.entries().iter();
            let below = mounts.filter(|mount| lies_below(&mount.mount_point, source));
            places.extend(below.map(FilePlace::root_of));
        }
    }
    Some(places)
}

/// The reach of a container whose mounts are not known, by its spec.
pub fn reach_by_spec(spec: &[u8]) -> WriterReach {
    let makers = MountMakers::from_spec(spec).ok();
    let makers = makers.filter(MountMakers::has_binds_alone);
    let (Some(_), Ok(spec)) = (makers, SpecView::from_bytes(spec)) else {
        return WriterReach::Unknown;
    };
    // Slaves and peers receive later mounts of the host.
    let is_private = |requested| {
        use RequestedPropagation as Requested;
        matches!(requested, Requested::Private | Requested::Unbindable)
    };
    let are_private = spec
        .binds()
        .iter()
        .all(|bind| is_private(bind.propagation()));
    match places_by_binds(&spec, false).filter(|_| are_private) {
        Some(places) => WriterReach::Spec(places),
        None => WriterReach::Unknown,
    }
}

/// A running container, as its runtime has recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningContainer {
    /// The pid of its init.
    pub init: u32,
    /// The user namespaces in its spec; `None` if the spec is not known.
    pub spec: Option<SpecUsers>,
}

impl RunningContainers for Vec<RunningContainer> {
    fn writers(&self) -> Box<dyn Iterator<Item = Writer>> {
        let containers = self.clone().into_iter();
        Box::new(containers.filter_map(|container| {
            let name = format!("process {}", container.init);
            let reach = match table_of(container) {
                Ok(table) => WriterReach::Mounts {
                    table: table?,
                    hidden: Vec::new(),
                },
                Err(_) => WriterReach::Unknown,
            };
            Some(Writer { name, reach })
        }))
    }
}

/// `None` if the container ended.
fn table_of(container: RunningContainer) -> Result<Option<MountTable>, RefreshError> {
    let RunningContainer { init, spec } = container;
    let process = match HeldProcess::open(init) {
        Err(ProcessError::Ended(_)) => return Ok(None),
        process => process?,
    };
    match mounts_by_runtime(&process, spec) {
        Err(_) if !process.is_alive() => Ok(None),
        table => Ok(Some(table?)),
    }
}

fn mounts_by_runtime(
    process: &HeldProcess,
    spec: Option<SpecUsers>,
) -> Result<MountTable, RefreshError> {
    let spec = spec.ok_or(RefreshError::NoSpec)?;
    let namespace = process.mount_namespace()?;
    Ok(namespace.accepted(process, spec.namespace())?.mounts()?)
}

/// The time since 1970 at which a process started; `None` if the start time is unreadable.
pub(super) fn started(pid: u32) -> Option<Duration> {
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

// Refuses the processes of sandboxes: their containers have mounts that the node's kernel does not
// show.

/// The name of gVisor's program and of its processes (`runsc/sandbox/sandbox.go`).
const GVISOR: &[u8] = b"runsc";

/// Kata names a process in the node's own namespace, gVisor its own kernel. A container whose
/// program or process is named `runsc` loses only its own refresh.
///
/// The command line would name gVisor's sandbox, too, but a container can block its readers.
pub(crate) fn refuse_sandbox(
    process: &HeldProcess,
    namespace: &MountNamespace,
) -> Result<(), RefreshError> {
    if namespace.is_own()? {
        return Err(RefreshError::MountsOfNode(process.pid()));
    }
    let program = process.program_name()?;
    match program.starts_with(GVISOR) || process.read("comm")?.starts_with(GVISOR) {
        true => Err(RefreshError::Sandbox(process.pid())),
        false => Ok(()),
    }
}

// The binds of a container of Docker or Podman whose source is a mount point of the host that was
// mounted anew: an NFS share, a FUSE filesystem.
//
// A user of the host or a container may be able to rename a folder of the path, which then leads to
// another mount. So a source is followed only if root alone may write every folder of the path, and
// no symlink is followed.

impl<'a> BoundMounts<'a> {
    /// The binds of directories of an engine's container with this bundle. Left out are the host-root
    /// binds: the binds of `roots`, and of directories in or above which a kubelet or a runtime
    /// mounts (`places`). `others` are the running containers.
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn of_engine(
        bundle: &Path,
        others: &'a dyn RunningContainers,
        places: &Places,
        roots: Option<&HostRoots>,
    ) -> Result<Self, OpenError> {
        let is_root = |source: &Path| {
            places.holds_runtime_mounts(source, Scope::RuntimeDirectories)
                || roots.is_some_and(|roots| roots.has(source))
        };
        let is_volume =
            |source: &Path| source.is_absolute() && !is_root(source) && !is_of_file(source);
        let specified = |bind: &Bind<'_>| SpecifiedBind::of(bind, is_volume(bind.source()));
        Self::with_binds(bundle, specified, Some(others))
    }
}

/// True for a single file that can be reached without waiting: [`super::files`] follows these.
fn is_of_file(source: &Path) -> bool {
    let mounts = Mounts::default();
    let local = open_without_waiting(source, |handle| mounts.is_local(handle));
    let local = local.ok().filter(|handle| mounts.is_local(handle));
    let identity = local.and_then(|handle| handle.identity().ok());
    identity.is_some_and(|identity| identity.kind != FileKind::Directory)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::process::Command;
    use std::thread;

    use bindguard_testing::deny_call;
    use nix::errno::Errno;
    use nix::libc;

    use super::*;

    /// An agent without a free descriptor took every container for one that ended.
    #[test]
    fn a_container_that_cannot_be_opened_is_not_left_out() {
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let of = |init| vec![RunningContainer { init, spec: None }];
        assert_eq!(of(ended.id()).writers().count(), 0);
        let denied = thread::spawn(move || {
            deny_call(libc::SYS_pidfd_open, Errno::EMFILE);
            of(std::process::id())
                .writers()
                .map(|it| matches!(it.reach, WriterReach::Unknown))
                .collect()
        });
        let denied: Vec<bool> = denied.join().unwrap();
        assert_eq!(denied, [true]);
    }
}
