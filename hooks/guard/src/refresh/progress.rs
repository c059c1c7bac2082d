//! A running refresh of a container: the stale mounts and the results so far.

use std::collections::BTreeMap;
use std::path::PathBuf;
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

/// Time limit of one step in the container.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(1);

/// The refresh of one container.
pub(super) struct ContainerRefresh<'a> {
    pub(super) helper: &'a HelperProcess,
    pub(super) process: &'a HeldProcess,
    pub(super) namespace: &'a ContainerNamespace,
    pub(super) spec: &'a SpecUsers,
    pub(super) volumes: &'a dyn CurrentFiles,
    pub(super) records: &'a TuckRecords,
    /// The container's mounts when they were judged last.
    pub(super) table: MountTable,
    /// The method that replaced the mount at each mount point.
    pub(super) methods: BTreeMap<PathBuf, AttachMethod>,
    /// The method for each mount point whose old mount was to be detached by a call that gave no
    /// answer.
    pub(super) unanswered: BTreeMap<PathBuf, AttachMethod>,
    /// The failures at each mount point, and the last reason.
    pub(super) failures: BTreeMap<PathBuf, (u32, Failure)>,
    pub(super) notify: Notify,
    pub(super) not_notified: Option<NotNotified>,
    pub(super) until: Instant,
    pub(super) overlooked: usize,
    pub(super) abandoned: Option<Abandoned>,
    /// The binds of the spec that are gone.
    pub(super) missing: Vec<SpecBind>,
}

/// The reason for which a mount is not replaced in this round.
#[derive(Debug)]
pub(super) enum Failure {
    KeyGone,
    NotReplaced(NotReplaced),
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
            methods: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            failures: BTreeMap::new(),
            notify: Notify::None,
            not_notified: None,
            until: Instant::now() + time,
            overlooked: 0,
            abandoned: None,
            missing: Vec::new(),
        }
    }

    pub(super) fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        self.volumes.shown_in(table)
    }

    /// Refuses a file that SELinux denies the container: its label is never changed for a refresh.
    pub(super) fn refuse_unreadable(&self, file: &Handle) -> Result<(), Refused> {
        match selinux_denies_read(self.process, file) {
            true => Err(Refused {
                reason: RefusedReason::SelinuxDenies,
                path: file.path().to_owned(),
            }),
            false => Ok(()),
        }
    }

    /// A failure after the end of the time is not counted: the mount may be replaced in the next
    /// turn.
    pub(super) fn fail(&mut self, subpath: &SubpathInContainer, why: Failure) {
        let place = subpath.mount.mount_point.clone();
        let times = self.failures.get(&place).map_or(0, |(times, _)| *times);
        let counted = u32::from(Instant::now() < self.until);
        self.failures.insert(place, (times + counted, why));
    }
}
