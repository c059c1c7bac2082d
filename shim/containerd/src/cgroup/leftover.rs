//! Removes the cgroup of a container whose create was interrupted.
//!
//! A runtime makes the cgroup before it writes its state. A runtime that is killed in between has
//! no record of the container, and `delete` does not find the cgroup. The spec still names the
//! cgroup. rmdir(2) removes only an empty cgroup, so a cgroup with processes or child cgroups
//! stays. Of the processes, only the init of this create is ended.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bindguard_core::error_chain;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{ROOT, hierarchies_in};
use crate::blocking::{read_each, run_blocking};
use crate::kernel;
use crate::step::{Result, failed};

/// A process that the dead runtime forked sees the end of its pipe, and then ends. systemd usually
/// notices within the same time.
const TRIES: u32 = 25;
const PAUSE: Duration = Duration::from_millis(10);
/// The fifo by which crun and runc start the init.
const START_FIFO: &str = "exec.fifo";
/// The kernel's mark on the name of a file that was removed.
const DELETED: &[u8] = b" (deleted)";
/// runc's slice for a path without a slice.
const USUAL_SLICE: &str = "system.slice";

/// Ends the init that a killed runtime left waiting, and removes the empty cgroup that a spec names
/// by `cgroupsPath`, in every hierarchy. With a path in systemd's form it stops the scope. `state`
/// is the runtime's directory for the container.
pub async fn remove_leftover_cgroup(cgroups_path: &str, state: &Path) {
    let scope = systemd_scope(cgroups_path);
    let path = match &scope {
        Some((_, path)) => path,
        None => match below_the_root(cgroups_path) {
            Some(path) => path,
            None => return,
        },
    };
    let mut cgroups = hierarchies_in(Path::new(ROOT));
    for cgroup in &mut cgroups {
        cgroup.push(path);
    }
    let (within, state) = (cgroups.clone(), state.to_owned());
    if let Err(error) = run_blocking(move || end_waiting_init(&within, &state)).await {
        tracing::warn!(%error, "the init of an interrupted create may stay");
    }
    if let Some((unit, _)) = scope {
        return stop_if_empty(unit, &cgroups).await;
    }
    for cgroup in cgroups {
        for _ in 0..TRIES {
            match fs::remove_dir(&cgroup) {
                Ok(()) => {
                    tracing::debug!(cgroup = %cgroup.display(), "removed what a killed runtime left")
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(_) => {}
            }
            break;
        }
    }
}

/// Only an absolute path without `..` is the same folder for the runtime and for the shim.
fn below_the_root(cgroups_path: &str) -> Option<&Path> {
    let path = Path::new(cgroups_path).strip_prefix("/").ok()?;
    let is_plain = |part| matches!(part, Component::Normal(_));
    (path.components().all(is_plain) && !path.as_os_str().is_empty()).then_some(path)
}

/// Ends the processes in or below these cgroups that wait for the start of the container with this
/// state directory. `cgroups` has a path for each hierarchy.
///
/// crun's init waits for `start` before crun has recorded it. If crun is killed in between, no
/// `delete` finds the init. It waits without end, and its cgroup or scope stays.
///
/// Several containers may have the same `cgroupsPath`, so the cgroup alone proves nothing. The init
/// has the fifo open that `start` writes to: `exec.fifo` in the runtime's state of this container.
/// The init closes the fifo at the exec of the container's program. A process without this
/// descriptor is not touched.
///
/// Only links are read, by a thread that can be left behind: a process can block its readers for
/// ever.
fn end_waiting_init(cgroups: &[PathBuf], state: &Path) {
    let fifo = resolved(state).join(START_FIFO);
    let mut waits = HashSet::new();
    for line in cgroups.iter().flat_map(|cgroup| processes_within(cgroup)) {
        if let Ok(line) = line
            && let Some(pid) = line.parse().ok().and_then(Pid::from_raw)
        {
            waits.insert((pid, fifo.clone()));
        }
    }
    let waits = Vec::from_iter(waits);
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
    match (root, state.file_name()) {
        (Some(root), Some(id)) => root.join(id),
        _ => state.to_owned(),
    }
}

/// The process, if it has the fifo open. The pidfd is opened before the links are read: a signal
/// then reaches the process with these links, or fails.
fn waiting(pid: Pid, fifo: &Path) -> io::Result<Option<OwnedFd>> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        let Ok(link) = fs::read_link(descriptor?.path()) else {
            continue;
        };
        let link = link.as_os_str().as_bytes();
        if link.strip_suffix(DELETED).unwrap_or(link) == fifo.as_os_str().as_bytes() {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// The lines of `cgroup.procs` in the cgroup and below it; none if the cgroup is gone. A line is
/// `0` for a process of another pid namespace. A cgroup that cannot be read may have processes.
fn processes_within(cgroup: &Path) -> Vec<Result<String>> {
    let (mut found, mut left) = (Vec::new(), vec![cgroup.to_owned()]);
    while let Some(path) = left.pop() {
        let mut read = || {
            for entry in fs::read_dir(&path)? {
                let entry = entry?;
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(entry.path());
                }
            }
            fs::read_to_string(path.join("cgroup.procs"))
        };
        match read() {
            Ok(own) => found.extend(own.lines().map(|line| Ok(line.to_owned()))),
            // ENODEV: the cgroup was removed while its file was open.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(nix::libc::ENOENT | nix::libc::ENODEV)
                ) => {}
            Err(error) => found.push(Err(failed(format!("read {}", path.display()))(error))),
        }
    }
    found
}

