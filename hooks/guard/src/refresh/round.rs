//! A round of a refresh: prepares the new mounts, opens every stale mount from a child in the
//! container, attaches every new mount, then detaches the stale mounts.

use std::fs::File;

use bindguard_core::error_chain;
use bindguard_core::evidence::FileKind;
use bindguard_core::judge::{StaleCause, Verdict};
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{
    KeptMounts, NestedBind, Refused, RefusedReason, SubpathInContainer, changed_by_tuck,
    is_record_needed, left_shared,
};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{AttachMethod, MountResult};
use bindguard_core::text::join;
use bindguard_sys::enter::{
    Action, EnterError, Entered, Replacement, TreeChange, TreePart, complete_tree,
};
use bindguard_sys::replace::{CloneError, NewMount, ReplaceError, clone_like};
use bindguard_sys::{Handle, denies_beneath, propagation_takes_locks, selinux_denies_read};

use crate::refresh::container::{ContainerRefresh, Found, Look, probe_sources};
use crate::refresh::{OpenedNested, changed, failed};
use crate::refresh::{RefreshError, STEP_TIMEOUT, owner};

/// Limit of binds in a volume: the new mount of each is a descriptor of this process until the tree
/// is complete.
const MAX_NESTED_BINDS: usize = 256;

/// A mount to replace.
struct Job<'l, 'a> {
    found: &'l Found<'a>,
    /// The mounts below the stale mount when the new mount was made.
    below: Option<KeptMounts>,
    /// `None` if the new mount is already beneath the stale mount.
    new: Option<NewMount>,
    is_directory: bool,
}

impl<'a> ContainerRefresh<'a> {
    pub(super) fn replace(&mut self, look: &Look<'a>) -> Result<(), RefreshError> {
        let mut jobs = self.jobs(look);
        if jobs.is_empty() {
            return Ok(());
        }
        let mut replacements = Vec::with_capacity(jobs.len());
        for job in &mut jobs {
            replacements.push(Replacement {
                stale: &job.found.shown.mount,
                parent: job.found.shown.parent.as_ref(),
                new: job.new.take(),
            });
        }
        let container = self.container;
        let entered = match container.enter(self.helper, replacements, self.until) {
            Ok(entered) => entered,
            Err(error) => {
                for job in &jobs {
                    self.fail(job.found, failed(&error));
                }
                return Ok(());
            }
        };
        let round = Round {
            refresh: self,
            jobs: &jobs,
            entered: &entered,
        };
        if round.run()? {
            self.abandoned = Some(entered.abandon());
        }
        Ok(())
    }

