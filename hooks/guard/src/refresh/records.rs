//! Records of tucks: the mounts of a container that become shared for a moment, as they were
//! before.
//!
//! If the agent and its child are killed in that moment, the next refresh of the container restores
//! the propagation from the record. A record lies in a directory of the host that no container
//! reaches. A record names its process by pid and start time, and its mount namespace by number.

use std::path::{Path, PathBuf};
use std::{fs, io};

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{is_record_needed, left_shared};
use bindguard_sys::enter::{
    Action, ContainerNamespace, Entered, HeldProcess, ProcessError, Replacement,
};
use bindguard_sys::{make_folders, unless_absent, write_new_file};

use crate::refresh::outcome::RefreshError;
use crate::refresh::round::{ContainerRefresh, STEP_TIMEOUT};

/// The default directory. It is on a tmpfs: pids and mount ids begin anew with each boot.
const DIRECTORY: &str = "/run/bindguard/tucks";

/// The directory of the records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TuckRecords {
    directory: PathBuf,
}

/// Why a record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TuckRecordError {
    /// The process of the record could not be read.
    #[error("read the process before a tuck")]
    Process(#[from] ProcessError),
    /// An earlier record could not be read. It stays as it is.
    #[error("record the mounts before a tuck: read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The record could not be written.
    #[error("record the mounts before a tuck: write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
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
    pub(super) fn has(&self, process: &HeldProcess) -> bool {
        self.path(process).symlink_metadata().is_ok()
    }

    /// Writes these mounts of a process, which are about to become shared. A mount of an earlier
    /// record keeps its entry, which describes the state before the kill.
    ///
    /// # Errors
    /// If the process ended, an earlier record cannot be read, or the disk is full.
    pub(super) fn keep(
        &self,
        process: &HeldProcess,
        namespace: &ContainerNamespace,
        mounts: Vec<MountEntry>,
    ) -> Result<(), TuckRecordError> {
        let earlier = self.load(process, namespace)?.unwrap_or_default();
        let is_recorded = |mount: &MountEntry| {
            let mut at_its_place = earlier.stack_at(&mount.mount_point);
            at_its_place.any(|known| known.device == mount.device)
        };
        let new: Vec<MountEntry> = mounts
            .into_iter()
            .filter(|mount| !is_recorded(mount))
            .collect();
        if new.is_empty() {
            return Ok(());
        }
        let kept = MountTable::from_entries([earlier.entries(), &new].concat());
        let (path, new) = (
            self.path(process),
            self.directory.join(format!(".{}", process.pid())),
        );
        let mut text = owner(process, namespace)?.into_bytes();
        text.extend(kept.to_mountinfo());
        self.forget_ended();
        // Renamed: a kill in the middle leaves no half record.
        let written = make_folders(&self.directory, 0o700)
            .and_then(|()| write_new_file(&new, &text, 0o600))
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(|source| TuckRecordError::Write { path, source })
    }

    /// The mounts of a process that tucks made shared, as they were before. A record of an earlier
    /// process, or of another namespace, is removed.
    ///
    /// # Errors
    /// If the process ended, or the record cannot be read.
    pub(super) fn load(
        &self,
        process: &HeldProcess,
        namespace: &ContainerNamespace,
    ) -> Result<Option<MountTable>, TuckRecordError> {
        let path = self.path(process);
        let text = match unless_absent(fs::read(&path)) {
            Ok(Some(text)) => text,
            Ok(None) => return Ok(None),
            Err(source) => return Err(TuckRecordError::Read { path, source }),
        };
        let owner = owner(process, namespace)?;
        let table = text
            .strip_prefix(owner.as_bytes())
            .and_then(|rest| MountTable::from_mountinfo(rest).ok());
        if table.is_none() {
            self.forget(process);
        }
        Ok(table)
    }

    /// Removes the record of a process.
    pub(super) fn forget(&self, process: &HeldProcess) {
        // A record that stays costs the next refresh a check.
        let _ = fs::remove_file(self.path(process));
    }

    /// Removes the records of processes that ended.
    fn forget_ended(&self) {
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let pid = name
                .to_str()
                .and_then(|name| name.trim_start_matches('.').parse().ok());
            let has_ended = |pid| matches!(HeldProcess::open(pid), Err(ProcessError::Ended(_)));
            if pid.is_some_and(has_ended) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn path(&self, process: &HeldProcess) -> PathBuf {
        self.directory.join(process.pid().to_string())
    }
}

/// The first line of a record: the start time of the process, and the number of its mount
/// namespace.
fn owner(process: &HeldProcess, namespace: &ContainerNamespace) -> Result<String, ProcessError> {
    let failed = |source| ProcessError::Read {
        pid: process.pid(),
        name: "ns/mnt",
        source,
    };
    Ok(format!(
        "{} {}\n",
        process.start_time()?,
        namespace.number().map_err(failed)?
    ))
}

// Restores the propagation that an interrupted refresh left changed, from its record.

impl ContainerRefresh<'_> {
    /// Sets every mount that a tuck left shared to its former propagation. At the end of a refresh
    /// the record is removed: until then a mount beneath a stale mount may be shared. What could not
    /// be restored is left to the next refresh, with the record. Returns true if a mount was changed.
    pub(super) fn restore_propagation(&mut self, is_end: bool) -> Result<bool, RefreshError> {
        let before = match self.records.load(self.process, self.namespace) {
            Ok(Some(before)) => before,
            Ok(None) => return Ok(false),
            Err(TuckRecordError::Process(error)) => return Err(error.into()),
            // The record stays.
            Err(TuckRecordError::Read { .. } | TuckRecordError::Write { .. }) => return Ok(false),
        };
        let now = self.namespace.mounts()?;
        let left = left_shared(&before, &now, &self.volumes.shown_in(&now));
        let mounts = left.iter().map(|stale| Replacement {
            stale,
            parent: None,
            new: None,
        });
        let is_restored = left.is_empty() || self.restored(mounts.collect());
        if is_end && is_restored && !is_record_needed(&before, &now, &left) {
            self.records.forget(self.process);
        }
        Ok(!left.is_empty())
    }

    fn restored(&mut self, mounts: Vec<Replacement<'_>>) -> bool {
        let all: Vec<usize> = (0..mounts.len()).collect();
        let Ok(entered) = Entered::enter(
            self.helper,
            self.namespace,
            mounts,
            STEP_TIMEOUT,
            self.until,
        ) else {
            return false;
        };
        // The walk to a mount point may hang, as in any refresh.
        let opened = entered.call_all(Action::Open, &all);
        if opened
            .iter()
            .any(|opened| opened.as_ref().is_err_and(|error| error.is_over()))
        {
            self.abandoned = Some(entered.abandon());
            return false;
        }
        let is_restored = |(index, opened): (usize, _)| {
            matches!(opened, Ok(())) && entered.call(Action::Restore, index).is_ok()
        };
        // A failure does not stop the remaining restores.
        opened
            .into_iter()
            .enumerate()
            .map(is_restored)
            .fold(true, |all, one| all & one)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;
    use std::thread;

    use bindguard_core::spec::RequestedUserNamespace;
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
        let namespace = own.mount_namespace().unwrap();
        let requested = RequestedUserNamespace::OfRuntime;
        let namespace = namespace.accepted(&own, &requested).unwrap();
        let mounts = || own.mounts().unwrap().entries()[..1].to_vec();
        let unreadable = records.path(&own);
        symlink(&unreadable, &unreadable).unwrap();
        let kept = records.keep(&own, &namespace, mounts());
        assert!(
            matches!(kept, Err(TuckRecordError::Read { .. })),
            "{kept:?}"
        );
        assert!(unreadable.read_link().is_ok(), "the record is replaced");
        fs::remove_file(&unreadable).unwrap();
        records.keep(&own, &namespace, mounts()).unwrap();
        let loaded = records.load(&own, &namespace).unwrap().unwrap();
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
