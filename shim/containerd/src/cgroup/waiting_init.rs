//! Ends the init that a killed runtime left waiting.
//!
//! crun's init waits for `start` before crun has recorded it. If crun is killed in between, no `delete` finds the init. It waits
//! without end, and its cgroup or scope stays.
//!
//! Another container may have the same `cgroupsPath`, so the cgroup alone proves nothing. The init has not executed the
//! container's program yet: its command line is that of the runtime's `create`, with the bundle of this container and of no
//! other. A process with any other command line is not touched.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Ends the processes in these cgroups, or below them, that the runtime's `create` for this bundle forked. There is one cgroup
/// for each hierarchy.
pub(super) fn end_waiting_init(cgroups: &[PathBuf], bundle: &Path) {
    let pids: HashSet<Pid> = cgroups.iter().flat_map(|cgroup| pids_within(cgroup)).collect();
    for pid in pids {
        match end_if_of_create(pid, bundle) {
            Ok(false) => {}
            Ok(true) => tracing::warn!(%pid, bundle = %bundle.display(), "ended the init that a killed runtime left"),
            Err(error) => tracing::warn!(%pid, %error, "a process of an interrupted create stays"),
        }
    }
}

/// The processes in a cgroup and below it. None if it is gone.
fn pids_within(cgroup: &Path) -> Vec<Pid> {
    let members = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let own = members.lines().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    own.chain(below.flat_map(|folder| pids_within(&folder.path()))).collect()
}

/// The descriptor comes first: the command line is then that of the process that gets the signal, or the signal fails.
fn end_if_of_create(pid: Pid, bundle: &Path) -> io::Result<bool> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let command_line = fs::read(format!("/proc/{pid}/cmdline"))?;
    if !is_create_of(&command_line, bundle) {
        return Ok(false);
    }
    pidfd_send_signal(&process, Signal::KILL)?;
    Ok(true)
}

/// True for `PROGRAM … create … --bundle BUNDLE …`, as [`Runtime::create`](crate::runtime::Runtime::create) calls it.
fn is_create_of(command_line: &[u8], bundle: &Path) -> bool {
    let words: Vec<&[u8]> = command_line.split(|byte| *byte == 0).collect();
    let bundle = bundle.as_os_str().as_bytes();
    words.contains(&b"create".as_slice()) && words.windows(2).any(|pair| pair == [b"--bundle".as_slice(), bundle])
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn only_a_create_of_this_very_bundle_counts() {
        let bundle = Path::new("/run/b/web");
        let of = |line: &str| is_create_of(line.replace(' ', "\0").as_bytes(), bundle);
        assert!(of("crun --root /r create --bundle /run/b/web --pid-file /run/b/web/init.pid web "));
        for other in [
            "",
            "/bin/app create --bundle",
            "crun --root /r create --bundle /run/b/web2 web2 ",
            "crun --root /r create --bundle /run/b web ",
            "crun --root /r exec --bundle /run/b/web web ",
            "crun create --pid-file /run/b/web --bundle /run/b/other ",
        ] {
            assert!(!of(other), "{other}");
        }
    }

    /// A process whose command line has these words; it waits.
    fn waiting(words: &[&str]) -> Child {
        Command::new("sh").args(["-c", "read forever; :", "crun"]).args(words).stdin(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn of_the_processes_below_a_cgroup_only_the_waiting_init_is_ended() {
        let cgroup = tempfile::tempdir().unwrap();
        let mut init = waiting(&["create", "--bundle", "/run/b/web", "web"]);
        let mut other = waiting(&["create", "--bundle", "/run/b/other", "web"]);
        let below = cgroup.path().join("container");
        fs::create_dir(&below).unwrap();
        fs::write(cgroup.path().join("cgroup.procs"), "").unwrap();
        fs::write(below.join("cgroup.procs"), format!("{}\n{}\n", other.id(), init.id())).unwrap();
        assert_eq!(pids_within(cgroup.path()).len(), 2);

        end_waiting_init(&[cgroup.path().to_owned(), cgroup.path().to_owned()], Path::new("/run/b/web"));
        assert_eq!(init.wait().unwrap().signal(), Some(9));
        assert_eq!(other.try_wait().unwrap(), None, "a process of another create was ended");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_cgroup_that_is_gone_has_no_processes() {
        assert!(pids_within(Path::new("/no/such/cgroup")).is_empty());
    }
}
