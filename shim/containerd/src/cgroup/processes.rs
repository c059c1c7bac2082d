//! The processes of a cgroup and of its descendants.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A cgroup whose processes are not known.
#[derive(Debug, thiserror::Error)]
#[error("read {}", path.display())]
pub(super) struct UnreadCgroup {
    path: PathBuf,
    source: io::Error,
}

/// The lines of `cgroup.procs` in the cgroup and below it; none if the cgroup is gone. A line is
/// `0` for a process of another pid namespace. A cgroup that cannot be read may have processes.
pub(super) fn processes_within(cgroup: &Path) -> Vec<Result<String, UnreadCgroup>> {
    let (mut found, mut left) = (Vec::new(), vec![cgroup.to_owned()]);
    while let Some(path) = left.pop() {
        let below = add_below(&path, &mut left);
        let own = fs::read_to_string(path.join("cgroup.procs"));
        match below.and(own) {
            Ok(own) => found.extend(own.lines().map(|line| Ok(line.to_owned()))),
            Err(error) if is_gone(&error) => {}
            Err(source) => found.push(Err(UnreadCgroup { path, source })),
        }
    }
    found
}

fn add_below(cgroup: &Path, left: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            left.push(entry.path());
        }
    }
    Ok(())
}

/// A cgroup that is removed while its file is open answers ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENODEV)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_in_a_cgroup_or_below_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("app");
        fs::create_dir(&below).unwrap();
        fs::write(dir.path().join("cgroup.procs"), "").unwrap();
        fs::write(below.join("cgroup.procs"), "").unwrap();
        let is_empty = |cgroup: &Path| processes_within(cgroup).is_empty();
        assert!(is_empty(dir.path()) && is_empty(Path::new("/no/such/cgroup")));
        fs::write(below.join("cgroup.procs"), "0\n").unwrap();
        assert!(!is_empty(dir.path()));
    }

    /// EOPNOTSUPP of a threaded cgroup, EIO of a failing read: the file is there, and its content
    /// is not known.
    #[test]
    fn an_unreadable_cgroup_is_not_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("cgroup.procs")).unwrap();
        assert!(processes_within(dir.path())[0].is_err());
    }
}
