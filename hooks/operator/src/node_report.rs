//! The report of a whole node: the findings in the journal's terms, each with the pod's names, the
//! origin of the mount, and the next step.

use std::path::{Path, PathBuf};

use bindguard_core::identity::PodName;
use serde::{Serialize, Serializer};

use crate::kubelet_roots::other_roots;
use crate::old_binds::{OldBinds, OldFiles, PinnedMounts};
use crate::pods::{ContainerState, Deletion, MountInVolume, PodContainer, Pods, mounts_in_volumes};
use bindguard_core::judge::{Finding, StaleCause, Unmounted, Verdict};
use bindguard_core::kubelet::{PodPath, VolumeSubpath};
use bindguard_core::mount_table::{MountIndex, MountTable};
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::BelowEmptyDirs;
use bindguard_core::report::{BindReport, Outcome, PlannedAction, Report};
use bindguard_core::text::{serialize_path, shell_word};

/// The Kubernetes issue that describes stale volume-subpaths.
pub const ISSUE: &str = "https://github.com/kubernetes/kubernetes/issues/68211";

/// The subpaths and volumes of a node, judged. Its JSON form is what `diagnose --json` and `repair
/// --json` print.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NodeReport {
    pub binds: Vec<NodeBind>,
    /// Running containers that read old files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub old_files: Vec<OldFiles>,
    /// Running containers with binds that differ from the host.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub old_binds: Vec<OldBinds>,
    /// Running containers that keep mounts which the host has unmounted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pinned: Vec<PinnedMounts>,
    /// Mounts of the host below emptyDirs, and below other volumes that the kubelet removes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts_below_emptydir: Vec<MountInVolume>,
    /// The number of subpaths and volumes checked; more than in `binds` if healthy binds are left
    /// out.
    pub checked: usize,
    /// Errors that left the check incomplete.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Duration, in microseconds.
    pub duration_us: u64,
}

#[derive(Debug, Clone, Serialize)]
pub struct NodeBind {
    #[serde(flatten)]
    pub bind: BindReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// The container of a subpath, if the runtime reports the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<PodContainer>,
    /// The origin of a stale subpath's mount.
    #[serde(flatten)]
    pub origin: Option<Origin>,
    /// True if the guard runs before the creates of the pod; set for a subpath that the guard
    /// repairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarded: Option<bool>,
    /// Effects of the finding on the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<Note>,
    /// The command that cures the finding, or shows more about the finding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// The source and destination of a stale mount, as in the mount table.
#[derive(Debug, Clone, Serialize)]
pub struct Origin {
    /// The issue that explains why such a mount keeps a container from starting.
    pub issue: &'static str,
    /// The mount's root, with the kernel's `//deleted`.
    pub original_source: String,
    #[serde(serialize_with = "serialize_path")]
    pub original_destination: PathBuf,
}

impl NodeReport {
    /// Adds names, origins and next steps to the findings. Without a complete mount table there are
    /// no origins, and no command that is safe only if something is not mounted.
    pub fn from_report(
        report: Report,
        table: Option<&MountTable>,
        pods: &Pods,
        places: &Places,
    ) -> Self {
        let mut found = Self {
            checked: report.binds.len(),
            problems: report.problems,
            duration_us: report.duration_us,
            ..Self::default()
        };
        let index = table.map(MountIndex::of);
        let own = table.zip(index.as_ref());
        for bind in report.binds {
            found
                .binds
                .push(NodeBind::from_bind(bind, own, pods, places));
        }
        if let Some(table) = table {
            for root in other_roots(table, places) {
                found.problems.push(format!(
                    "the pods of the kubelet at {} are not checked: name it in [kubelet] roots of config.toml",
                    root.display()
                ));
            }
            found.mounts_below_emptydir = mounts_in_volumes(table, pods, places);
        }
        found
    }

    /// Leaves out the mounts below emptyDirs that are not wanted, all of them under a policy that
    /// does not only report them.
    pub(crate) fn keep_mounts(&mut self, policy: BelowEmptyDirs, wanted: impl Fn(&Path) -> bool) {
        self.mounts_below_emptydir
            .retain(|it| policy == BelowEmptyDirs::Report && wanted(&it.mount_point));
    }

    /// Leaves out healthy binds, and binds that are no fault yet.
    pub fn without_healthy(mut self) -> Self {
        self.binds.retain(NodeBind::is_finding);
        self.old_binds.retain(|old| !old.is_quiet());
        self
    }

    /// True if something could not be checked.
    pub fn is_incomplete(&self) -> bool {
        let is_unknown = |bind: &NodeBind| matches!(bind.bind.finding.verdict, Verdict::Unknown(_));
        !self.problems.is_empty() || self.binds.iter().any(is_unknown)
    }

