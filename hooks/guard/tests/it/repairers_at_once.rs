//! Several repairers of a subpath at the same moment: a create, `bindguard repair`, a create that
//! is tried again.
//!
//! No lock separates the repairers, because a container could hold the lock. Every round leaves a
//! single current mount.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindguard_core::report::{BindReport, Outcome};
use bindguard_guard::{Attempt, admit};
use bindguard_sys::kernel_features;
use bindguard_testing::{Pod, own_namespace, test_if};
use nix::mount::{MsFlags, mount};

const REPAIRERS: usize = 4;
const ROUNDS: u64 = 60;

#[test]
fn one_current_mount_is_left_where_mounts_propagate() {
    if own_namespace() {
        all_repair(&Pod::with_keys(2));
    }
}

#[test_if(own_namespace)]
fn one_current_mount_is_left_where_mounts_are_private() {
    if !kernel_features().beneath {
        println!(
            "SKIPPED: before Linux 6.5 nothing can be mounted below a mount with a private parent"
        );
        return;
    }
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_PRIVATE | MsFlags::MS_REC,
        None::<&str>,
    )
    .unwrap();
    all_repair(&Pod::with_keys(2));
}

/// The volume changes while the repairers of every other round work, so that they open different
/// payloads.
fn all_repair(pod: &Pod) {
    let (turn, stop) = (Barrier::new(REPAIRERS + 1), AtomicBool::new(false));
    let mut wrong = Vec::new();
    thread::scope(|scope| {
        let repairers = [(); REPAIRERS]
            .map(|()| scope.spawn(|| (0..ROUNDS).flat_map(|_| repair(pod, &turn)).collect()));
        let reader = scope.spawn(|| read(pod, &stop));
        for round in 1..=ROUNDS {
            let changes = round % 2 == 0;
            pod.update(2 * round);
            turn.wait();
            if changes {
                pod.update(2 * round + 1);
            }
            turn.wait();
            if changes {
                admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First);
            }
            let (content, newest) = (content(pod), Some(2 * round + u64::from(changes)));
            let mounts = mounts_below(&pod.directory());
            if content != newest || mounts.len() != 2 {
                wrong.push(format!("round {round} shows {content:?}, by {mounts:#?}"));
            }
        }
        stop.store(true, Ordering::Relaxed);
        let found: [Vec<String>; REPAIRERS] = repairers.map(|repairer| repairer.join().unwrap());
        wrong.extend(found.into_iter().flatten().chain(reader.join().unwrap()));
    });
    assert_eq!(wrong, Vec::<String>::new());
    let is_payload = |name: &OsStr| name.to_str().is_some_and(|name| name.starts_with("..2"));
    let entries = fs::read_dir(pod.volume())
        .unwrap()
        .filter(|entry| is_payload(&entry.as_ref().unwrap().file_name()));
    assert_eq!(entries.count(), 1, "a payload was stranded");
}

/// Runs an admission at the same time as the other repairers. Returns the unrepaired binds.
fn repair(pod: &Pod, turn: &Barrier) -> Vec<String> {
    turn.wait();
    let report = admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First).report;
    turn.wait();
    let is_repaired = |bind: &BindReport| {
        matches!(
            bind.outcome,
            None | Some(Outcome::Rebound { .. } | Outcome::AlreadyCurrent)
        )
    };
    report
        .binds
        .iter()
        .filter(|bind| !is_repaired(bind))
        .map(|bind| format!("{bind:?}"))
        .collect()
}

/// Reads the subpath until `stop` is set; returns every content that was missing, empty, or older
/// than before.
fn read(pod: &Pod, stop: &AtomicBool) -> Vec<String> {
    let (mut newest, mut wrong) = (Some(0), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        match content(pod) {
            seen if seen >= newest => newest = seen,
            seen => wrong.push(format!("a reader saw {seen:?} after {newest:?}")),
        }
    }
    wrong
}

fn content(pod: &Pod) -> Option<u64> {
    fs::read_to_string(pod.subpath(0)).ok()?.parse().ok()
}

fn mounts_below(folder: &Path) -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    table
        .lines()
        .filter(|line| line.contains(folder.to_str().unwrap()))
        .map(str::to_owned)
        .collect()
}
