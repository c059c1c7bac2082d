//! The survey of a recorded node, from its support bundle.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::node_report::NodeReport;
use crate::pods::Pods;
use bindguard_core::error_chain;
use bindguard_core::judge::{Finding, Verdict, judge_subpath, judge_volume};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::Report;
use bindguard_core::source::SourceKind;
use bindguard_sys::observe::{list_subpaths, list_volumes};

use super::{for_operators, planned_alone, without_bind};
use crate::support_bundle::{Recorded, RecordedRoot, recorded_roots};

/// Judges the `wanted` subpaths and volumes of a node by its mount table and the copy of its files
/// below `root`.
pub fn survey_recorded(
    policy: &Policy,
    places: &Places,
    pods: &Pods,
    table: &MountTable,
    root: &Path,
    wanted: impl Fn(&Path) -> bool,
) -> NodeReport {
    let start = Instant::now();
    let policy = for_operators(policy);
    let roots = recorded_roots(places, table, root);
    let mut table = table.clone();
    for root in roots.iter().filter(|root| root.named != root.real) {
        table = table.with_name(&root.real, &root.named);
    }
    let table = &table;
    let (recorded, mut report) = (Recorded::new(table, root, &roots), Report::default());
    let mut findings = subpaths(&roots, table, &recorded, &mut report);
    let (mounted, mut plain) = volumes(&roots, &recorded, &mut report);
    findings.extend(mounted);
    findings.retain(|finding| wanted(&finding.source));
    plain.retain(|directory| wanted(directory));
    findings.extend(plain.into_iter().map(plain_volume));
    report.add(findings, |finding| planned_alone(finding, &policy));
    report.set_duration(start.elapsed());
    let skipped = table.skipped().map(|skipped| error_chain(skipped));
    let complete = Some(table).filter(|_| skipped.is_none());
    report.problems.extend(skipped);
    let mut report = NodeReport::from_report(report, complete, pods, places);
    report.keep_mounts(policy.below_emptydirs, wanted);
    report
}

/// The mounted subpaths, and those of which only the directory is left.
fn subpaths(
    roots: &[RecordedRoot],
    table: &MountTable,
    recorded: &Recorded<'_>,
    report: &mut Report,
) -> Vec<Finding> {
    let mounted = table
        .entries()
        .iter()
        .filter_map(|e| VolumeSubpath::from_path(&e.mount_point, names(roots)));
    let mut found: Vec<VolumeSubpath> = mounted.collect();
    for root in names(roots) {
        match list_subpaths(&recorded.copy_of(root)) {
            Ok(copies) => found.extend(copies.iter().map(|copy| copy.at_root(root))),
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    found.sort_by_key(VolumeSubpath::path);
    found.dedup();
    let judged = found.into_iter().map(|subpath| {
        let verdict = judge_subpath(&subpath, &recorded.subpath(&subpath));
        without_bind(subpath.path(), SourceKind::Subpath(subpath), verdict)
    });
    judged.collect()
}

fn names(roots: &[RecordedRoot]) -> impl Iterator<Item = &Path> {
    roots.iter().map(|root| root.named.as_path())
}

/// A server cannot be probed from here.
fn plain_volume(source: PathBuf) -> Finding {
    without_bind(source, SourceKind::PlainVolume, Verdict::Current)
}

/// The volumes that must be mounted, judged by the mount table, and the directories of volumes that
/// need no mount.
fn volumes(
    roots: &[RecordedRoot],
    recorded: &Recorded<'_>,
    report: &mut Report,
) -> (Vec<Finding>, Vec<PathBuf>) {
    let (mut mounted, mut plain) = (Vec::new(), Vec::new());
    for named in names(roots) {
        let copied = recorded.copy_of(named);
        match list_volumes(&copied) {
            Ok(copies) => {
                for volume in &copies.mounted {
                    mounted.extend(volume.moved(&copied, named));
                }
                for volume in &copies.plain {
                    plain.extend(volume.strip_prefix(&copied).map(|below| named.join(below)));
                }
            }
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    let judged = mounted.into_iter().map(|volume| {
        let verdict = judge_volume(&volume, &recorded.volume_mount(&volume));
        let source = volume.mount_point().to_owned();
        without_bind(source, SourceKind::MountedVolume(volume), verdict)
    });
    (judged.collect(), plain)
}