    /// True if there is a finding that this run did not repair.
    pub fn has_findings(&self) -> bool {
        let is_left = |bind: &NodeBind| bind.is_finding() && !bind.bind.is_repaired();
        self.binds.iter().any(is_left)
            || self.old_files.iter().any(OldFiles::is_finding)
            || self.old_binds.iter().any(OldBinds::is_finding)
            || !self.pinned.is_empty()
            || !self.mounts_below_emptydir.is_empty()
    }
}

impl NodeBind {
    fn from_bind(
        bind: BindReport,
        own: Option<(&MountTable, &MountIndex<'_>)>,
        pods: &Pods,
        places: &Places,
    ) -> Self {
        let source = bind.source().to_owned();
        let mut found = Self {
            bind,
            pod: None,
            container: None,
            origin: None,
            guarded: None,
            notes: Vec::new(),
            command: None,
        };
        let mut may_run = None;
        if let Some(path) = PodPath::from_path(&source, places.kubelet_roots()) {
            let uid = path.pod_uid;
            found.pod = Some(pods.of_uid(uid));
            if let Some(subpath) = VolumeSubpath::from_pod_path(&path) {
                found.container = pods.container(uid, subpath.container()).cloned();
                may_run = pods.may_run(uid, subpath.container());
                if found.would_be_repaired() {
                    found.guarded = pods.is_guarded(uid);
                }
            }
        }
        let verdict = &mut found.bind.finding.verdict;
        if *verdict == Verdict::Unmounted(Unmounted::Subpath) && may_run == Some(false) {
            *verdict = Verdict::Unmounted(Unmounted::UnusedSubpath);
            found.notes.push(Note::NotInUse);
        }
        if found.is_stale() {
            let mount = own.and_then(|(_, index)| index.stack_at(&source).last());
            found.origin = mount.map(|mount| Origin {
                issue: ISSUE,
                original_source: mount.root.display_name(),
                original_destination: mount.mount_point.clone(),
            });
            if matches!(found.bind.finding.kind, SourceKind::Subpath(_)) {
                let is_running = |container: &PodContainer| {
                    matches!(container.state, None | Some(ContainerState::Running))
                };
                if found.container.as_ref().is_some_and(is_running) {
                    found.notes.push(Note::OldContent);
                }
                match found.guarded {
                    Some(true) => found.notes.push(Note::Guarded),
                    Some(false) => found.notes.push(Note::NotGuarded),
                    None => {}
                }
            }
        }
        found.command = found.next_step(own.map(|(table, _)| table), places);
        found
    }

    /// The command for the finding. Notes what has to be done before a pod is deleted.
    fn next_step(&mut self, own: Option<&MountTable>, places: &Places) -> Option<String> {
        let Finding {
            source,
            kind,
            verdict,
            ..
        } = &self.bind.finding;
        if self.bind.is_repaired() {
            return None;
        }
        let path = shell_word(source);
        let is_planned = matches!(self.bind.outcome, Some(Outcome::Planned { .. }));
        if !matches!(verdict, Verdict::Stale { .. }) {
            let is_of_pod = matches!(
                verdict,
                Verdict::Unmounted(_) | Verdict::Dead(_) | Verdict::Orphaned { .. }
            );
            return on_pod("describe", self.pod.as_ref().filter(|_| is_of_pod)?);
        }
        if is_planned {
            return Some(format!("bindguard repair {path}"));
        }
        let is_subpath = matches!(kind, SourceKind::Subpath(_));
        if is_subpath && !is_placeholder(verdict) {
            return Some(format!("bindguard repair --unmount {path}"));
        }
        let is_volume = matches!(kind, SourceKind::MountedVolume(_) | SourceKind::PlainVolume);
        if !is_subpath && !is_volume {
            return None;
        }
        // Only a new pod cures the finding.
        let Some(pod) = &self.pod else {
            return is_subpath.then(|| format!("bindguard repair --unmount {path}"));
        };
        let Some(own) = own else {
            return on_pod("describe", pod);
        };
        match Deletion::of(pod, own, places) {
            Deletion::Command(command) => Some(command),
            Deletion::Unnamed => on_pod("delete", pod),
            Deletion::Erases(mounts) => {
                self.notes.push(Note::ErasesHostFiles);
                Some(format!("umount {}", shell_word(mounts.first()?)))
            }
        }
    }

    /// True if it is not healthy, or could not be checked.
    pub fn is_finding(&self) -> bool {
        self.bind.finding.verdict.is_finding()
    }

    /// True for a subpath that the guard would repair at a create, in this or another pod. For a
    /// placeholder directory it edits the spec.
    pub fn would_be_repaired(&self) -> bool {
        let is_planned = matches!(&self.bind.outcome, Some(Outcome::Planned { action })
            if *action != PlannedAction::Refuse);
        matches!(self.bind.finding.kind, SourceKind::Subpath(_))
            && (is_planned || is_placeholder(&self.bind.finding.verdict))
    }

    /// True if it is stale or orphaned.
    pub fn is_stale(&self) -> bool {
        matches!(
            self.bind.finding.verdict,
            Verdict::Stale { .. } | Verdict::Orphaned { .. }
        )
    }
}

/// An effect of a finding on its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum Note {
    /// A running container still reads the old file.
    #[strum(
        to_string = "the running container keeps the old content until it restarts or is refreshed"
    )]
    OldContent,
    /// The guard runs before the pod's creates.
    #[strum(to_string = "the guard repairs it when the container is created next")]
    Guarded,
    /// The guard does not.
    #[strum(
        to_string = "the pod runs under another shim: no guard repairs it when the container is created next"
    )]
    NotGuarded,
    /// Nothing is wrong yet.
    #[strum(to_string = "no running container uses it: the kubelet binds it before it starts one")]
    NotInUse,
    /// A mount of the host is in a volume that the kubelet removes with the pod.
    #[strum(
        to_string = "a mount of the host is in a volume of the pod: unmount it before the pod is deleted, or the kubelet erases its files (kubernetes#129550)"
    )]
    ErasesHostFiles,
}

