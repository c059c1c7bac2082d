//! The files of a bundle that the guard reads and writes: config.json, read whole and replaced
//! whole, and the records of the container's mounts.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::proof::{EXPECTED_FILE, ExpectedBinds, SpecVersion};
use bindguard_core::refresh::{REFRESHED_FILE, RefreshedMounts};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::de::DeserializeOwned;

use crate::fault::{self, FaultPoint};
use crate::own_process::{leave_room, with_size_errors};
use crate::replace::next_mount_id;
use crate::{Failure, failed};

/// A larger spec is not read: containerd's specs have some tens of KiB, and the guard's memory is
/// bounded.
const MAX_SPEC: u64 = 16 << 20;

/// Enough for nearly every spec, so that no stat(2) for its size is needed.
const USUAL_SPEC: usize = 32 << 10;

/// The name of an edited spec before the rename; the process id of the writing guard follows.
const BESIDE: &str = ".config.json.bindguard-";

/// Reads the spec of a bundle.
///
/// # Errors
/// When there is none, it cannot be read, it is no regular file, or it is unreasonably large.
pub fn read_spec(bundle: &Path) -> Result<Vec<u8>, Failure> {
    read_spec_file(&spec_of(bundle))
}

/// The path of a bundle's spec.
pub fn spec_of(bundle: &Path) -> PathBuf {
    bundle.join("config.json")
}

/// Reads a spec that may be outside of its bundle.
///
/// # Errors
/// As [`read_spec`].
pub fn read_spec_file(path: &Path) -> Result<Vec<u8>, Failure> {
    let read = || {
        // Opening a fifo would wait for its writer, or release the writer before the runtime reads.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is no regular file",
            ));
        }
        let mut spec = Vec::with_capacity(USUAL_SPEC);
        let limited = &mut File::open(path)?.take(MAX_SPEC + 1);
        if limited.read_to_end(&mut spec)? as u64 > MAX_SPEC {
            let why = format!("it is larger than {} MiB", MAX_SPEC >> 20);
            return Err(io::Error::other(why));
        }
        Ok(spec)
    };
    read().map_err(failed("read", path))
}

/// Replaces the old spec: writes the edited spec beside the old spec, then renames the new file. A
/// reader sees the old spec or the new spec, never a part. First removes the files of guards that
/// were killed during a replacement.
///
/// # Errors
/// If the new spec cannot be written or renamed. Then the old spec is unchanged and no file stays
/// beside it.
pub fn replace_spec(path: &Path, spec: &[u8]) -> Result<(), Failure> {
    let mode = fs::metadata(path).map(|spec| spec.permissions().mode());
    mode.and_then(|mode| replace(path, mode, spec))
        .map_err(failed("replace", path))
}

fn replace(path: &Path, mode: u32, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let beside = folder.join(format!("{BESIDE}{}", std::process::id()));
    clear_leavings(folder);
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&beside)?;
        fault::reach(FaultPoint::SpecBegun);
        with_size_errors(|| file.write_all(bytes))?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        fault::reach(FaultPoint::SpecWritten);
        fs::rename(&beside, path)
    };
    write().inspect_err(|_| {
        // Best effort: the caller gets the first error.
        let _ = fs::remove_file(&beside);
    })
}

