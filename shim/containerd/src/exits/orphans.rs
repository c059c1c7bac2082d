//! Zombies that nobody waits for.
//!
//! A subreaper inherits processes it never heard of: what a container in the host's pid namespace left running, what a
//! runtime's hook forked. On SIGCHLD the kernel's own list of our children is read, and those that are dead and unknown
//! are reaped one by one. Children of ours are never touched: every run of the runtime holds this reaper off, see
//! `Exits::hold`.

use std::{fs, sync::Arc, time::Duration};

use nix::libc::SIGCHLD;
use rustix::{
    io::Errno,
    process::{Pid, WaitId, WaitIdOptions, waitid},
};

use super::Exits;
use crate::signals::Signals;

/// How long a sweep that met a running runtime waits before it looks again.
const RETRY: Duration = Duration::from_secs(1);

/// Reaps orphans for as long as the shim lives.
pub(crate) async fn reap_on_sigchld(exits: Arc<Exits>) {
    let mut children = match Signals::of(&[SIGCHLD]) {
        Ok(children) => children,
        Err(error) => {
            tracing::error!(%error, "orphans will stay zombies: no SIGCHLD");
            return;
        }
    };
    while children.next().await.is_ok() {
        while !exits.may_reap() {
            tokio::time::sleep(RETRY).await;
        }
        if !has_zombie() {
            continue;
        }
        for pid in children_of_this_process() {
            if !exits.is_known(pid) && is_zombie(pid) {
                reap(pid);
            }
        }
    }
}

/// Is there a dead child at all, waited for or not? Usually its own waiter was faster, and that is all.
fn has_zombie() -> bool {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::All, look), Ok(None) | Err(Errno::CHILD))
}

/// A child belongs to the thread that forked it, and an orphan to any of our threads: so all threads are asked.
fn children_of_this_process() -> Vec<u32> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    threads
        .flatten()
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>())
        .collect()
}

fn is_zombie(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| state_letter(&stat) == Some('Z'))
}

/// The state stands after the name, which is in parentheses and may hold anything, parentheses included.
fn state_letter(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

fn reap(pid: u32) {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
    match waitid(WaitId::Pid(raw), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        Ok(_) => tracing::debug!(pid, "reaped an orphan"),
        Err(error) => tracing::debug!(pid, %error, "an orphan was gone already"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_comes_after_whatever_the_name_is() {
        assert_eq!(state_letter("12 (sh) Z 1 12"), Some('Z'));
        assert_eq!(state_letter("12 (a) b) c) S 1 12"), Some('S'));
        assert_eq!(state_letter(""), None);
    }

    #[test]
    fn our_own_children_are_listed() {
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        assert!(children_of_this_process().contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
