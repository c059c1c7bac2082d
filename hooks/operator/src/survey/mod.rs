//! An operator's survey of the node: every volume-subpath and every volume, with names.

mod detach;
mod recorded;
mod subpaths;

use std::path::{Path, PathBuf};
use std::slice;
use std::time::Instant;

use crate::kubelet_roots::Roots;
use crate::node_report::NodeReport;
use crate::old_files::old_files;
use crate::pods::Pods;
use bindguard_core::error_chain;
use bindguard_core::evidence::{Observed, VolumeMount};
use bindguard_core::judge::{Finding, Verdict, judge_plain_volume, judge_reach, judge_volume};
use bindguard_core::kubelet::{MountedVolume, VolumeSubpath};
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::plan::Plan;
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::report::{Outcome, Report};
use bindguard_core::source::SourceKind;
use bindguard_guard::{Probes, dead_volume, planned_outcome};
use bindguard_sys::observe::{HeldVolume, Volumes, list_volumes};
use bindguard_sys::{MountinfoError, Mounts, read_mount_table};

use self::subpaths::{AT_A_TIME, detach_subpaths, diagnose_subpaths, rebind_subpaths};

pub use recorded::survey_recorded;

/// The action for the stale subpaths of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairAct {
    /// Nothing: report the effect of a re-bind.
    Check,
    /// Bind the current target in their place.
    Rebind,
    /// Detach the stale mount, and leave the rest to the kubelet.
    Detach,
}

/// Judges the volumes and subpaths of this node whose paths are `wanted`, and finds the running
/// containers of these pods that read old files.
pub fn survey_node(
    policy: &Policy,
    places: &Places,
    pods: &Pods,
    wanted: impl Fn(&Path) -> bool,
) -> NodeReport {
    let start = Instant::now();
    let probes = Probes::for_operator();
    let roots = Roots::of(places);
    let mut report = diagnose_subpaths(policy, &roots, &probes, |subpath| wanted(&subpath.path()));
    let mut volumes = diagnose_volumes(&roots, &probes, &wanted);
    report.binds.append(&mut volumes.binds);
    report.problems.append(&mut volumes.problems);
    let (old_files, mut unchecked) = old_files(roots.names(), pods, &wanted);
    report.problems.append(&mut unchecked);
    report.set_duration(start.elapsed());
    let mut report = with_table(report, read_mount_table(), roots, places, pods);
    report.keep_mounts(policy.below_emptydirs, wanted);
    NodeReport {
        old_files,
        ..report
    }
}

/// Acts on the stale subpaths that are `wanted`. Volumes are not inspected: none can be repaired
/// from here.
pub fn repair_node(
    policy: &Policy,
    places: &Places,
    pods: &Pods,
    act: RepairAct,
    wanted: impl Fn(&VolumeSubpath) -> bool,
) -> NodeReport {
    // Read before the repair: the report names the sources that the mounts had then.
    let table = read_mount_table();
    let roots = Roots::of(places);
    let report = match act {
        RepairAct::Check => diagnose_subpaths(policy, &roots, &Probes::for_operator(), wanted),
        RepairAct::Rebind => rebind_subpaths(policy, &roots, wanted),
        RepairAct::Detach => detach_subpaths(&roots, wanted),
    };
    let mut report = with_table(report, table, roots, places, pods);
    report.mounts_below_emptydir.clear();
    report
}

/// Overrides the policy of admissions: an operator's request is always inspected, and can be
/// repaired.
fn for_operators(policy: &Policy) -> Policy {
    Policy {
        stale_subpaths: Mode::Repair,
        ..*policy
    }
}

/// The outcome that a repair of this finding alone would have.
fn planned_alone(finding: &Finding, policy: &Policy) -> Option<Outcome> {
    let plan = Plan::from_findings(slice::from_ref(finding), policy);
    planned_outcome(finding, &plan, policy)
}

fn with_table(
    mut report: Report,
    table: Result<MountTable, MountinfoError>,
    roots: Roots,
    places: &Places,
    pods: &Pods,
) -> NodeReport {
    let table = match table {
        Ok(table) => Some(roots.name_mounts(table)),
        Err(error) => {
            report.problems.push(error_chain(&error));
            None
        }
    };
    report.problems.extend(roots.problems);
    NodeReport::from_report(report, table.as_ref(), pods, places)
}

fn diagnose_volumes(roots: &Roots, probes: &Probes, wanted: impl Fn(&Path) -> bool) -> Report {
    let mut report = Report::default();
    let mut volumes = Volumes::default();
    for root in roots.names() {
        match list_volumes(root) {
            Ok(found) => {
                volumes.mounted.extend(found.mounted);
                volumes.plain.extend(found.plain);
            }
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    volumes
        .mounted
        .retain(|volume| wanted(volume.mount_point()));
    volumes.plain.retain(|directory| wanted(directory));
    let mounted = judged(
        &volumes.mounted,
        probes,
        MountedVolume::mount_point,
        judge_volume,
    );
    let plain = judged(&volumes.plain, probes, PathBuf::as_path, |_, mount| {
        judge_plain_volume(mount)
    });
    let mounted = mounted.into_iter().zip(volumes.mounted);
    let mounted = mounted.map(|(verdict, volume)| {
        let source = volume.mount_point().to_owned();
        without_bind(source, SourceKind::MountedVolume(volume), verdict)
    });
    let plain = plain.into_iter().zip(volumes.plain);
    let plain =
        plain.map(|(verdict, source)| without_bind(source, SourceKind::PlainVolume, verdict));
    report.add(mounted.chain(plain).collect(), |_| None);
    report
}

/// Judges volumes by the mounts at their places; probes those on servers first.
fn judged<V>(
    volumes: &[V],
    probes: &Probes,
    place: impl Fn(&V) -> &Path,
    judge: impl Fn(&V, &Observed<VolumeMount>) -> Verdict,
) -> Vec<Verdict> {
    let some = |volumes: &[V]| {
        let mounts = Mounts::default();
        let held: Vec<_> = volumes
            .iter()
            .map(|volume| HeldVolume::hold(place(volume)))
            .collect();
        let on_server: Vec<bool> = held
            .iter()
            .map(|held| held.is_on_a_server(&mounts))
            .collect();
        let paths_to_probe = volumes
            .iter()
            .zip(&on_server)
            .filter(|(_, on_server)| **on_server);
        let paths_to_probe: Vec<PathBuf> = paths_to_probe
            .map(|(volume, _)| place(volume).to_owned())
            .collect();
        let mut answers = probes.reaches(&paths_to_probe).into_iter();
        let mut verdict = |((volume, held), on_server): ((&V, &HeldVolume), &bool)| {
            let dead = on_server
                .then(|| answers.next())
                .flatten()
                .as_ref()
                .and_then(judge_reach);
            match dead {
                Some(Verdict::Dead(words)) => {
                    Verdict::Dead(dead_volume(place(volume), words, probes))
                }
                Some(verdict) => verdict,
                None => judge(volume, &held.observe(&mounts)),
            }
        };
        volumes
            .iter()
            .zip(&held)
            .zip(&on_server)
            .map(&mut verdict)
            .collect::<Vec<_>>()
    };
    volumes.chunks(AT_A_TIME).flat_map(some).collect()
}

/// A finding of a survey, which reads no spec.
fn without_bind(source: PathBuf, kind: SourceKind, verdict: Verdict) -> Finding {
    Finding {
        bind: None,
        source,
        destination: None,
        kind,
        verdict,
    }
}