impl Serialize for Note {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// True for a placeholder directory. A directory is also beneath the mount, so no file can be bound
/// there any more.
fn is_placeholder(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Stale { cause, .. } if *cause == StaleCause::Placeholder)
}

/// A command about a pod. If no runtime of this node knows the pod's name, the command that finds
/// the name by the uid.
fn on_pod(verb: &str, pod: &PodName) -> Option<String> {
    const COLUMNS: &str = "NAMESPACE:.metadata.namespace,NAME:.metadata.name,UID:.metadata.uid";
    if let Some((namespace, name)) = pod.names() {
        return Some(format!("kubectl -n {namespace} {verb} pod {name}"));
    }
    let uid = shell_word(Path::new(pod.uid.as_ref()?));
    Some(format!(
        "kubectl get pods -A -o custom-columns={COLUMNS} | grep -F -e {uid}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_core::judge::{Lack, NoRemedy};
    use bindguard_core::policy::Scope;

    const SOURCE: &str = "/var/lib/kubelet/pods/u-1/volume-subpaths/conf/app/0";

    fn pods(state: Option<ContainerState>, guarded: Option<bool>) -> Pods {
        let pod = PodName {
            uid: Some("u-1".to_owned()),
            ..PodName::default()
        };
        let name = Some("app".to_owned());
        let container = PodContainer {
            shim_version: None,
            id: "c".to_owned(),
            name,
            state,
            attempt: None,
            pod,
            guarded,
        };
        Pods {
            containers: vec![container],
            ..Pods::default()
        }
    }

    fn node(verdict: Verdict, outcome: Option<Outcome>, pods: &Pods) -> NodeReport {
        let kind = SourceKind::from_path(SOURCE.as_ref(), &Places::default(), Scope::default());
        let finding = Finding {
            bind: None,
            source: SOURCE.into(),
            destination: None,
            kind,
            verdict,
        };
        let report = Report {
            binds: vec![BindReport { finding, outcome }],
            ..Report::default()
        };
        NodeReport::from_report(
            report,
            Some(&MountTable::default()),
            pods,
            &Places::default(),
        )
    }

    /// kubernetes#129550
    #[test]
    fn a_pod_with_a_mount_of_the_host_in_its_volume_is_not_deleted() {
        let mut named = pods(None, None);
        let pod = &mut named.containers[0].pod;
        (pod.namespace, pod.name) = (Some("shop".to_owned()), Some("web".to_owned()));
        let source = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~nfs/data";
        let bind = || {
            let places = Places::default();
            let finding = Finding {
                bind: None,
                source: source.into(),
                destination: None,
                kind: SourceKind::from_path(source.as_ref(), &places, Scope::default()),
                verdict: stale(StaleCause::DeletedRoot),
            };
            BindReport {
                finding,
                outcome: None,
            }
        };
        let report = Report {
            binds: vec![bind()],
            ..Report::default()
        };
        let report = NodeReport::from_report(report, None, &named, &Places::default());
        assert_eq!(
            report.binds[0].command.as_deref(),
            Some("kubectl -n shop describe pod web"),
            "a mount of the host may be in a volume"
        );
        for (more, command) in [
            ("", "kubectl -n shop delete pod web"),
            (
                "2 1 8:2 / /var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/w/d rw - ext4 b rw\n",
                "umount /var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/w/d",
            ),
        ] {
            let table = format!("1 0 8:1 / / rw - ext4 a rw\n{more}");
            let table = MountTable::from_mountinfo(table.as_bytes()).unwrap();
            let report = Report {
                binds: vec![bind()],
                ..Report::default()
            };
            let report = NodeReport::from_report(report, Some(&table), &named, &Places::default());
            let found = &report.binds[0];
            assert_eq!(found.command.as_deref(), Some(command));
            assert_eq!(
                found.notes.contains(&Note::ErasesHostFiles),
                !more.is_empty()
            );
        }
    }

    fn stale(cause: StaleCause) -> Verdict {
        Verdict::Stale {
            cause,
            remedy: Err(NoRemedy::Unreadable("why".to_owned())),
        }
    }

    #[test]
    fn a_bare_subpath_is_no_finding_while_its_container_does_not_run() {
        let of = |pods: &Pods| node(Verdict::Unmounted(Unmounted::Subpath), None, pods);
        let report = of(&pods(Some(ContainerState::Exited), None));
        assert!(!report.has_findings() && report.binds[0].notes == [Note::NotInUse]);
        assert_eq!(report.binds[0].bind.reason(), None);
        assert!(of(&pods(Some(ContainerState::Created), None)).has_findings());
        assert!(
            of(&Pods::default()).has_findings(),
            "no runtime reported anything"
        );
    }

    #[test]
    fn a_stale_subpath_has_notes_on_the_running_container_and_on_the_guard() {
        let planned = |action| Some(Outcome::Planned { action });
        let notes = |outcome, pods: &Pods| {
            node(stale(StaleCause::DeletedRoot), outcome, pods)
                .binds
                .remove(0)
                .notes
        };
        let (running, exited) = (Some(ContainerState::Running), Some(ContainerState::Exited));
        let rebind = || planned(PlannedAction::Rebind);
        assert_eq!(
            notes(rebind(), &pods(running, Some(true))),
            [Note::OldContent, Note::Guarded]
        );
        assert_eq!(
            notes(rebind(), &pods(None, Some(false))),
            [Note::OldContent, Note::NotGuarded]
        );
        for state in [exited, Some(ContainerState::Created)] {
            assert_eq!(notes(rebind(), &pods(state, None)), []);
        }
        let unknown = notes(rebind(), &Pods::default());
        assert_eq!(unknown, [], "no runtime reported a container");
        assert_eq!(
            notes(planned(PlannedAction::Refuse), &pods(exited, Some(true))),
            []
        );
        assert_eq!(
            notes(
                Some(Outcome::Rebound { tries: 1 }),
                &pods(running, Some(true))
            ),
            [Note::OldContent]
        );
    }

    #[test]
    fn the_guard_repairs_a_placeholder_directory_and_an_operator_deletes_its_pod() {
        let pods = Pods::default();
        let bind = |cause| node(stale(cause), None, &pods).binds.remove(0);
        let unmount = format!("bindguard repair --unmount {SOURCE}");
        assert_eq!(bind(StaleCause::DeletedRoot).command, Some(unmount));
        let placeholder = bind(StaleCause::Placeholder);
        assert!(
            placeholder.would_be_repaired() && finds_the_pod(&placeholder),
            "{placeholder:?}"
        );
    }

    fn finds_the_pod(bind: &NodeBind) -> bool {
        let command = bind.command.as_deref().unwrap_or_default();
        command.starts_with("kubectl get pods -A ") && command.ends_with("| grep -F -e 'u-1'")
    }

    /// Issue 16: without a runtime that answers, an orphaned subpath had no next step.
    #[test]
    fn a_pod_of_which_only_the_uid_is_known_is_looked_up_by_it() {
        let orphaned = Verdict::Orphaned {
            cause: StaleCause::DeletedRoot,
            lacks: Lack::Key("app.conf".into()),
            remake: None,
        };
        for verdict in [orphaned.clone(), Verdict::Unmounted(Unmounted::Subpath)] {
            let bind = node(verdict, None, &Pods::default()).binds.remove(0);
            assert!(finds_the_pod(&bind), "{bind:?}");
        }
        let mut named = pods(None, None);
        let pod = &mut named.containers[0].pod;
        (pod.namespace, pod.name) = (Some("shop".to_owned()), Some("web".to_owned()));
        let bind = node(orphaned, None, &named).binds.remove(0);
        assert_eq!(
            bind.command.as_deref(),
            Some("kubectl -n shop describe pod web")
        );
    }
}