/// Removes the file of a guard that was killed while it edited this bundle's spec. Keeps the file
/// of a live guard.
///
/// Best effort: a file that cannot be removed, or not even listed, is deleted with the bundle.
pub fn clear_leavings(bundle: &Path) {
    for entry in fs::read_dir(bundle).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let id = name
            .to_str()
            .and_then(|name| name.strip_prefix(BESIDE))
            .and_then(|id| id.parse().ok())
            .filter(|id| *id > 0);
        if let Some(pid) = id.and_then(Pid::from_raw)
            // The calling guard has written nothing yet.
            && (pid == rustix::process::getpid() || test_kill_process(pid) == Err(Errno::SRCH))
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

// The records: [`ExpectedBinds`] of the create, in [`EXPECTED_FILE`], and [`RefreshedMounts`] of a
// container whose create left no record, in [`REFRESHED_FILE`].

const RECORD_MODE: u32 = 0o600;

/// Writes the record. Follows no link.
///
/// # Errors
/// If the record cannot be written. Then no record is there.
pub fn write_record(bundle: &Path, expected: &ExpectedBinds) -> io::Result<()> {
    let json = serde_json::to_vec(expected)?;
    let path = bundle.join(EXPECTED_FILE);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(RECORD_MODE)
        .open(&path)?;
    let write = || leave_room(&file).and_then(|()| (&file).write_all(&json));
    with_size_errors(write).inspect_err(|_| {
        // Best effort: a part of a record is no JSON, and so counts as no record.
        let _ = fs::remove_file(&path);
    })
}

/// Replaces the record: a reader sees the old record or the new record. First removes the unfinished
/// files of killed processes.
///
/// # Errors
/// If the new record cannot be written or renamed. Then the old record is unchanged.
pub fn replace_record(bundle: &Path, expected: &ExpectedBinds) -> io::Result<()> {
    let json = serde_json::to_vec(expected)?;
    replace(&bundle.join(EXPECTED_FILE), RECORD_MODE, &json)
}

/// As [`replace_record`], for the record of refreshes.
///
/// # Errors
/// As there.
pub fn replace_refreshed(bundle: &Path, refreshed: &RefreshedMounts) -> io::Result<()> {
    let json = serde_json::to_vec(refreshed)?;
    replace(&bundle.join(REFRESHED_FILE), RECORD_MODE, &json)
}

/// Adds the unique id that the next mount of the node will have: all mounts of the create have
/// lesser ids, and all mounts of the container's program have greater ids. Keeps the number of an
/// earlier call, because the program may run since that call.
///
/// Best effort: without the number, a mount that the container may have made is never unmounted.
pub fn add_mounts_before(bundle: &Path, mut expected: ExpectedBinds) {
    if expected.mounts_before.is_some() {
        return;
    }
    expected.mounts_before = next_mount_id();
    if expected.mounts_before.is_some() {
        let _ = replace_record(bundle, &expected);
    }
}

/// The version of a bundle's spec; `None` if there is no spec.
pub fn spec_version(bundle: &Path) -> Option<SpecVersion> {
    let spec = fs::metadata(spec_of(bundle)).ok()?;
    Some(SpecVersion {
        inode: spec.ino(),
        size: spec.len(),
        changed: (spec.ctime(), spec.ctime_nsec()),
    })
}

/// The time at which the record was written, since 1970; `None` if there is no record.
pub fn record_written_at(bundle: &Path) -> Option<Duration> {
    let record = fs::symlink_metadata(bundle.join(EXPECTED_FILE)).ok()?;
    let nanoseconds = u32::try_from(record.ctime_nsec()).ok()?;
    Some(Duration::new(record.ctime().try_into().ok()?, nanoseconds))
}

/// Removes the records of an earlier create, if any.
pub fn remove_records(bundle: &Path) {
    let _ = fs::remove_file(bundle.join(EXPECTED_FILE));
    let _ = fs::remove_file(bundle.join(REFRESHED_FILE));
}

/// Reads the record.
///
/// # Errors
/// If the record is missing, cannot be read, or cannot be parsed.
pub fn read_record(bundle: &Path) -> Result<ExpectedBinds, Failure> {
    read_json(&bundle.join(EXPECTED_FILE))
}

/// As [`read_record`], for the record of refreshes.
///
/// # Errors
/// As there.
pub fn read_refreshed(bundle: &Path) -> Result<RefreshedMounts, Failure> {
    read_json(&bundle.join(REFRESHED_FILE))
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let mut json = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_SPEC).read_to_end(&mut json))
        .map_err(failed("read", path))?;
    serde_json::from_slice(&json).map_err(failed("parse", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_is_replaced_whole_and_keeps_its_mode() {
        let bundle = tempfile::tempdir().unwrap();
        let config = bundle.path().join("config.json");
        fs::write(&config, "old").unwrap();
        fs::set_permissions(&config, fs::Permissions::from_mode(0o640)).unwrap();
        let mut reader = File::open(&config).unwrap();
        replace_spec(&spec_of(bundle.path()), b"new").unwrap();
        assert_eq!(read_spec(bundle.path()).unwrap(), b"new");
        let mut seen = String::new();
        reader.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, "old");
        assert_eq!(
            fs::metadata(&config).unwrap().permissions().mode() & 0o777,
            0o640
        );
        assert_eq!(fs::read_dir(bundle.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_spec_that_cannot_be_put_in_place_leaves_nothing_beside() {
        let bundle = tempfile::tempdir().unwrap();
        fs::create_dir(bundle.path().join("config.json")).unwrap();
        replace_spec(&spec_of(bundle.path()), b"new").unwrap_err();
        assert_eq!(fs::read_dir(bundle.path()).unwrap().count(), 1);
    }

    #[test]
    fn files_of_a_dead_guard_are_removed() {
        let bundle = tempfile::tempdir().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let names = [
            ended.id().to_string(),
            std::process::id().to_string(),
            "1".into(),
            "other".into(),
            "-1".into(),
        ];
        names
            .iter()
            .for_each(|id| fs::write(bundle.path().join(format!("{BESIDE}{id}")), "half").unwrap());
        clear_leavings(bundle.path());
        let left = names.map(|id| fs::exists(bundle.path().join(format!("{BESIDE}{id}"))).unwrap());
        assert_eq!(left, [false, false, true, true, true]);
        clear_leavings(Path::new("/nowhere"));
    }

    #[test]
    fn a_spec_that_is_no_file_is_left_for_the_runtime() {
        let bundle = tempfile::tempdir().unwrap();
        let config = bundle.path().join("config.json");
        nix::unistd::mkfifo(&config, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        let error = read_spec(bundle.path()).unwrap_err();
        assert!(error.source.kind() == io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_bundle_without_a_spec_is_named() {
        let error = read_spec(Path::new("/nowhere")).unwrap_err();
        assert_eq!(error.to_string(), "read /nowhere/config.json");
    }
}
