//! A running refresh of a container: the stale mounts and the results so far.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{Refused, RefusedReason, SpecBind, SubpathInContainer};
use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::{Abandoned, ContainerNamespace, HeldProcess, HelperProcess};
use bindguard_sys::{Handle, selinux_denies_read};

use super::current_files::CurrentFiles;
use super::outcome::{AttachMethod, NotNotified, NotReplaced};
use super::records::TuckRecords;
use crate::attempts::MAX_FAILURES;

/// Time limit of a step in the container.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(1);

/// The refresh of a container.
pub(super) struct ContainerRefresh<'a> {
    pub(super) helper: &'a HelperProcess,
    pub(super) process: &'a HeldProcess,
    pub(super) namespace: &'a ContainerNamespace,
    pub(super) spec: &'a SpecUsers,
    pub(super) volumes: &'a dyn CurrentFiles,
    pub(super) records: &'a TuckRecords,
    /// The container's mounts when they were judged last.
    pub(super) table: MountTable,
    /// The progress at each mount point at which something was done or failed.
    pub(super) progress: BTreeMap<PathBuf, MountProgress>,
    pub(super) notify: Notify,
    pub(super) not_notified: Option<NotNotified>,
    pub(super) until: Instant,
    pub(super) overlooked: usize,
    pub(super) abandoned: Option<Abandoned>,
    /// The binds of the spec that are gone.
    pub(super) missing: Vec<SpecBind>,
}

/// The progress of the replacement at a mount point.
#[derive(Debug, Default)]
pub(super) struct MountProgress {
    /// The method that replaced the mount.
    pub(super) replaced: Option<AttachMethod>,
    /// The method that attached the new mount, if the call that detaches the old mount gave no
    /// answer.
    pub(super) unanswered: Option<AttachMethod>,
    /// The last failure since the mount was replaced.
    pub(super) failure: Option<NotReplaced>,
    /// The number of failures since the mount was replaced.
    failures: u32,
}

impl<'a> ContainerRefresh<'a> {
    pub(super) fn new(
        helper: &'a HelperProcess,
        process: &'a HeldProcess,
        namespace: &'a ContainerNamespace,
        spec: &'a SpecUsers,
        volumes: &'a dyn CurrentFiles,
        records: &'a TuckRecords,
        time: Duration,
    ) -> Self {
        Self {
            helper,
            process,
            namespace,
            spec,
            volumes,
            records,
            table: MountTable::default(),
            progress: BTreeMap::new(),
            notify: Notify::None,
            not_notified: None,
            until: Instant::now() + time,
            overlooked: 0,
            abandoned: None,
            missing: Vec::new(),
        }
    }

    /// Refuses a file that SELinux denies the container: its label is never changed for a refresh.
    pub(super) fn refuse_unreadable(&self, file: &Handle) -> Result<(), Refused> {
        match selinux_denies_read(self.process, file) {
            true => Err(Refused::new(RefusedReason::SelinuxDenies, file.path())),
            false => Ok(()),
        }
    }

    pub(super) fn progress_at(&mut self, mount_point: &Path) -> &mut MountProgress {
        self.progress.entry(mount_point.to_owned()).or_default()
    }

    /// A failure after the end of the time is not counted: the mount may be replaced in the next
    /// turn.
    pub(super) fn fail(&mut self, subpath: &SubpathInContainer, why: NotReplaced) {
        let is_in_time = Instant::now() < self.until;
        let progress = self.progress_at(&subpath.mount.mount_point);
        progress.failures += u32::from(is_in_time);
        progress.failure = Some(why);
    }
}

impl MountProgress {
    pub(super) fn of_failure(why: NotReplaced) -> Self {
        Self {
            failure: Some(why),
            failures: 1,
            ..Self::default()
        }
    }

    /// The new mount is there, and the old mount is not.
    pub(super) fn replace(&mut self, method: AttachMethod) {
        self.replaced = Some(method);
        self.failure = None;
        self.failures = 0;
    }

    /// True if a further round may replace the mount.
    pub(super) fn may_try_again(&self) -> bool {
        self.failures < MAX_FAILURES && !matches!(self.failure, Some(NotReplaced::KeyGone))
    }
}
