//! The report of a whole node: the findings in the journal's terms, each with the pod's names, the origin of the mount, and
//! the next step.

use std::path::PathBuf;

use serde::Serialize;

use crate::other_roots::other_roots;
use crate::pods::{PodContainer, PodName, Pods};
use bindguard_core::judge::{StaleCause, Unmounted};
use bindguard_core::kubelet::{PodPath, VolumeSubpath};
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::policy::Policy;
use bindguard_core::report::{BindReport, Outcome, REFUSED, Report};
use bindguard_core::text::shell_word;

/// The Kubernetes issue that describes stale volume-subpaths.
pub const ISSUE: &str = "https://github.com/kubernetes/kubernetes/issues/68211";

/// The subpaths and volumes of a node, judged. Its JSON form is what `diagnose --json` and `repair --json` print.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NodeReport {
    /// The finding on each.
    pub binds: Vec<NodeBind>,
    /// The number of subpaths and volumes checked; more than in `binds` if healthy ones are left out.
    pub looked_at: usize,
    /// Errors that left the check incomplete.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Duration, in microseconds.
    pub took_us: u64,
}

/// One subpath or volume.
#[derive(Debug, Clone, Serialize)]
pub struct NodeBind {
    /// The finding.
    #[serde(flatten)]
    pub bind: BindReport,
    /// Its pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// The container that a subpath is for, if its runtime knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<PodContainer>,
    /// The origin of a stale subpath's mount.
    #[serde(flatten)]
    pub origin: Option<Origin>,
    /// True if the guard runs before the creates of the pod; set for a subpath that the guard repairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarded: Option<bool>,
    /// Effects of the finding on the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<&'static str>,
    /// The command that helps, or one that shows more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// The source and destination of a stale mount, as in the mount table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The issue that explains why such a mount keeps a container from starting.
    pub issue: &'static str,
    /// The mount's root, with the kernel's `//deleted`.
    pub original_source: String,
    /// The mount point.
    pub original_destination: PathBuf,
}

impl Origin {
    fn of(entry: &MountEntry) -> Self {
        Self { issue: ISSUE, original_source: entry.root.for_people(), original_destination: entry.mount_point.clone() }
    }
}

impl NodeReport {
    /// Adds names, origins and next steps to the findings.
    pub fn from_report(report: Report, table: &MountTable, pods: &Pods, policy: &Policy) -> Self {
        let looked_at = report.binds.len();
        let index = MountIndex::of(table);
        let binds = report.binds.into_iter().map(|bind| NodeBind::from_bind(bind, &index, pods, policy)).collect();
        let others = other_roots(table, policy.kubelet_roots()).into_iter().map(|root| {
            format!(
                "the pods of the kubelet at {0} are not checked: name it in [kubelet] roots of config.toml",
                root.display()
            )
        });
        let problems = report.problems.into_iter().chain(others).collect();
        Self { binds, looked_at, problems, took_us: report.took_us }
    }

    /// Leaves out healthy binds.
    pub fn without_what_is_well(mut self) -> Self {
        self.binds.retain(NodeBind::is_finding);
        self
    }

    /// True if something could not be checked.
    pub fn is_incomplete(&self) -> bool {
        !self.problems.is_empty() || self.binds.iter().any(|bind| bind.bind.verdict == "unknown")
    }

    /// True if there is a finding that this run did not repair.
    pub fn has_findings(&self) -> bool {
        self.binds.iter().any(|bind| bind.is_finding() && !bind.is_mended())
    }
}

impl NodeBind {
    fn from_bind(mut bind: BindReport, table: &MountIndex<'_>, pods: &Pods, policy: &Policy) -> Self {
        let path = PodPath::from_path(&bind.source, policy.kubelet_roots());
        let subpath = path.as_ref().and_then(VolumeSubpath::from_pod_path);
        let pod = path.map(|path| pods.of_uid(path.pod_uid()));
        let container = subpath.as_ref().and_then(|subpath| pods.container(subpath.pod_uid(), subpath.container()));
        let entry = table.stack_at(&bind.source).last();
        let is_stale = matches!(bind.verdict, "stale" | "orphaned");
        let origin = entry.filter(|_| is_stale).map(|entry| Origin::of(entry));
        let may_run = subpath.as_ref().map(|subpath| pods.may_run(subpath.pod_uid(), subpath.container()));
        let guarded = subpath.as_ref().filter(|_| would_be_repaired(&bind));
        let guarded = guarded.and_then(|subpath| pods.is_guarded(subpath.pod_uid()));
        let notes = notes(&bind, may_run.flatten(), guarded);
        if notes.contains(&NOT_IN_USE) {
            bind.reason = None;
        }
        let next = next(&bind, pod.as_ref());
        Self { bind, pod, container: container.cloned(), origin, guarded, notes, next }
    }

    /// True if it is not healthy, or could not be checked.
    pub fn is_finding(&self) -> bool {
        self.bind.reason.is_some()
    }

    /// True if the guard would repair it, in this or another pod.
    pub fn would_be_repaired(&self) -> bool {
        would_be_repaired(&self.bind)
    }

    /// True if it is repaired now.
    pub fn is_mended(&self) -> bool {
        matches!(self.bind.outcome, Some(Outcome::Rebound { .. } | Outcome::AlreadyCurrent | Outcome::Detached))
    }
}

