//! Ends the init that a killed runtime left waiting.
//!
//! crun's init waits for `start` before crun has recorded it. If crun is killed in between, no
//! `delete` finds the init. It waits without end, and its cgroup or scope stays.
//!
//! Several containers may have the same `cgroupsPath`, so the cgroup alone proves nothing. The init
//! has the fifo open that `start` writes to: `exec.fifo` in the runtime's state of this container.
//! The init closes the fifo at the exec of the container's program. A process without this
//! descriptor is not touched.
//!
//! Only links are read, by a thread that can be left behind: a process can block its readers for
//! ever.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::processes::processes_within;
use crate::blockable::read_each;

/// The fifo by which crun and runc start the init.
const START_FIFO: &str = "exec.fifo";

/// The kernel's mark on the name of a file that was removed.
const DELETED: &[u8] = b" (deleted)";

/// Ends the processes in or below these cgroups that wait for the start of the container with this
/// state directory. `cgroups` has a path for each hierarchy.
pub(super) fn end_waiting_init(cgroups: &[PathBuf], state: &Path) {
    let pids: HashSet<Pid> = cgroups
        .iter()
        .flat_map(|cgroup| pids_within(cgroup))
        .collect();
    if pids.is_empty() {
        return;
    }
    let fifo = resolved(state).join(START_FIFO);
    let waits: Vec<(Pid, PathBuf)> = pids.into_iter().map(|pid| (pid, fifo.clone())).collect();
    let read = read_each(&waits, |(pid, fifo)| waiting(*pid, fifo));
    for ((pid, _), waiting) in waits.iter().zip(read) {
        let waiting = waiting.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()));
        let ended = waiting.and_then(|process| match process {
            Some(process) => Ok(pidfd_send_signal(process, Signal::KILL).map(|()| true)?),
            None => Ok(false),
        });
        match ended {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(%pid, state = %state.display(), "ended the init that a killed runtime left")
            }
            Err(error) => tracing::warn!(%pid, %error, "a process of an interrupted create stays"),
        }
    }
}

/// The kernel shows a descriptor's path without links. The state directory itself may be gone.
#[expect(
    clippy::disallowed_methods,
    reason = "the runtime's own directory, not the source of a container's bind"
)]
fn resolved(state: &Path) -> PathBuf {
    let root = state.parent().and_then(|root| root.canonicalize().ok());
    root.zip(state.file_name())
        .map_or_else(|| state.to_owned(), |(root, id)| root.join(id))
}

/// The processes in a cgroup and below it, as far as they can be read.
fn pids_within(cgroup: &Path) -> impl Iterator<Item = Pid> {
    let lines = processes_within(cgroup).into_iter().flatten();
    lines.filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
}

/// The process, if it waits for the fifo. The pidfd is opened before the links are read: a signal
/// then reaches the process with these links, or fails.
fn waiting(pid: Pid, fifo: &Path) -> io::Result<Option<OwnedFd>> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(has_open(pid, fifo)?.then_some(process))
}

fn has_open(pid: Pid, fifo: &Path) -> io::Result<bool> {
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        let Ok(link) = fs::read_link(descriptor?.path()) else {
            continue;
        };
        let link = link.as_os_str().as_bytes();
        if link.strip_suffix(DELETED).unwrap_or(link) == fifo.as_os_str().as_bytes() {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    use super::*;
    use bindguard_testing::held_memory::{Executing, Holder, blocks_readers, unless_it_hangs};

    /// The state directory of a container, with the fifo.
    fn state(root: &Path, id: &str) -> PathBuf {
        let state = root.join(id);
        fs::create_dir(&state).unwrap();
        assert!(
            Command::new("mkfifo")
                .arg(state.join(START_FIFO))
                .status()
                .unwrap()
                .success()
        );
        state
    }

    /// A process that has the fifo of this state open and waits.
    fn waiting_for(state: &Path) -> Child {
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec 3<>\"$1\"; echo there; read forever; :", "crun"])
            .arg(state.join(START_FIFO));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut there = [0; 6];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut there)
            .unwrap();
        child
    }

    fn cgroup_of(pids: &[u32]) -> tempfile::TempDir {
        let cgroup = tempfile::tempdir().unwrap();
        let below = cgroup.path().join("container");
        fs::create_dir(&below).unwrap();
        fs::write(cgroup.path().join("cgroup.procs"), "").unwrap();
        fs::write(
            below.join("cgroup.procs"),
            pids.iter()
                .map(|pid| format!("{pid}\n"))
                .collect::<String>(),
        )
        .unwrap();
        cgroup
    }

    #[test]
    fn of_the_processes_below_a_cgroup_only_the_waiting_init_is_ended() {
        let root = tempfile::tempdir().unwrap();
        let [web, longer, other] = ["web", "web2", "other"].map(|id| state(root.path(), id));
        let mut init = waiting_for(&web);
        let mut others = [waiting_for(&longer), waiting_for(&other)];
        let cgroup = cgroup_of(&[others[0].id(), others[1].id(), init.id()]);
        assert_eq!(pids_within(cgroup.path()).count(), 3);

        // The runtime's root may be named through a link, as /var/run is.
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        end_waiting_init(
            &[cgroup.path().to_owned(), cgroup.path().to_owned()],
            &link.join("web"),
        );
        assert_eq!(init.wait().unwrap().signal(), Some(9));
        for other in &mut others {
            assert_eq!(
                other.try_wait().unwrap(),
                None,
                "a process of another create was ended"
            );
            other.kill().unwrap();
            other.wait().unwrap();
        }
    }

    /// `delete --force` may have removed the runtime's state.
    #[test]
    fn the_init_of_a_removed_state_is_ended() {
        let root = tempfile::tempdir().unwrap();
        let web = state(root.path(), "web");
        let mut init = waiting_for(&web);
        fs::remove_dir_all(&web).unwrap();
        end_waiting_init(&[cgroup_of(&[init.id()]).path().to_owned()], &web);
        assert_eq!(init.wait().unwrap().signal(), Some(9));
    }

    /// The process of a second container in the cgroup: a read of the command line would hang the
    /// shim.
    #[test]
    fn a_process_that_holds_its_memory_does_not_delay_the_clean_up() {
        let root = tempfile::tempdir().unwrap();
        let web = state(root.path(), "web");
        let Some(holder) = Holder::start(c"crun", || {}) else {
            return;
        };
        assert!(
            blocks_readers(holder.pid()),
            "the process does not hold its memory"
        );
        let mut init = waiting_for(&web);
        end_waiting_init(
            &[cgroup_of(&[holder.pid(), init.id()]).path().to_owned()],
            &web,
        );
        assert_eq!(init.wait().unwrap().signal(), Some(9));
    }

    /// A process of a second container in the cgroup, whose links cannot be read.
    #[test]
    fn a_process_that_hangs_in_execve_does_not_delay_the_clean_up() {
        let root = tempfile::tempdir().unwrap();
        let web = state(root.path(), "web");
        let Some(executing) = Executing::start() else {
            return;
        };
        let mut init = waiting_for(&web);
        let cgroup = cgroup_of(&[executing.pid(), init.id()]);
        let path = cgroup.path().to_owned();
        let ended = unless_it_hangs(move || end_waiting_init(&[path], &web));
        if ended.is_none() {
            init.kill().unwrap();
        }
        assert_eq!(ended, Some(()), "the clean-up hangs");
        assert_eq!(init.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn a_cgroup_that_is_gone_has_no_processes() {
        assert_eq!(pids_within(Path::new("/no/such/cgroup")).next(), None);
    }
}
