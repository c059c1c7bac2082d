//! Subpaths that are stale now, and volumes that are not mounted now.
//!
//! A configMap that changes makes the subpaths of running containers stale. The node is not at
//! fault if the guard runs before the pod's next create: then the point is good, with a note.

use crate::node_report::{NodeBind, NodeReport};
use bindguard_core::policy::{Mode, Policy};

use super::{Point, PointStatus};

const NAME: &str = "subpaths";
const NEXT: &str = "bindguard diagnose";

/// The point for them. `policy`: the guard's action at a create.
pub fn subpaths(report: &NodeReport, policy: &Policy) -> Point {
    let found = || report.binds.iter().filter(|bind| bind.is_finding());
    let care = |bind: &&NodeBind, wanted: Care| Care::of(bind, policy) == wanted;
    if let Some(first) = found().find(|bind| care(bind, Care::Operator)) {
        let message = format!(
            "{} of {} have findings: {}",
            found().count(),
            report.checked,
            describe(first, policy)
        );
        return Point::failed(NAME, message, NEXT);
    }
    if let Some(first) = found().find(|bind| care(bind, Care::Unknown)) {
        let message = format!(
            "{}, and no process shows whether its pod runs under the guard",
            describe(first, policy)
        );
        return Point {
            name: NAME,
            status: PointStatus::Unknown,
            message,
            command: Some(NEXT.to_owned()),
        };
    }
    if let Some(problem) = report.problems.first() {
        return Point::unknown(NAME, problem.clone());
    }
    let stale = match found().count() {
        0 => String::new(),
        count => {
            format!("; {count} stale, the guard repairs each when its container is created next")
        }
    };
    Point::ok(
        NAME,
        format!("{} subpaths and volumes checked{stale}", report.checked),
    )
}

/// The party that repairs a finding.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Care {
    /// The guard, at the next create.
    Guard,
    /// Only the operator.
    Operator,
    /// The guard if the pod runs under it, which is unknown.
    Unknown,
}

impl Care {
    fn of(bind: &NodeBind, policy: &Policy) -> Self {
        match bind.guarded {
            _ if !bind.would_be_repaired() || policy.stale_subpaths != Mode::Repair => {
                Self::Operator
            }
            Some(true) => Self::Guard,
            Some(false) => Self::Operator,
            None => Self::Unknown,
        }
    }
}

fn describe(bind: &NodeBind, policy: &Policy) -> String {
    let why = match bind.guarded {
        _ if !bind.would_be_repaired() => "",
        _ if policy.stale_subpaths != Mode::Repair => {
            ", and [checks] stale-subpaths in config.toml keeps the guard from repairing it"
        }
        Some(false) => ", and its pod runs under another shim: no guard repairs it",
        Some(true) | None => "",
    };
    format!(
        "{} is {}{why}",
        bind.bind.source().display(),
        bind.bind.verdict()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use bindguard_core::judge::{Finding, NoRemedy, StaleCause, Verdict};
    use bindguard_core::places::Places;
    use bindguard_core::policy::Scope;
    use bindguard_core::report::{BindReport, Outcome, PlannedAction};
    use bindguard_core::source::SourceKind;

    fn stale(guarded: Option<bool>, outcome: Option<Outcome>) -> NodeReport {
        let source = Path::new("/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0");
        let finding = Finding {
            bind: None,
            source: source.to_owned(),
            destination: None,
            kind: SourceKind::from_path(source, &Places::default(), Scope::default()),
            verdict: Verdict::Stale {
                cause: StaleCause::DeletedRoot,
                remedy: Err(NoRemedy::Unreadable("why".to_owned())),
            },
        };
        let bind = BindReport { finding, outcome };
        let bind = NodeBind {
            bind,
            pod: None,
            container: None,
            origin: None,
            guarded,
            notes: Vec::new(),
            command: None,
        };
        NodeReport {
            binds: vec![bind],
            checked: 1,
            ..NodeReport::default()
        }
    }

    #[test]
    fn an_unchecked_subpath_is_not_good() {
        let of = |report: &NodeReport| subpaths(report, &Policy::default()).status;
        let problems = vec!["list /x: no".to_owned()];
        assert_eq!(
            of(&NodeReport {
                problems,
                ..NodeReport::default()
            }),
            PointStatus::Unknown
        );
        assert_eq!(of(&NodeReport::default()), PointStatus::Ok);
    }

    #[test]
    fn a_repairable_bind_is_no_fault_of_the_node() {
        let planned = || {
            Some(Outcome::Planned {
                action: PlannedAction::Rebind,
            })
        };
        let of = |report: &NodeReport| subpaths(report, &Policy::default());
        let guarded = of(&stale(Some(true), planned()));
        assert_eq!(guarded.status, PointStatus::Ok);
        assert!(
            guarded.message.contains("1 stale, the guard repairs"),
            "{guarded:?}"
        );
        let stock = of(&stale(Some(false), planned()));
        assert!(
            stock.status == PointStatus::Failed && stock.message.contains("another shim"),
            "{stock:?}"
        );
        assert_eq!(of(&stale(None, planned())).status, PointStatus::Unknown);
        assert_eq!(
            of(&stale(Some(true), None)).status,
            PointStatus::Failed,
            "the guard cannot repair it"
        );
        let report_only = Policy {
            stale_subpaths: Mode::Report,
            ..Policy::default()
        };
        assert_eq!(
            subpaths(&stale(Some(true), planned()), &report_only).status,
            PointStatus::Failed
        );
    }
}
