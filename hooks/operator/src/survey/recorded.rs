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
use crate::support_bundle::Recorded;

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
    let (recorded, mut report) = (Recorded::new(table, root), Report::default());
    let mut findings = subpaths(places, table, &recorded, &mut report);
    let (mounted, mut plain) = volumes(places, root, &recorded, &mut report);
    findings.extend(mounted);
    findings.retain(|finding| wanted(&finding.source));
    plain.retain(|directory| wanted(directory));
    findings.extend(plain.into_iter().map(plain_volume));
    report.add(findings, |finding| planned_alone(finding, &policy));
    report.set_duration(start.elapsed());
    let skipped = table.skipped().map(|skipped| error_chain(skipped));
    let complete = Some(table).filter(|_| skipped.is_none());
    report.problems.extend(skipped);
    NodeReport::from_report(report, complete, pods, places)
}

/// The mounted subpaths, and those of which only the directory is left.
fn subpaths(
    places: &Places,
    table: &MountTable,
    recorded: &Recorded<'_>,
    report: &mut Report,
) -> Vec<Finding> {
    let mounted = table
        .entries()
        .iter()
        .filter_map(|e| VolumeSubpath::from_path(&e.mount_point, places.kubelet_roots()));
    let mut found: Vec<VolumeSubpath> = mounted.collect();
    for root in places.kubelet_roots() {
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

/// A server cannot be probed from here.
fn plain_volume(source: PathBuf) -> Finding {
    without_bind(source, SourceKind::PlainVolume, Verdict::Current)
}

/// The volumes that must be mounted, judged by the mount table, and the directories of volumes that
/// need no mount.
fn volumes(
    places: &Places,
    root: &Path,
    recorded: &Recorded<'_>,
    report: &mut Report,
) -> (Vec<Finding>, Vec<PathBuf>) {
    let (mut mounted, mut plain) = (Vec::new(), Vec::new());
    for kubelet_root in places.kubelet_roots() {
        match list_volumes(&recorded.copy_of(kubelet_root)) {
            Ok(copies) => {
                mounted.extend(
                    copies
                        .mounted
                        .iter()
                        .filter_map(|copy| copy.without_prefix(root)),
                );
                let below = copies
                    .plain
                    .iter()
                    .filter_map(|copy| copy.strip_prefix(root).ok());
                plain.extend(below.map(|path| Path::new("/").join(path)));
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
