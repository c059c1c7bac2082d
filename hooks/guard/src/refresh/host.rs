//! Re-binds the host's subpaths of a volume, right after the kubelet updated it.
//!
//! It is the guard's own re-bind, for a volume instead of a bundle.

use std::fs;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Instant;

use bindguard_core::judge::{Finding, Unmounted, Verdict};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::plan::{Plan, Rebind};
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::report::{BindReport, Outcome, Report};
use bindguard_sys::require_calls;

use crate::check::planned_outcome;
use crate::probes::Probes;
use crate::rebind::{NotRebound, rebind};
use crate::subpaths::judge_subpaths;

/// A volume of a pod, by its name in the pod's spec.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeOfPod {
    /// The kubelet's root.
    pub kubelet_root: PathBuf,
    /// The pod's uid.
    pub pod_uid: String,
    /// The volume's name.
    pub volume: String,
}

impl VolumeOfPod {
    /// `<root>/pods/<uid>`
    pub fn pod_directory(&self) -> PathBuf {
        self.kubelet_root.join("pods").join(&self.pod_uid)
    }

    /// `<root>/pods/<uid>/volume-subpaths/<volume>`
    pub fn subpaths_directory(&self) -> PathBuf {
        self.pod_directory()
            .join("volume-subpaths")
            .join(&self.volume)
    }

    /// True if a container has a directory of the volume as its subPath: such a directory is empty
    /// once the kubelet removed the old payload.
    pub fn has_directories(&self) -> bool {
        let paths = self.subpaths().into_iter().map(|subpath| subpath.path());
        paths
            .into_iter()
            .any(|path| fs::symlink_metadata(path).is_ok_and(|file| file.is_dir()))
    }

    /// The subpaths that the kubelet bound, in no order. A missing folder has no subpaths: the pod
    /// is being removed.
    fn subpaths(&self) -> Vec<VolumeSubpath> {
        let containers = entries(&self.subpaths_directory());
        let paths = containers.iter().flat_map(|container| entries(container));
        paths
            .filter_map(|path| VolumeSubpath::from_path(&path, [self.kubelet_root.as_path()]))
            .collect()
    }
}

/// Re-binds the stale subpaths of a volume, or reports them, as policy says of stale subpaths.
///
/// A subpath without a mount is left out: the kubelet is about to bind it, or to remove it.
pub fn rebind_volume(volume: &VolumeOfPod, policy: &Policy) -> Report {
    let start = Instant::now();
    let mut report = Report::default();
    if policy.stale_subpaths != Mode::Off
        && let Err(old) = require_calls()
    {
        report.problems.push(old.to_string());
    } else if policy.stale_subpaths != Mode::Off {
        let findings = judge_subpaths(&volume.subpaths(), &Probes::for_create())
            .into_iter()
            .filter(|finding| !has_no_mount(&finding.verdict));
        report.binds = findings
            .filter_map(|finding| reported(finding, policy))
            .collect();
    }
    report.set_duration(start.elapsed());
    report
}

fn has_no_mount(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Unmounted(Unmounted::Subpath))
}

/// `None` if the subpath went away meanwhile.
fn reported(finding: Finding, policy: &Policy) -> Option<BindReport> {
    let outcome = match policy.stale_subpaths {
        Mode::Repair => {
            let rebind = |order: &Rebind| rebind(order, &Probes::for_repairs(Instant::now()));
            match Rebind::from_finding(&finding, policy).as_ref().map(rebind) {
                Some(Err(NotRebound::NoLongerStale(_))) => return None,
                rebound => rebound.map(|rebound| rebound.unwrap_or_else(Outcome::from)),
            }
        }
        // The effect that a repair would have: policy only keeps it from being done.
        Mode::Report | Mode::Off => {
            let policy = Policy {
                stale_subpaths: Mode::Repair,
                ..*policy
            };
            planned_outcome(
                &finding,
                &Plan::from_findings(slice::from_ref(&finding), &policy),
                &policy,
            )
        }
    };
    Some(BindReport { finding, outcome })
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}
