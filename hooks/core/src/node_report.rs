//! What is told of a whole node: the findings in the journal's words, and beside each the pod's names, where the mount
//! came from, and what to do next.

use std::path::PathBuf;

use serde::Serialize;

use crate::judge::{StaleCause, Unmounted};
use crate::kubelet::{PodPath, VolumeSubpath, other_roots};
use crate::mount_table::{MountEntry, MountIndex, MountTable};
use crate::pods::{PodContainer, PodName, Pods};
use crate::policy::Policy;
use crate::report::{BindReport, Outcome, REFUSED, Report};

/// The fault that a stale volume-subpath is an instance of.
pub const ISSUE: &str = "https://github.com/kubernetes/kubernetes/issues/68211";

/// The subpaths and volumes of a node, judged. Its JSON form is what `diagnose --json` and `repair --json` print.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NodeReport {
    /// What was found of each.
    pub binds: Vec<NodeBind>,
    /// How many subpaths and volumes were looked at; more than `binds` has when what is well is left out.
    pub looked_at: usize,
    /// What kept the look from being whole.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// What it took, in microseconds.
    pub took_us: u64,
}

/// One subpath or volume.
#[derive(Debug, Clone, Serialize)]
pub struct NodeBind {
    /// The finding.
    #[serde(flatten)]
    pub bind: BindReport,
    /// Whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// The container that a subpath is for, where its runtime knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<PodContainer>,
    /// Where a stale subpath's mount came from.
    #[serde(flatten)]
    pub origin: Option<Origin>,
    /// Whether the guard runs before the creates of the pod, for a subpath that it repairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarded: Option<bool>,
    /// What the finding means for the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<&'static str>,
    /// The command that helps, or the one that tells more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// What a stale mount was bound from and to, as the mount table writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The issue that tells why such a mount keeps a container from starting.
    pub issue: &'static str,
    /// What was bound: the mount's root, with the kernel's `//deleted`.
    pub original_source: String,
    /// Where.
    pub original_destination: PathBuf,
}

impl Origin {
    fn of(entry: &MountEntry) -> Self {
        Self { issue: ISSUE, original_source: entry.root.for_people(), original_destination: entry.mount_point.clone() }
    }
}

impl NodeReport {
    /// Tells more of what was found: names, origins, what to do next.
    pub fn from_report(report: Report, table: &MountTable, pods: &Pods, policy: &Policy) -> Self {
        let looked_at = report.binds.len();
        let index = MountIndex::of(table);
        let binds = report.binds.into_iter().map(|bind| NodeBind::from_bind(bind, &index, pods, policy)).collect();
        let others = other_roots(table, policy.kubelet_roots()).into_iter().map(|root| {
            format!(
                "the pods of the kubelet at {0} are not looked at: name it in [kubelet] roots of config.toml",
                root.display()
            )
        });
        let problems = report.problems.into_iter().chain(others).collect();
        Self { binds, looked_at, problems, took_us: report.took_us }
    }

    /// Leaves out what is as it should be.
    pub fn without_what_is_well(mut self) -> Self {
        self.binds.retain(NodeBind::is_finding);
        self
    }

    /// Something could not be told.
    pub fn is_incomplete(&self) -> bool {
        !self.problems.is_empty() || self.binds.iter().any(|bind| bind.bind.verdict == "unknown")
    }

    /// Something is not as it should be, and was not mended just now.
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

    /// It is not as it should be, or could not be told to be.
    pub fn is_finding(&self) -> bool {
        self.bind.reason.is_some()
    }

    /// The guard would repair it, in this or another pod.
    pub fn would_be_repaired(&self) -> bool {
        would_be_repaired(&self.bind)
    }

    /// It is as it should be now.
    pub fn is_mended(&self) -> bool {
        matches!(self.bind.outcome, Some(Outcome::Rebound { .. } | Outcome::AlreadyCurrent | Outcome::Detached))
    }
}

const OLD_CONTENT: &str = "the running container keeps the old content until it restarts";
const GUARDED: &str = "the guard repairs it when the container is created next";
const NOT_GUARDED: &str = "the pod runs under another shim: no guard repairs it when the container is created next";
const NOT_IN_USE: &str = "no running container uses it: the kubelet binds it before it starts one";

/// What a finding means for its pod. `may_run`: whether its container may be running, `guarded`: whether the guard runs
/// before the pod's creates; `None` where that is unknown.
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

/// A subpath that the guard repairs at a create, and nothing has repaired yet. For a stand-in it edits the spec.
fn would_be_repaired(bind: &BindReport) -> bool {
    let is_planned = matches!(bind.outcome, Some(Outcome::WouldBe { done }) if done != REFUSED);
    bind.kind == "subpath" && (is_planned || bind.verdict == "stale" && is_stand_in(bind))
}

/// The kubelet's empty file, with nothing mounted on it.
fn is_bare(bind: &BindReport) -> bool {
    bind.kind == "subpath" && bind.reason == Some(Unmounted::Subpath.to_string())
}

/// What somebody can do about a finding.
fn next(bind: &BindReport, pod: Option<&PodName>) -> Option<String> {
    let path = bind.source.display();
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

/// What lies underneath is a directory, too: nobody can bind a file there any more.
fn is_stand_in(bind: &BindReport) -> bool {
    bind.reason.as_ref().is_some_and(|reason| reason.starts_with(&StaleCause::Placeholder.to_string()))
}

fn deletion(pod: &PodName) -> Option<String> {
    Some(format!("kubectl -n {} delete pod {}", pod.namespace.as_ref()?, pod.name.as_ref()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Verdict;

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
