//! Records of tucks: the mounts of a container that become shared for a moment, as they were
//! before.
//!
//! If the agent and its child are killed in that moment, the next refresh of the container restores
//! the propagation from the record. A record lies in a directory of the host that no container
//! reaches. A record names its process by pid and start time, and its mount namespace by number.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::{make_folders, unless_absent, write_new_file};

use crate::SourceError;
use crate::refresh::running::Container;

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
    pub(super) fn has(&self, process: &HeldProcess) -> bool {
        self.path(process).symlink_metadata().is_ok()
    }

    /// Writes these mounts of a container, which are about to become shared. A mount of an earlier
    /// record keeps its entry, which describes the state before the kill.
    ///
    /// # Errors
    /// If the process ended, an earlier record cannot be read, or the disk is full.
    pub(super) fn keep(
        &self,
        container: &Container<'_>,
        mut mounts: Vec<MountEntry>,
    ) -> Result<(), SourceError> {
        let owner = owner(container);
        let owner =
            owner.map_err(|error| SourceError::of("read the process before a tuck", error))?;
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
        let new = format!(".{}", container.process.pid());
        let new = self.directory.join(new);
        let mut text = owner.into_bytes();
        text.extend(kept.to_mountinfo());
        self.forget_ended();
        // Renamed: a kill in the middle leaves no half record.
        let written = make_folders(&self.directory, 0o700)
            .and_then(|()| write_new_file(&new, &text, 0o600))
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| failed_to("write", &path, error))
    }

    /// The mounts of a process that tucks made shared, as they were before. A record of an earlier
    /// process, or of another namespace, has another first line, and is removed.
    ///
    /// # Errors
    /// If the record cannot be read.
    pub(super) fn load(
        &self,
        process: &HeldProcess,
        owner: &str,
    ) -> Result<Option<MountTable>, SourceError> {
        let path = self.path(process);
        let text = unless_absent(fs::read(&path));
        let Some(text) = text.map_err(|error| failed_to("read", &path, error))? else {
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
    pub(super) fn forget(&self, process: &HeldProcess) {
        // A record that stays costs the next refresh a check.
        let _ = fs::remove_file(self.path(process));
    }

    /// Removes the records of processes that ended.
    fn forget_ended(&self) {
        let records = fs::read_dir(&self.directory).into_iter().flatten();
        for entry in records.flatten() {
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

fn failed_to(act: &str, record: &Path, error: std::io::Error) -> SourceError {
    let record = record.display();
    SourceError::of(
        format!("record the mounts before a tuck: {act} {record}"),
        error,
    )
}

/// The first line of a record: the start time of the process, and the number of its mount
/// namespace.
pub(super) fn owner(container: &Container<'_>) -> Result<String, ProcessError> {
    let failed = |source| ProcessError::Read {
        pid: container.process.pid(),
        name: "ns/mnt",
        source,
    };
    let number = container.namespace.number().map_err(failed)?;
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