const OLD_CONTENT: &str = "the running container keeps the old content until it restarts";
const GUARDED: &str = "the guard repairs it when the container is created next";
const NOT_GUARDED: &str = "the pod runs under another shim: no guard repairs it when the container is created next";
const NOT_IN_USE: &str = "no running container uses it: the kubelet binds it before it starts one";

/// Effects of a finding on its pod. `may_run`: its container may be running; `guarded`: the guard runs before the pod's
/// creates. `None` means unknown.
fn notes(bind: &BindReport, may_run: Option<bool>, guarded: Option<bool>) -> Vec<&'static str> {
    match bind.verdict {
        "unmounted" if is_bare(bind) && may_run == Some(false) => vec![NOT_IN_USE],
        "stale" | "orphaned" if bind.kind == "subpath" => {
            let old = (may_run != Some(false)).then_some(OLD_CONTENT);
            let guard = guarded.map(|guarded| if guarded { GUARDED } else { NOT_GUARDED });
            old.into_iter().chain(guard).collect()
        }
        _ => Vec::new(),
    }
}

/// True for a subpath that the guard will repair at a create. For a placeholder directory it edits the spec.
fn would_be_repaired(bind: &BindReport) -> bool {
    let is_planned = matches!(bind.outcome, Some(Outcome::WouldBe { done }) if done != REFUSED);
    bind.kind == "subpath" && (is_planned || bind.verdict == "stale" && is_stand_in(bind))
}

/// True for the kubelet's empty file, with nothing mounted on it.
fn is_bare(bind: &BindReport) -> bool {
    bind.kind == "subpath" && bind.reason == Some(Unmounted::Subpath.to_string())
}

/// The next step for a finding.
fn next(bind: &BindReport, pod: Option<&PodName>) -> Option<String> {
    let path = shell_word(&bind.source);
    match (bind.verdict, &bind.outcome) {
        (_, Some(Outcome::Rebound { .. } | Outcome::AlreadyCurrent | Outcome::Detached)) => None,
        ("stale", Some(Outcome::WouldBe { .. })) => Some(format!("bindguard repair {path}")),
        ("stale", _) if is_stand_in(bind) || bind.kind == "volume" => deletion(pod?),
        ("stale", _) if bind.kind == "subpath" => Some(format!("bindguard repair --unmount {path}")),
        ("unmounted" | "dead" | "orphaned", _) => {
            let pod = pod?;
            Some(format!("kubectl -n {} describe pod {}", pod.namespace.as_ref()?, pod.name.as_ref()?))
        }
        _ => None,
    }
}

/// True for a placeholder directory. A directory is also beneath the mount, so no file can be bound there any more.
fn is_stand_in(bind: &BindReport) -> bool {
    bind.reason.as_ref().is_some_and(|reason| reason.starts_with(&StaleCause::Placeholder.to_string()))
}

fn deletion(pod: &PodName) -> Option<String> {
    Some(format!("kubectl -n {} delete pod {}", pod.namespace.as_ref()?, pod.name.as_ref()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_core::judge::Verdict;

    const SOURCE: &str = "/var/lib/kubelet/pods/u-1/volume-subpaths/conf/app/0";

    fn pods(state: Option<&'static str>, guarded: Option<bool>) -> Pods {
        let pod = PodName { uid: Some("u-1".to_owned()), ..PodName::default() };
        let name = Some("app".to_owned());
        Pods { containers: vec![PodContainer { id: "c".to_owned(), name, state, attempt: None, pod, guarded }] }
    }

    fn node(verdict: &'static str, reason: &str, outcome: Option<Outcome>, pods: &Pods) -> NodeReport {
        let reason = Some(reason.to_owned());
        let bind = BindReport { source: SOURCE.into(), destination: None, kind: "subpath", verdict, reason, outcome };
        let report = Report { binds: vec![bind], ..Report::default() };
        NodeReport::from_report(report, &MountTable::default(), pods, &Policy::default())
    }

    #[test]
    fn a_bare_subpath_is_no_finding_while_its_container_does_not_run() {
        let of = |pods: &Pods, unmounted: Unmounted| {
            let reason = Verdict::Unmounted(unmounted).reason().unwrap_or_default();
            node("unmounted", &reason, None, pods)
        };
        let exited = pods(Some("exited"), None);
        let report = of(&exited, Unmounted::Subpath);
        assert!(!report.has_findings() && report.binds[0].notes == [NOT_IN_USE]);
        assert!(of(&pods(Some("created"), None), Unmounted::Subpath).has_findings());
        assert!(of(&Pods::default(), Unmounted::Subpath).has_findings(), "no runtime reported anything");
    }

    #[test]
    fn a_stale_subpath_says_what_the_running_container_reads_and_who_repairs_it() {
        let done = Some(Outcome::WouldBe { done: "re-bound to the current target" });
        let notes = |outcome, pods: &Pods| node("stale", "its file is deleted", outcome, pods).binds.remove(0).notes;
        assert_eq!(notes(done.clone(), &pods(Some("running"), Some(true))), [OLD_CONTENT, GUARDED]);
        assert_eq!(notes(done.clone(), &pods(None, Some(false))), [OLD_CONTENT, NOT_GUARDED]);
        assert_eq!(notes(done, &pods(Some("exited"), None)), [""; 0]);
        let refused = Some(Outcome::WouldBe { done: REFUSED });
        assert_eq!(notes(refused, &pods(Some("exited"), Some(true))), [""; 0]);
        assert_eq!(notes(Some(Outcome::Rebound { tries: 1 }), &pods(Some("running"), Some(true))), [OLD_CONTENT]);
    }
}
