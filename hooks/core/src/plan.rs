//! Derives the planned actions from findings.

use crate::judge::{Finding, Remedy, RepairMethod, Unmounted, Verdict};
use crate::kubelet::{DATA_LINK, VolumeSubpath, Writer};
use crate::policy::{Alarm, FailedRepair, Mode, Policy, Vanished};
use crate::proof::Difference;
use crate::source::SourceKind;
use crate::spec::SpecEdit;

/// The planned actions for a bundle's findings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Subpaths to re-bind.
    pub rebinds: Vec<Rebind>,
    /// Changes to the spec.
    pub edits: Vec<SpecEdit>,
    /// The reason, if policy refuses the container.
    pub refusal: Option<String>,
}

impl Plan {
    /// Plans for these findings. A plan contains only repairs that policy wants, and never a
    /// foreign or unknown bind.
    pub fn from_findings(findings: &[Finding], policy: &Policy) -> Self {
        let mut plan = Self::default();
        for finding in findings {
            match &finding.verdict {
                Verdict::Stale { remedy: Ok(_), .. } | Verdict::Orphaned { .. }
                    if policy.stale_subpaths == Mode::Repair =>
                {
                    match Rebind::from_finding(finding, policy) {
                        Some(rebind) if rebind.remedy.method == RepairMethod::PointSpecAtVolume => {
                            plan.edits.extend(rebind.spec_edit());
                        }
                        rebind => plan.rebinds.extend(rebind),
                    }
                }
                Verdict::Pinning(pinning)
                    if policy.host_root == Mode::Repair && pinning.kept.is_none() =>
                {
                    if let (true, Some(bind)) = (pinning.bind, finding.bind) {
                        plan.edits.push(SpecEdit::BindRslave { bind });
                    }
                    if pinning.rootfs && !plan.edits_rootfs() {
                        plan.edits.push(SpecEdit::RootfsRslave);
                    }
                }
                _ if plan.refusal.is_none() => plan.refusal = refusal_of(finding, policy),
                _ => {}
            }
        }
        plan
    }

    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.rebinds.is_empty() && self.edits.is_empty() && self.refusal.is_none()
    }

    /// True if the bind at this position is edited.
    pub fn edits_bind(&self, index: usize) -> bool {
        self.edits.iter().any(|edit| match edit {
            SpecEdit::Source { bind, .. } | SpecEdit::BindRslave { bind } => *bind == index,
            SpecEdit::RootfsRslave => false,
        })
    }

    /// True if `linux.rootfsPropagation` is edited.
    pub fn edits_rootfs(&self) -> bool {
        self.edits.contains(&SpecEdit::RootfsRslave)
    }
}

/// The refusal of a container that could not be checked in full, if policy requires a refusal. The
/// unchecked part may contain a fault that policy refuses.
pub fn refusal_of_unseen(unseen: &str, policy: &Policy) -> Option<String> {
    let refuses = policy.unmounted_volumes == Alarm::Refuse
        || policy.proof == Alarm::Refuse
        || policy.dead_sources == Alarm::Refuse
        || refuses_unrepaired(policy);
    refuses.then(|| format!("{unseen}: policy refuses what may be there"))
}

/// The refusal of a container with this finding, if policy requires a refusal.
pub fn refusal_of(finding: &Finding, policy: &Policy) -> Option<String> {
    let source = finding.source.display();
    let (is_refused, reason) = match &finding.verdict {
        Verdict::Unmounted(unmounted) => (
            policy.unmounted_volumes == Alarm::Refuse,
            match unmounted {
                Unmounted::Subpath | Unmounted::UnusedSubpath => {
                    format!("the bind source {source}: {unmounted}")
                }
                Unmounted::Volume { .. } => unmounted.to_string(),
            },
        ),
        Verdict::Stale {
            cause,
            remedy: Err(why),
        } => (
            refuses_unrepaired(policy),
            unrepaired(finding, &format!("{cause}; {why}")),
        ),
        Verdict::Dead(why) => (
            policy.dead_sources == Alarm::Refuse,
            format!("the bind source {source} is dead: {why}"),
        ),
        Verdict::NotProbed => (
            policy.dead_sources == Alarm::Refuse,
            format!("the bind source {source} may be dead: it was not probed in time"),
        ),
        _ => return None,
    };
    is_refused.then_some(reason)
}

/// The refusal of a new container with this finding, if policy requires a refusal.
pub fn refusal_of_wrong(finding: &Finding, policy: &Policy) -> Option<String> {
    match &finding.verdict {
        Verdict::Wrong(Difference::WithoutMaster) => None,
        Verdict::Wrong(difference) if policy.proof == Alarm::Refuse => Some(format!(
            "the runtime did not mount {} as the spec says: {difference}",
            finding.source.display()
        )),
        _ => None,
    }
}