    /// A job for each due mount, with its new mount; none for a file whose volume changed meanwhile.
    /// Directories come first: the old directories are empty.
    fn jobs<'l>(&mut self, look: &'l Look<'a>) -> Vec<Job<'l, 'a>> {
        let due = look.due(&self.progress);
        let mut jobs = Vec::new();
        probe_sources(&due, self.files);
        for found in due {
            match self.job(found, &look.table) {
                Ok(job) => jobs.extend(job),
                Err(why) => self.fail(found, why),
            }
        }
        jobs.sort_by_key(|job| !job.is_directory);
        jobs
    }

    fn job<'l>(
        &self,
        found: &'l Found<'a>,
        table: &MountTable,
    ) -> Result<Option<Job<'l, 'a>>, MountResult> {
        let Found { files, shown } = found;
        let mut job = Job {
            found,
            below: files.mounts_below(shown, table)?,
            new: None,
            is_directory: false,
        };
        if shown.covers_its_equal {
            return Ok(Some(job));
        }
        found.refuse_peer_of_host()?;
        let (file, settings) = files.open_current(shown)?;
        self.refuse_unreadable(&file)?;
        let users = self.users_of(&shown.mount)?;
        let identity = file.identity();
        job.is_directory = identity.is_ok_and(|identity| identity.kind == FileKind::Directory);
        let top = match clone_like(&file, &shown.mount, users, settings) {
            Ok(top) => top,
            // The volume changed: judge again.
            Err(CloneError::TargetGone) => return Ok(None),
            Err(error) => return Err(failed(&error)),
        };
        let parts = match &job.below {
            Some(below) => self.tree_parts(found, below)?,
            None => Vec::new(),
        };
        let namespace = &self.container.namespace;
        let new = complete_tree(
            self.helper,
            namespace,
            top,
            &parts,
            STEP_TIMEOUT,
            self.until,
        )
        .map_err(failed)?;
        files.note_replacement(shown, &file, &new)?;
        job.new = Some(new);
        Ok(Some(job))
    }

    /// Refuses a file that SELinux denies the container: its label is never changed for a refresh.
    fn refuse_unreadable(&self, file: &Handle) -> Result<(), Refused> {
        if selinux_denies_read(self.container.process, file) {
            Err(Refused::new(RefusedReason::SelinuxDenies, file.path()))
        } else {
            Ok(())
        }
    }

    /// The user namespace for a new mount like `stale`; `None` if `stale` is not idmapped. It is the
    /// namespace that the spec gives the container, never a namespace that a process entered: that
    /// one may show files of the host's root as files of the process.
    fn users_of(&self, stale: &MountEntry) -> Result<Option<&File>, Refused> {
        if !stale.attributes.is_idmapped() {
            return Ok(None);
        }
        let (place, namespace) = (&stale.mount_point, &self.container.namespace);
        if namespace.has_own_users && self.container.spec.has_ids_of_container_at(place) {
            Ok(Some(&namespace.users))
        } else {
            Err(Refused::new(RefusedReason::OtherIds, place))
        }
    }

    /// The parts of the new tree in place of a stale mount, outer parts first: the restrictions of the
    /// old mounts, and the binds of the spec that are nested in a volume.
    fn tree_parts(
        &self,
        found: &Found<'_>,
        below: &KeptMounts,
    ) -> Result<Vec<TreePart>, MountResult> {
        let (count, limit) = (below.nested.len(), MAX_NESTED_BINDS);
        if count > limit {
            let refused = Refused::new(RefusedReason::ManyNestedBinds, found.place());
            let error = format!("{count} instead of {limit}");
            return Err(refused.with_error(error).into());
        }
        let mut parts = Vec::new();
        for restriction in &below.restrictions {
            parts.push(TreePart {
                path: restriction.path.clone(),
                change: TreeChange::Restrict(restriction.attributes),
                new: None,
            });
        }
        // If the volume is current and lacks a bind of the spec, that bind is the reason of the
        // refresh.
        let is_stale_without = matches!(
            found.shown.verdict,
            Verdict::Stale {
                cause: StaleCause::LacksBind(_),
                ..
            }
        );
        let (mut refused, mut has_gone_bind) = (None, false);
        for nested in &below.nested {
            let is_gone = nested.shown.is_none();
            let new = match self.nested_mount(found, nested) {
                Ok(new) => new,
                Err(why) if is_gone => {
                    refused.get_or_insert(why);
                    continue;
                }
                Err(why) => return Err(why),
            };
            // A bind that is gone is no reason to leave the volume dead.
            let change = if is_gone && !is_stale_without {
                TreeChange::TryAttach
            } else {
                TreeChange::Attach
            };
            has_gone_bind |= is_gone;
            parts.push(TreePart {
                path: nested.path.clone(),
                change,
                new: Some(new),
            });
        }
        match refused {
            Some(why) if is_stale_without && !has_gone_bind => Err(why),
            _ => Ok(parts),
        }
    }

    /// A new mount of a nested bind.
    fn nested_mount(
        &self,
        found: &Found<'_>,
        nested: &NestedBind,
    ) -> Result<NewMount, MountResult> {
        let OpenedNested {
            file,
            like,
            settings,
        } = found.files.open_nested(nested)?;
        let place = &like.mount_point;
        if nested.shown.is_none() && self.container.spec.is_idmapped_at(place) {
            let error = "it is gone, and only the runtime can make it again".to_owned();
            let refused = Refused::new(RefusedReason::OtherIds, place);
            return Err(refused.with_error(error).into());
        }
        self.refuse_unreadable(&file)?;
        let users = self.users_of(&like)?;
        clone_like(&file, &like, users, settings).map_err(failed)
    }
}

