//! The node as an operator looks at it: every volume-subpath and every volume that has to be mounted, with names.

use std::path::{Path, PathBuf};
use std::time::Instant;

use bindguard_core::judge::{Finding, judge_reach, judge_volume};
use bindguard_core::kubelet::{MountedVolume, VolumeSubpath};
use bindguard_core::mount_table::MountTable;
use bindguard_core::node_report::NodeReport;
use bindguard_core::pods::Pods;
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::report::Report;
use bindguard_core::source::SourceKind;
use bindguard_sys::observe::{HeldVolume, list_volumes};
use bindguard_sys::{Mounts, read_mount_table};

use crate::ask::ask_patiently;
use crate::causes::in_full;
use crate::node::{AT_A_TIME, detach_node, diagnose_subpaths, repair_node};

/// What to do about the stale subpaths of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Nothing: say what a re-bind would do.
    Look,
    /// Bind the current target in their place.
    Rebind,
    /// Take the stale mount away, and leave the rest to the kubelet.
    Detach,
}

/// Judges the volumes of this node, and its subpaths: those that are `wanted`, by their paths.
pub fn survey_node(policy: &Policy, pods: &Pods, wanted: impl Fn(&Path) -> bool) -> NodeReport {
    let start = Instant::now();
    let mut report = diagnose_subpaths(&for_operators(policy), |subpath| wanted(&subpath.path()));
    let mut volumes = diagnose_volumes(policy, &wanted);
    report.binds.append(&mut volumes.binds);
    report.problems.append(&mut volumes.problems);
    report.took(start.elapsed());
    told(report, policy, pods)
}

/// Does something about the stale subpaths that are `wanted`. Volumes are not looked at: none can be mended from here.
pub fn mend_node(policy: &Policy, pods: &Pods, act: Act, wanted: impl Fn(&VolumeSubpath) -> bool) -> NodeReport {
    // Where the mounts came from is told as it was before they were mended.
    let table = read_mount_table();
    let report = match act {
        Act::Look => diagnose_subpaths(&for_operators(policy), wanted),
        Act::Rebind => repair_node(policy, wanted),
        Act::Detach => detach_node(policy, wanted),
    };
    with_table(report, table.map_err(|error| error.in_full()), policy, pods)
}

/// Whatever policy says of admissions: what is asked for by hand is looked at, and can be mended.
fn for_operators(policy: &Policy) -> Policy {
    Policy { stale_subpaths: Mode::Repair, ..policy.clone() }
}

fn told(report: Report, policy: &Policy, pods: &Pods) -> NodeReport {
    with_table(report, read_mount_table().map_err(|error| error.in_full()), policy, pods)
}

fn with_table(mut report: Report, table: Result<MountTable, String>, policy: &Policy, pods: &Pods) -> NodeReport {
    let table = table.unwrap_or_else(|problem| {
        report.problems.push(problem);
        MountTable::default()
    });
    NodeReport::from_report(report, &table, pods, policy)
}

fn diagnose_volumes(policy: &Policy, wanted: impl Fn(&Path) -> bool) -> Report {
    let mut report = Report::default();
    let mut volumes = Vec::new();
    for root in policy.kubelet_roots() {
        match list_volumes(root) {
            Ok(found) => volumes.extend(found),
            Err(error) => report.problems.push(in_full(error)),
        }
    }
    volumes.retain(|volume| wanted(volume.mount_point()));
    let judged: Vec<Finding> = volumes.chunks(AT_A_TIME).flat_map(judged).collect();
    report.tell(&judged, |_| None);
    report
}

fn judged(volumes: &[MountedVolume]) -> Vec<Finding> {
    let held: Vec<_> = volumes.iter().map(|volume| (HeldVolume::hold(volume), volume)).collect();
    let mounts = Mounts::default();
    let on_servers: Vec<PathBuf> = held
        .iter()
        .filter(|(held, _)| is_on_a_server(held, &mounts))
        .map(|(_, v)| v.mount_point().to_owned())
        .collect();
    let mut answers = ask_patiently(&on_servers).into_iter();
    let judged = held.iter().map(|(held, volume)| {
        let answer = is_on_a_server(held, &mounts).then(|| answers.next()).flatten();
        let dead = answer.as_ref().and_then(judge_reach);
        Finding {
            bind: None,
            source: volume.mount_point().to_owned(),
            destination: None,
            kind: SourceKind::MountedVolume((*volume).clone()),
            verdict: dead.unwrap_or_else(|| judge_volume(volume, &held.observe(&mounts))),
        }
    });
    judged.collect()
}

/// Its own mount may wait for somebody: the kernel alone cannot tell whether it is alive.
fn is_on_a_server(held: &HeldVolume, mounts: &Mounts) -> bool {
    let mount = held.handle().and_then(|handle| mounts.mount_of(handle).ok());
    mount.is_some_and(|mount| mount.is_mount_point && !mount.entry.fs_type.is_local())
}