/// The refusal of a new container whose mounts could not be compared with its spec, if policy
/// requires a refusal.
pub fn refusal_of_uncompared(why: &str, policy: &Policy) -> Option<String> {
    (policy.proof == Alarm::Refuse)
        .then(|| format!("its mounts could not be compared with its spec: {why}"))
}

/// The refusal of a container with this finding, whose repair failed because of `why`, if policy
/// requires a refusal.
pub fn refusal_of_failed(finding: &Finding, why: &str, policy: &Policy) -> Option<String> {
    (policy.failed_repairs == FailedRepair::Refuse).then(|| unrepaired(finding, why))
}

fn refuses_unrepaired(policy: &Policy) -> bool {
    policy.stale_subpaths == Mode::Repair && policy.failed_repairs == FailedRepair::Refuse
}

fn unrepaired(finding: &Finding, why: &str) -> String {
    format!(
        "the bind source {} is {} and could not be repaired: {why}",
        finding.source.display(),
        finding.verdict.name()
    )
}

// The repair of a stale subpath.

/// The order to bind a subpath's current target in place of a stale target.
///
/// Only a finding with a remedy yields a re-bind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebind {
    /// The bind's position in the spec's `mounts`.
    pub bind: Option<usize>,
    pub subpath: VolumeSubpath,
    pub remedy: Remedy,
}

impl Rebind {
    /// The re-bind for a finding; `None` if there is nothing to repair, no repair is possible, or
    /// policy does not want a directory created again.
    pub fn from_finding(finding: &Finding, policy: &Policy) -> Option<Self> {
        let SourceKind::Subpath(subpath) = &finding.kind else {
            return None;
        };
        let remedy = match &finding.verdict {
            Verdict::Stale {
                remedy: Ok(remedy), ..
            } => remedy,
            Verdict::Orphaned {
                remake: Some(remedy),
                ..
            } if policy.vanished_directories == Vanished::Remake => remedy,
            _ => return None,
        };
        Some(Self {
            bind: finding.bind,
            subpath: subpath.clone(),
            remedy: remedy.clone(),
        })
    }

    /// The edit that points the spec's source at the volume's own path, used when binding is
    /// impossible.
    ///
    /// `None` for volumes that containers write: a container may redirect a path there before the
    /// runtime resolves it. A kubelet-written volume's own names are links through `..data`: the
    /// runtime resolves them to the payload of that moment.
    pub fn spec_edit(&self) -> Option<SpecEdit> {
        let Remedy {
            volume, sub_path, ..
        } = &self.remedy;
        if self.remedy.writer == Writer::Containers {
            return None;
        }
        let to = match sub_path.path.as_os_str().is_empty() {
            // A pod may mount the payload directory itself.
            true => volume.join(DATA_LINK),
            false => volume.join(&sub_path.path),
        };
        self.bind.map(|bind| SpecEdit::Source { bind, to })
    }
}

#[cfg(test)]
mod rebind_tests {
    use super::*;
    use std::path::Path;

    use crate::judge::{Lack, PathInVolume, StaleCause};
    use crate::kubelet::VolumeLayout;

    fn rebind(path: &str, bind: Option<usize>, vanished: Vanished) -> Option<Rebind> {
        let subpath = VolumeSubpath::from_path(
            Path::new("/var/lib/kubelet/pods/u/volume-subpaths/v/app/0"),
            [Path::new("/var/lib/kubelet")],
        );
        let remedy = Remedy {
            volume: "/volume".into(),
            sub_path: PathInVolume {
                timestamp: None,
                path: path.into(),
            },
            writer: Writer::Kubelet,
            layout: VolumeLayout::Payload,
            method: RepairMethod::Remake,
        };
        let finding = Finding {
            bind,
            source: "/source".into(),
            destination: None,
            kind: SourceKind::Subpath(subpath.unwrap()),
            verdict: Verdict::Orphaned {
                cause: StaleCause::Replaced,
                lacks: Lack::Key(path.into()),
                remake: Some(remedy),
            },
        };
        let policy = Policy {
            vanished_directories: vanished,
            ..Policy::default()
        };
        Rebind::from_finding(&finding, &policy)
    }

    #[test]
    fn policy_decides_whether_a_directory_is_made_again() {
        assert_eq!(rebind("x", Some(3), Vanished::Leave), None);
        let remade = rebind("x", Some(3), Vanished::Remake).unwrap();
        assert_eq!(remade.bind, Some(3));
        assert_eq!(remade.remedy.volume, Path::new("/volume"));
    }

    #[test]
    fn a_spec_is_pointed_at_the_name_or_at_the_payload() {
        let edit = |path, bind| {
            let rebind = rebind(path, bind, Vanished::Remake).unwrap();
            rebind.spec_edit()
        };
        let to = |to: &str| {
            let to = to.into();
            Some(SpecEdit::Source { bind: 3, to })
        };
        assert_eq!(edit("x", Some(3)), to("/volume/x"));
        assert_eq!(edit("", Some(3)), to("/volume/..data"));
        assert_eq!(edit("x", None), None);
    }
}
