//! Judges the kubelet's volume-subpaths of a volume or a node, without a container's spec.

use bindguard_core::judge::{Finding, judge_subpath};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::source::SourceKind;
use bindguard_sys::Mounts;
use bindguard_sys::observe::{HeldSubpath, HeldVolumeDirectories};

use crate::probes::Probes;

/// Returns a finding for each subpath. Opens all subpaths at once, with at most three descriptors
/// each.
pub fn judge_subpaths(subpaths: &[VolumeSubpath], probes: &Probes) -> Vec<Finding> {
    let directories = HeldVolumeDirectories::default();
    let held: Vec<_> = subpaths
        .iter()
        .map(|subpath| HeldSubpath::hold_among(subpath.clone(), &directories))
        .collect();
    let evidence = probes.observe(&held, &Mounts::default());
    let findings = subpaths
        .iter()
        .zip(evidence)
        .map(|(subpath, evidence)| Finding {
            bind: None,
            source: subpath.path(),
            destination: None,
            verdict: judge_subpath(subpath, &evidence),
            kind: SourceKind::Subpath(subpath.clone()),
        });
    findings.collect()
}
