//! Reaps zombies that have no waiter.
//!
//! A subreaper inherits unknown processes: leftovers of a container in the host's pid namespace, or
//! children of a runtime's hook. Orphans are reaped at once, even during a call of the runtime: a
//! zombie counts against its container's pids limit, and the call may hang for ever. On SIGCHLD the
//! task reads the kernel's list of the shim's children and reaps each dead, unknown child. The
//! shim's own children are known before this task can see them, because their starter runs on the
//! same thread.

use std::fs;
use std::sync::Arc;
use std::time::SystemTime;

use nix::libc::SIGCHLD;
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, waitid};

use super::pidfd::status_of;
use super::{Exit, Exits};
use crate::signals::Signals;

/// Reaps orphans for as long as the shim lives.
pub(crate) async fn reap_on_sigchld(exits: Arc<Exits>) {
    let mut children = match Signals::register(&[SIGCHLD]) {
        Ok(children) => children,
        Err(error) => {
            tracing::error!(%error, "orphans will stay zombies: no SIGCHLD");
            return;
        }
    };
    while children.next().await.is_ok() {
        if !has_zombie() {
            continue;
        }
        for pid in child_pids() {
            if !exits.is_known(pid) {
                reap(pid, &exits);
            }
        }
    }
}

/// True if there is a dead child, waited for or not. Usually the child's own waiter was faster, and
/// no zombie is left.
fn has_zombie() -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::All, options), Ok(None) | Err(Errno::CHILD))
}

/// The children of the event loop's thread, including zombies.
pub(crate) fn child_pids() -> Vec<u32> {
    children_of(getpid())
}

/// The children of a thread: a child belongs to the thread that forked it. The kernel gives orphans
/// to a process's first thread (find_new_reaper in kernel/exit.c), the event loop's thread. Threads
/// in rootfs/fuse.rs and rootfs/id_map.rs start and reap children of their own.
fn children_of(thread: Pid) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/self/task/{}/children", thread.as_raw_pid()))
        .unwrap_or_default();
    list.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// Reaps the process if it is dead, and keeps the status for a call that may have started the
/// process.
pub(super) fn reap(pid: u32, exits: &Exits) {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return;
    };
    match waitid(
        WaitId::Pid(raw),
        WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
    ) {
        Ok(Some(status)) => {
            exits.inner().statuses.keep(
                pid,
                Exit {
                    status: status_of(&status),
                    at: SystemTime::now(),
                },
            );
            tracing::debug!(pid, "reaped an orphan");
        }
        Ok(None) => {}
        Err(error) => tracing::debug!(pid, %error, "an orphan was gone already"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_listed_for_the_thread_that_forked_it() {
        let mut child = std::process::Command::new("sleep")
            .arg("10")
            .spawn()
            .unwrap();
        assert!(children_of(rustix::thread::gettid()).contains(&child.id()));
        let elsewhere = std::thread::spawn(|| children_of(rustix::thread::gettid()))
            .join()
            .unwrap();
        assert!(!elsewhere.contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
