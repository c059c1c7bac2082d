//! The records of a bundle: [`ExpectedBinds`] of the create, in [`EXPECTED_FILE`], and
//! [`RefreshedMounts`] of a container whose create left no record, in [`REFRESHED_FILE`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use bindguard_core::proof::{EXPECTED_FILE, ExpectedBinds, SpecVersion};
use bindguard_core::refresh::{REFRESHED_FILE, RefreshedMounts};
use serde::de::DeserializeOwned;

use super::MAX_SPEC;
use crate::failure::{Failure, failed};
use crate::replace::next_mount_id;
use crate::size_errors::{leave_room, with_size_errors};

/// The mode of a record.
const MODE: u32 = 0o600;

/// Writes the record. Follows no link.
///
/// # Errors
/// If the record cannot be written. Then no record is there.
pub fn write(bundle: &Path, expected: &ExpectedBinds) -> io::Result<()> {
    let json = serde_json::to_vec(expected)?;
    let path = bundle.join(EXPECTED_FILE);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(MODE)
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
pub fn replace(bundle: &Path, expected: &ExpectedBinds) -> io::Result<()> {
    let json = serde_json::to_vec(expected)?;
    super::replace(&bundle.join(EXPECTED_FILE), MODE, &json)
}

/// As [`replace()`], for the record of refreshes.
///
/// # Errors
/// As there.
pub fn replace_refreshed(bundle: &Path, refreshed: &RefreshedMounts) -> io::Result<()> {
    let json = serde_json::to_vec(refreshed)?;
    super::replace(&bundle.join(REFRESHED_FILE), MODE, &json)
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
        let _ = replace(bundle, &expected);
    }
}

/// The version of a bundle's spec; `None` if there is no spec.
pub fn spec_version(bundle: &Path) -> Option<SpecVersion> {
    let spec = fs::metadata(bundle.join("config.json")).ok()?;
    Some(SpecVersion {
        inode: spec.ino(),
        size: spec.len(),
        changed: (spec.ctime(), spec.ctime_nsec()),
    })
}

/// The time at which the record was written, since 1970; `None` if there is no record.
pub fn written_at(bundle: &Path) -> Option<Duration> {
    let record = fs::symlink_metadata(bundle.join(EXPECTED_FILE)).ok()?;
    let nanoseconds = u32::try_from(record.ctime_nsec()).ok()?;
    Some(Duration::new(record.ctime().try_into().ok()?, nanoseconds))
}

/// Removes the records of an earlier create, if any.
pub fn remove(bundle: &Path) {
    let _ = fs::remove_file(bundle.join(EXPECTED_FILE));
    let _ = fs::remove_file(bundle.join(REFRESHED_FILE));
}

/// Reads the record.
///
/// # Errors
/// If the record is missing, cannot be read, or cannot be parsed.
pub fn read(bundle: &Path) -> Result<ExpectedBinds, Failure> {
    read_json(&bundle.join(EXPECTED_FILE))
}

/// As [`read`], for the record of refreshes.
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
