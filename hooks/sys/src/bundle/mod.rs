//! The files of a bundle that the guard reads and writes: config.json, read whole and replaced
//! whole, and the [records](record) of the container's mounts.

pub mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::failure::{Failure, failed};
use crate::fault::{self, FaultPoint};
use crate::size_errors::with_size_errors;

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
        File::open(path)?
            .take(MAX_SPEC + 1)
            .read_to_end(&mut spec)?;
        match spec.len() as u64 > MAX_SPEC {
            true => Err(io::Error::other(format!(
                "it is larger than {} MiB",
                MAX_SPEC >> 20
            ))),
            false => Ok(spec),
        }
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
        let id = name.to_str().and_then(|name| name.strip_prefix(BESIDE));
        let id = id.and_then(|id| id.parse().ok()).filter(|id| *id > 0);
        if let Some(pid) = id.and_then(Pid::from_raw)
            // The calling guard has written nothing yet.
            && (pid == rustix::process::getpid() || test_kill_process(pid) == Err(Errno::SRCH))
        {
            let _ = fs::remove_file(entry.path());
        }
    }
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