/// A child's visit to the container.
struct Round<'r, 'a, 'l> {
    refresh: &'r mut ContainerRefresh<'a>,
    jobs: &'r [Job<'l, 'a>],
    entered: &'r Entered,
}

/// The indices of jobs whose new mounts are attached, with the methods.
type Attached = Vec<(usize, AttachMethod)>;

impl Round<'_, '_, '_> {
    /// Returns true if the child gave no answer and may still change mounts.
    fn run(mut self) -> Result<bool, RefreshError> {
        let all: Vec<usize> = (0..self.jobs.len()).collect();
        let (mut open, mut is_silent) = (Vec::new(), false);
        for (index, opened) in all.iter().zip(self.entered.call_all(Action::Open, &all)) {
            match opened {
                Ok(()) => open.push(*index),
                Err(error) => {
                    is_silent |= error.is_over();
                    self.fail_step(*index, &error);
                }
            }
        }
        if is_silent {
            return Ok(true);
        }
        // The mounts are open by now and keep their ids: what the table says of an id is said of
        // the open mount.
        let table = self.refresh.container.namespace.mounts()?;
        open.retain(|index| self.is_unchanged(*index, &table));
        let attached = self.attach(&open, &table)?;
        self.detach(&attached);
        if !self.entered.is_over() {
            return Ok(false);
        }
        // Without a table, the child may still change mounts. The end of a stale mount may wait for a
        // dead server after the mount left the table.
        let Ok(table) = self.refresh.container.namespace.mounts() else {
            return Ok(true);
        };
        let is_gone = |(index, _): &(usize, AttachMethod)| {
            let stale = &self.jobs[*index].found.shown.mount;
            let now = table.mount(stale.id);
            now.is_none_or(|now| now.unique_id != stale.unique_id)
        };
        Ok(attached.is_empty() || !attached.iter().all(is_gone))
    }

    /// True if the mount of this id still shows the same part of the same volume at the same place,
    /// and has the same mounts below: a replacement would lose other mounts.
    fn is_unchanged(&mut self, index: usize, table: &MountTable) -> bool {
        let Job { found, below, .. } = &self.jobs[index];
        let was = &found.shown.mount;
        let is_same = table.mount(was.id).is_some_and(|now| {
            was.device == now.device
                && was.root.path == now.root.path
                && was.mount_point == now.mount_point
        });
        let why = match is_same.then(|| found.files.mounts_below(&found.shown, table)) {
            Some(Ok(now)) if now == *below => return true,
            Some(Err(why)) => why,
            Some(Ok(_)) | None => changed(),
        };
        self.refresh.fail(found, why);
        false
    }

    /// Attaches every new mount. Those of a volume that changed meanwhile are left to the next
    /// round.
    fn attach(&mut self, indices: &[usize], table: &MountTable) -> Result<Attached, RefreshError> {
        let (mut attached, mut new) = (Vec::new(), Vec::new());
        for index in indices.iter().copied() {
            let found = self.jobs[index].found;
            if !found.shown.covers_its_equal {
                new.push(index);
            } else if self.refresh.progress_of(found).replaced.take().is_some() {
                // umount2(2) has one error for a mount that is gone, and for a locked mount.
                self.refresh
                    .fail(found, found.refused(RefusedReason::Locked));
            } else if self.is_noted(index, found.shown.parent.as_ref()) {
                attached.push((index, AttachMethod::Finished));
            }
        }
        // The kernel's own method; only a try shows if the kernel has this method. The kernel does
        // not lock the flags of the new mount. The mounts of a container with a user namespace of its
        // own have locked flags, and root there could remove them from the new mount. The tuck locks
        // the flags, because the new mount arrives from another user namespace.
        let mut impossible = Vec::new();
        if denies_beneath() || self.refresh.container.namespace.has_own_users {
            impossible = new;
        } else {
            let results = self.entered.call_all(Action::AttachBeneath, &new);
            for (index, result) in new.into_iter().zip(results) {
                match result {
                    Ok(()) => attached.push((index, AttachMethod::Beneath)),
                    Err(error) if error.is_target_gone() => {}
                    Err(error) if error.is_not_possible() => impossible.push(index),
                    Err(error) => self.fail_step(index, &error),
                }
            }
        }
        attached.extend(self.tuck(&impossible, table)?);
        Ok(attached)
    }

    /// The way for kernels before 6.5. Mounts become shared for a moment: the record of their
    /// propagation comes first.
    fn tuck(&mut self, indices: &[usize], table: &MountTable) -> Result<Attached, RefreshError> {
        if indices.is_empty() {
            return Ok(Vec::new());
        }
        let container = self.refresh.container;
        if container.namespace.has_own_users && propagation_takes_locks() {
            for index in indices {
                let found = self.jobs[*index].found;
                let refused = found.refused(RefusedReason::KernelFault);
                self.refresh.fail(found, refused);
            }
            return Ok(Vec::new());
        }
        let shown: Vec<_> = indices
            .iter()
            .map(|index| &self.jobs[*index].found.shown)
            .collect();
        let changed = changed_by_tuck(table, &shown);
        if let Err(error) = self.refresh.records.keep(container, changed) {
            for index in indices {
                self.refresh.fail(self.jobs[*index].found, failed(&error));
            }
            return Ok(Vec::new());
        }
        let mut tucked = Vec::new();
        for index in indices.iter().copied() {
            match self.entered.call(Action::Tuck, index) {
                Ok(()) => tucked.push(index),
                Err(error) if error.is_target_gone() => {}
                Err(error) => self.fail_step(index, &error),
            }
        }
        // Success of a tuck does not mean that the mount arrived.
        let table = container.namespace.mounts()?;
        let mut arrived = Vec::with_capacity(tucked.len());
        for index in tucked {
            let mount = &self.jobs[index].found.shown.mount;
            let stale = table.mount(mount.id);
            let beneath = stale
                .and_then(|stale| table.mount(stale.parent))
                .filter(|it| it.mount_point == mount.mount_point);
            // A stale mount that is gone was detached by the kernel: the file beneath was removed.
            if stale.is_some() && beneath.is_none() {
                let error = "the new mount did not arrive beneath the stale one".to_owned();
                let why = MountResult::Failed { error };
                self.refresh.fail(self.jobs[index].found, why);
            } else if self.is_noted(index, beneath) {
                arrived.push((index, AttachMethod::Tucked));
            }
        }
        Ok(arrived)
    }

    /// True if the next refresh will know the mount beneath a stale mount.
    fn is_noted(&mut self, index: usize, beneath: Option<&MountEntry>) -> bool {
        let found = self.jobs[index].found;
        let Some(beneath) = beneath else {
            return true;
        };
        let noted = found.files.note_arrived(&found.shown, beneath);
        noted.map_err(|why| self.refresh.fail(found, why)).is_ok()
    }

    /// Detaches the stale mounts. A mount with mounts below becomes private first, with these. If
    /// that fails, the stale mount stays, and the next round goes on.
    fn detach(&mut self, attached: &Attached) {
        let mut attached = attached.clone();
        attached.retain(|(index, _)| {
            let private = match self.jobs[*index].below {
                Some(_) => self.entered.call(Action::MakePrivate, *index),
                None => Ok(()),
            };
            private
                .map_err(|error| self.fail_step(*index, &error))
                .is_ok()
        });
        let indices: Vec<usize> = attached.iter().map(|(index, _)| *index).collect();
        let results = self.entered.call_all(Action::Detach, &indices);
        for ((index, method), detached) in attached.into_iter().zip(results) {
            let progress = self.refresh.progress_of(self.jobs[index].found);
            match detached {
                Ok(()) => {
                    progress.replace(method);
                    match self.keep_propagation(index, method) {
                        Ok(()) => self.touch(index),
                        Err(error) => self.fail_step(index, &error),
                    }
                }
                Err(error) => {
                    if error.is_over() {
                        progress.unanswered = Some(method);
                    }
                    self.fail_step(index, &error);
                }
            }
        }
    }

    /// A mount that is attached to a shared mount becomes shared. The mounts of a tree have their
    /// propagation before: no tree is attached to a shared mount, or replaces a shared mount.
    fn keep_propagation(&self, index: usize, method: AttachMethod) -> Result<(), EnterError> {
        let found = self.jobs[index].found;
        let was_shared = found.shown.mount.is_shared();
        match method {
            AttachMethod::Beneath | AttachMethod::Tucked if found.is_on_shared() => {}
            AttachMethod::Tucked if was_shared => {}
            _ => return Ok(()),
        }
        self.entered.call(Action::SetPropagation, index)
    }

    /// Only through a mount that the container can write: otherwise it would reach more than it
    /// may, through the agent.
    fn touch(&mut self, index: usize) {
        if self.refresh.notify != Notify::Touch {
            return;
        }
        let SubpathInContainer { mount, parent, .. } = &self.jobs[index].found.shown;
        if parent.as_ref().is_none_or(MountEntry::is_read_only) {
            self.refresh.not_notified = Some(format!(
                "touch the file beneath {}: the container cannot write there",
                mount.mount_point.display()
            ));
        } else if let Err(error) = self.entered.call(Action::Touch, index) {
            self.refresh.not_notified = Some(error_chain(&error));
        }
    }

    fn fail_step(&mut self, index: usize, error: &EnterError) {
        let found = self.jobs[index].found;
        let why = match error {
            EnterError::Step(ReplaceError::OtherType) => {
                let source = join(found.shown.volume.clone(), &found.shown.sub_path);
                Refused::new(RefusedReason::OtherType, source).into()
            }
            error => failed(error),
        };
        self.refresh.fail(found, why);
    }
}

