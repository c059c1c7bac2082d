//! Files that bindguard reads and writes whole: on any filesystem, even on a server that does not
//! answer, and the files of a bundle.
//!
//! Folders and files of bindguard get modes that do not depend on the caller's umask. A umask of 0
//! would let every user write what root made, and a umask of 077 would keep users from programs
//! that they run.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::proof::{EXPECTED_FILE, ExpectedBinds, SpecVersion};
use bindguard_core::refresh::{REFRESHED_FILE, RefreshedMounts};
use nix::libc;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::handle::cannot_wait;
use crate::mounts::Mounts;
use crate::own_process::FaultPoint;
use crate::probe::answer_within;
use crate::replace::next_mount_id;
use crate::{Failure, failed};

/// Time limit for a server.
const READ_TIMEOUT: Duration = Duration::from_millis(700);

/// Reads a file, or its first `most` bytes.
///
/// # Errors
/// The kernel's errors, `TimedOut` if a server does not answer, and `InvalidInput` for a fifo: its
/// writer may never come.
pub fn read_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if is_on_this_node(path) {
        read_here(path, most)
    } else {
        read_in_separate_process(path, most)
    }
}

/// `None` if there is no such file or folder.
///
/// # Errors
/// The other errors.
pub fn unless_absent<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// True if the file can be read without waiting for a server. Before Linux 6.8 only the mount table
/// shows that, which costs more than a small file is worth: the answer is true then.
fn is_on_this_node(path: &Path) -> bool {
    let mounts = Mounts::default();
    cannot_wait(path, |handle| !mounts.is_on_a_server(handle))
}

fn read_here(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.file_type().is_fifo() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is a fifo"));
    }
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read_in_separate_process(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    answer_within(READ_TIMEOUT, path, || read_here(path, most))
}

/// Creates a folder and the missing folders above it, each with this mode. An existing folder keeps
/// its mode.
///
/// # Errors
/// The kernel's, and `NotADirectory` if a file is in the way.
pub fn make_folders(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(mode)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            if fs::metadata(folder)?.is_dir() {
                Ok(())
            } else {
                Err(ErrorKind::NotADirectory.into())
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            make_folders(folder.parent().ok_or(error)?, mode)?;
            make_folders(folder, mode)
        }
        Err(error) => Err(error),
    }
}

/// Creates a file with this content and this mode, instead of a file that a killed process left.
/// Follows no link.
///
/// # Errors
/// The kernel's.
pub fn write_new_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut create = OpenOptions::new();
    create.write(true).create_new(true).mode(0o600);
    let mut file = match create.open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            create.open(path)?
        }
        opened => opened?,
    };
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(mode))
}

// A write beyond RLIMIT_FSIZE returns EFBIG, and a write to a nearly full filesystem ENOSPC.
//
// The kernel sends SIGXFSZ to the writing thread first, which ends a process that does not ignore
// it (setrlimit(2)). Guards inherit a service manager's `LimitFSIZE` from containerd. An ignored
// signal belongs to the whole process: another thread may restore its action in the middle of a
// write, and a runtime or a child would inherit it by exec. So the thread blocks the signal for
// the time of the write.

/// A runtime needs some 30 KiB for the state of a container, and a multiple of a long spec.
const ROOM_OF_A_RUNTIME: u64 = 128 << 10;

/// Runs `work`, in which a write of the calling thread beyond the limit is an error.
///
/// # Errors
/// Those of the work.
pub fn with_size_errors<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let signal = SigSet::from(Signal::SIGXFSZ);
    let former = signal
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map(FormerMask);
    let result = work();
    // A thread has the same signal pending only once. The second signal makes sure that there is one
    // to take, so the wait ends at once.
    if result.is_err() && former.is_ok() && raise(Signal::SIGXFSZ).is_ok() {
        let _ = signal.wait();
    }
    result
}

/// The former signal mask of the thread, which also a panic restores: a runtime would inherit the
/// other mask.
struct FormerMask(SigSet);

impl Drop for FormerMask {
    fn drop(&mut self) {
        let _ = self.0.thread_set_mask();
    }
}

/// Checks that a file's filesystem keeps room for a runtime: the caller's write is worth less than a
/// create.
///
/// # Errors
/// ENOSPC if the filesystem is nearly full.
pub fn leave_room(file: &File) -> io::Result<()> {
    let found = rustix::fs::fstatvfs(file)?;
    // a filesystem without a limit has no blocks
    if found.f_blocks > 0 && found.f_bavail * found.f_frsize < ROOM_OF_A_RUNTIME {
        Err(Errno::NOSPC.into())
    } else {
        Ok(())
    }
}

// The files of a bundle: config.json, read whole and replaced whole, and the records of the
// container's mounts.

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
                ErrorKind::InvalidInput,
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
        FaultPoint::SpecBegun.reach();
        with_size_errors(|| file.write_all(bytes))?;
        file.set_permissions(Permissions::from_mode(mode))?;
        FaultPoint::SpecWritten.reach();
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

// The bundle and the init process of a container, from the state files of its runtime.