/// The unit that a runtime makes for `cgroupsPath` in systemd's form, `slice:prefix:name`, and its
/// cgroup below each hierarchy.
fn systemd_scope(cgroups_path: &str) -> Option<(String, PathBuf)> {
    let parts: Vec<&str> = cgroups_path.split(':').collect();
    let [slice, prefix, name] = parts[..] else {
        return None;
    };
    let is_plain = |text: &str| !text.contains('/') && !text.is_empty();
    if !is_plain(prefix) || !is_plain(name) || name.ends_with(".slice") {
        return None;
    }
    let unit = format!("{prefix}-{name}.scope");
    let slice = if slice.is_empty() { USUAL_SLICE } else { slice };
    let path = path_of_slice(slice)?.join(&unit);
    Some((unit, path))
}

/// `a-b.slice` lies in `a.slice`: systemd.slice(5).
fn path_of_slice(slice: &str) -> Option<PathBuf> {
    let name = slice.strip_suffix(".slice")?;
    if name.contains('/') {
        return None;
    }
    let mut path = PathBuf::new();
    // `-.slice` is the root.
    if name == "-" {
        return Some(path);
    }
    for (end, _) in name.match_indices('-').chain([(name.len(), "")]) {
        let parent = &name[..end];
        if parent.is_empty() || parent.ends_with('-') {
            return None;
        }
        path.push(format!("{parent}.slice"));
    }
    Some(path)
}

/// Stops a scope if systemd leaves the empty scope in place.
///
/// systemd ends a scope with its last process. A runtime that is killed while systemd starts the
/// scope can leave an empty scope that systemd does not end. The cgroup stays, and the next create
/// with this name fails. Only an empty scope is stopped.
async fn stop_if_empty(unit: String, cgroups: &[PathBuf]) {
    for _ in 0..TRIES {
        if !cgroups.iter().any(|cgroup| fs::metadata(cgroup).is_ok()) {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    for cgroup in cgroups {
        match processes_within(cgroup).first() {
            None => {}
            Some(Ok(_)) => return,
            Some(Err(error)) => {
                return tracing::warn!(unit, error = error_chain(error), "a scope stays");
            }
        }
    }
    tracing::debug!(unit, "stopping the scope that a killed runtime left");
    let stop = move || {
        let mut command = Command::new("systemctl");
        command
            .args(["stop", "--no-block", "--quiet", "--", &unit])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        kernel::with_default_signals(&mut command);
        match command.status() {
            Ok(status) if status.success() => {}
            Ok(status) => {
                tracing::warn!(unit, %status, "an empty scope stays: systemctl stop failed")
            }
            Err(error) => tracing::warn!(unit, %error, "an empty scope stays: run systemctl"),
        }
    };
    if let Err(error) = run_blocking(stop).await {
        tracing::warn!(%error, "an empty scope stays: run systemctl");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    use bindguard_testing::held_memory::{Executing, Holder, blocks_readers, unless_it_hangs};

    use super::*;

    #[test]
    fn only_plain_paths_from_the_top() {
        assert_eq!(
            below_the_root("/kubepods/burstable/web"),
            Some(Path::new("kubepods/burstable/web"))
        );
        for other in ["", "/", "web", "system.slice:cri:web", "/kubepods/../web"] {
            assert_eq!(below_the_root(other), None, "{other}");
        }
    }

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
        assert_eq!(processes_within(cgroup.path()).len(), 3);

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
        assert!(processes_within(Path::new("/no/such/cgroup")).is_empty());
    }

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

    fn scope(unit: &str, path: &str) -> Option<(String, PathBuf)> {
        Some((unit.to_owned(), path.into()))
    }

    #[test]
    fn a_path_in_systemds_form_names_a_scope_in_its_slices() {
        assert_eq!(
            systemd_scope(":cri:web"),
            scope("cri-web.scope", "system.slice/cri-web.scope")
        );
        assert_eq!(
            systemd_scope("kubepods-burstable-pod1_2.slice:cri-containerd:7"),
            scope(
                "cri-containerd-7.scope",
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-7.scope"
            )
        );
        assert_eq!(
            systemd_scope("-.slice:cri:web"),
            scope("cri-web.scope", "cri-web.scope")
        );
        for other in [
            "",
            "/kubepods/web",
            "a.slice:cri",
            "a.slice::web",
            "a.slice:cri:b.slice",
            "a/b.slice:c:d",
            "a:b:c",
        ] {
            assert_eq!(systemd_scope(other), None, "{other}");
        }
        for slice in [
            "a--b.slice:cri:web",
            "-a.slice:cri:web",
            "a.slice:../cri:web",
        ] {
            assert_eq!(systemd_scope(slice), None, "{slice}");
        }
    }
}