impl ContainerRefresh<'_> {
    /// Sets every mount that a tuck left shared to its former propagation. At the end of a refresh
    /// the record is removed: until then a mount beneath a stale mount may be shared. What could not
    /// be restored is left to the next refresh, with the record. Returns true if a mount was changed.
    pub(super) fn restore_propagation(&mut self, is_end: bool) -> Result<bool, RefreshError> {
        let process = self.container.process;
        if !self.records.has(process) {
            return Ok(false);
        }
        // A record that cannot be read stays.
        let before = self.records.load(process, &owner(self.container)?);
        let Ok(Some(before)) = before else {
            return Ok(false);
        };
        let now = self.container.namespace.mounts()?;
        let files = self.files.iter();
        let shown: Vec<_> = files.flat_map(|files| files.shown_in(&now)).collect();
        let left = left_shared(&before, &now, &shown);
        let is_restored = left.is_empty() || self.restore(&left);
        if is_end && is_restored && !is_record_needed(&before, &now, &left) {
            self.records.forget(process);
        }
        Ok(!left.is_empty())
    }

    /// Returns true if all of them have their former propagation again.
    fn restore(&mut self, mounts: &[MountEntry]) -> bool {
        let all: Vec<usize> = (0..mounts.len()).collect();
        let replacement = |stale| Replacement {
            stale,
            parent: None,
            new: None,
        };
        let replacements = mounts.iter().map(replacement).collect();
        let entered = self.container.enter(self.helper, replacements, self.until);
        let Ok(entered) = entered else {
            return false;
        };
        // The walk to a mount point may hang, as in any refresh.
        let opened = entered.call_all(Action::Open, &all);
        let mut errors = opened.iter().filter_map(|opened| opened.as_ref().err());
        if errors.any(EnterError::is_over) {
            self.abandoned = Some(entered.abandon());
            return false;
        }
        // A failure does not stop the remaining restores.
        let mut is_restored = true;
        for (index, opened) in opened.iter().enumerate() {
            is_restored &= opened.is_ok() && entered.call(Action::Restore, index).is_ok();
        }
        is_restored
    }
}