/// `status` of crun (`libcrun_container_status_s`), `state.json` of runc (`libcontainer.State`) and
/// of youki (`libcontainer::container::State`).
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum RuntimeState {
    OfRunc {
        init_process_pid: u32,
        config: RuncConfig,
    },
    OfOther {
        pid: u32,
        bundle: PathBuf,
    },
}

#[derive(Debug, Deserialize)]
struct RuncConfig {
    labels: Vec<String>,
}

/// The bundle and the init process of a container with this state folder.
pub fn bundle_and_pid(state: &Path) -> Option<(PathBuf, u32)> {
    for name in ["status", "state.json"] {
        let json = unless_absent(fs::read(state.join(name))).ok()?;
        let (bundle, pid) = match serde_json::from_slice(&json.unwrap_or_default()) {
            Ok(RuntimeState::OfRunc {
                init_process_pid,
                config,
            }) => {
                let mut labels = config.labels.iter();
                let bundle = labels.find_map(|label| label.strip_prefix("bundle="))?;
                (bundle.into(), init_process_pid)
            }
            Ok(RuntimeState::OfOther { pid, bundle }) => (bundle, pid),
            Err(_) => continue,
        };
        return (pid > 0).then_some((bundle, pid));
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn both_processes_read_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "x".repeat(100_000)).unwrap();
        symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            for read in [read_file, read_here, read_in_separate_process] {
                assert_eq!(read(path, 200_000).unwrap().len(), 100_000);
                assert_eq!(read(path, 10).unwrap().len(), 10);
            }
        }
        for path in [
            folder.path().join("missing"),
            folder.path().join("deep/er/missing"),
        ] {
            assert!(
                is_on_this_node(&path),
                "a process would be made each time: {}",
                path.display()
            );
            for read in [read_file, read_here, read_in_separate_process] {
                assert_eq!(read(&path, 10).unwrap_err().kind(), ErrorKind::NotFound);
            }
        }
    }

    #[test]
    fn a_fifo_does_not_block_the_reader() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        assert_eq!(
            read_file(&fifo, 10).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
        assert!(read_file(Path::new("/dev/null"), 10).unwrap().is_empty());
    }
}

#[cfg(test)]
mod new_files_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    /// The guard's panic is caught, and the runtime follows in the same thread.
    #[test]
    fn a_panic_leaves_no_signal_blocked() {
        let ended = std::panic::catch_unwind(|| with_size_errors::<()>(|| panic!("as requested")));
        assert!(ended.is_err());
        let mask = SigSet::thread_get_mask().unwrap();
        assert!(!mask.contains(Signal::SIGXFSZ));
    }

    #[test]
    fn modes_are_exact_and_links_are_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let (outer, inner) = (place.path().join("outer"), place.path().join("outer/inner"));
        // the usual umask takes these bits
        make_folders(&inner, 0o777).unwrap();
        assert_eq!((mode(&outer), mode(&inner)), (0o777, 0o777));
        make_folders(&inner, 0o700).unwrap();
        assert_eq!(mode(&inner), 0o777, "an existing folder keeps its mode");

        let (file, link) = (inner.join("file"), inner.join("link"));
        write_new_file(&file, b"one", 0o666).unwrap();
        assert_eq!(mode(&file), 0o666);
        symlink(&file, &link).unwrap();
        write_new_file(&link, b"two", 0o600).unwrap();
        assert!(link.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read(&file).unwrap(), b"one");
        let below_a_file = make_folders(&file.join("below"), 0o755).unwrap_err();
        assert_eq!(below_a_file.kind(), ErrorKind::NotADirectory);
    }
}

#[cfg(test)]
mod bundle_tests {
    use super::*;

    #[test]
    fn a_spec_is_replaced_whole_and_keeps_its_mode() {
        let bundle = tempfile::tempdir().unwrap();
        let config = bundle.path().join("config.json");
        fs::write(&config, "old").unwrap();
        fs::set_permissions(&config, Permissions::from_mode(0o640)).unwrap();
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
        assert!(error.source.kind() == ErrorKind::InvalidInput);
    }

    #[test]
    fn a_bundle_without_a_spec_is_named() {
        let error = read_spec(Path::new("/nowhere")).unwrap_err();
        assert_eq!(error.to_string(), "read /nowhere/config.json");
    }
}

#[cfg(test)]
mod state_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn the_state_of_each_runtime_is_read() {
        for (name, state, pid) in [
            (
                "status",
                r#"{"pid":7,"bundle":"/b","rootfs":"/b/rootfs"}"#,
                7,
            ),
            (
                "state.json",
                r#"{"init_process_pid":8,"config":{"labels":["a=1","bundle=/b"]}}"#,
                8,
            ),
            (
                "state.json",
                r#"{"ociVersion":"v1.0.2","id":"c","status":"created","pid":9,"bundle":"/b"}"#,
                9,
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), state).unwrap();
            assert_eq!(
                bundle_and_pid(folder.path()),
                Some(("/b".into(), pid)),
                "{state}"
            );
        }
        assert_eq!(bundle_and_pid(Path::new("/nowhere")), None);
    }
}
