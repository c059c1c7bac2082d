//! Kubernetes events on the pods of this node.
//!
//! ```text
//! journal ─────┐
//! re-binds ────┼─► Events ─► recorder: names of the pod ─► objects ─► pace of the node ─► API server
//! refreshes ───┤   never     (CRI, cached)                (counted)                       create, patch
//! survey ──────┘   waits
//! ```
//!
//! Threads hand over occurrences and go on: an API server that is slow, down or hostile costs
//! events, and nothing else.

mod recorder;

use std::hash::Hash;
use std::path::Path;

use bindguard_core::identity::{Identity, PodName};
use bindguard_core::judge::{Unmounted, Verdict, VerdictName};
use bindguard_core::places::KindName;
use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_core::report::{
    BindRecord, CreateLine, JournalLine, MountResult, Outcome, RefreshLine, RefreshedMount,
    ReleaseResult, ReleasedCopy,
};
use bindguard_operator::node_report::{NodeBind, NodeReport};
use bindguard_operator::old_binds::PinnedMounts;
use serde::Serialize;

use crate::limits::SayOnce;

pub use crate::sinks::events::recorder::start;

// An occurrence that is worth an event on a pod.

/// The reason of an event: `reason` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Reason {
    /// A bind mount was repaired before a create, or by the agent.
    BindMountRepaired,
    /// Policy refused the container.
    ContainerRefused,
    /// A bind mount is stale and stays so.
    BindMountNotRepaired,
    /// The file server or FUSE daemon of a volume does not answer.
    BindSourceDead,
    /// A volume that must be mounted is not.
    VolumeNotMounted,
    /// A container keeps the host's mounts alive.
    HostMountsPinned,
    /// The kubelet will remove files of the host with the pod, or cannot delete the pod.
    MountBelowEmptyDir,
    /// The runtime mounted something else than the spec says.
    BindMountWrong,
    /// A running container got the current file.
    BindMountRefreshed,
    /// A running container still shows an old file.
    BindMountNotRefreshed,
    /// A running container got the current file, and its application does not know.
    ApplicationNotNotified,
    /// An annotation for live refresh has no effect.
    RefreshRequestIgnored,
}

/// The type of an event: `type` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum EventType {
    /// Nothing is wrong any more.
    Normal,
    /// Something is.
    Warning,
}

impl Reason {
    /// The type of the event. True for what is over, false for a state: an event with an equal message
    /// later is a new occurrence.
    fn properties(self) -> (EventType, bool) {
        match self {
            Self::BindMountRepaired | Self::BindMountRefreshed => (EventType::Normal, true),
            Self::BindMountWrong | Self::ApplicationNotNotified | Self::ContainerRefused => {
                (EventType::Warning, true)
            }
            Self::BindMountNotRepaired
            | Self::BindSourceDead
            | Self::VolumeNotMounted
            | Self::HostMountsPinned
            | Self::BindMountNotRefreshed
            | Self::RefreshRequestIgnored
            | Self::MountBelowEmptyDir => (EventType::Warning, false),
        }
    }

    pub fn event_type(self) -> EventType {
        self.properties().0
    }
}

/// An occurrence on a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Occurrence {
    /// The pod, at least by its uid.
    pub pod: PodName,
    /// The container's name in the pod.
    pub container: Option<String>,
    pub reason: Reason,
    /// One or two sentences for the pod's owner.
    pub message: String,
}

/// The occurrences that a place did not have before: each survey finds them again. An occurrence that is over is news each time.
pub fn news<K: Hash + Eq + Clone>(
    standing: &mut SayOnce<K>,
    place: K,
    occurrences: Vec<Occurrence>,
) -> Vec<Occurrence> {
    let occurrences = occurrences.into_iter();
    let (mut new, states): (Vec<_>, _) = occurrences.partition(|it| it.reason.properties().1);
    new.extend(standing.news(place, states));
    new
}

// The occurrences in lines of the journal and in surveys.

/// The occurrences of a line from the guard or an operator's command.
pub fn from_journal(line: &JournalLine) -> Vec<Occurrence> {
    match line {
        JournalLine::Create(CreateLine { report, .. })
        | JournalLine::NriCreate(CreateLine { report, .. }) => {
            from_binds(&report.container, &report.binds)
        }
        JournalLine::Rebind(line) => from_binds(&line.container, &line.binds),
        JournalLine::Refresh(line) => from_refresh(line),
        JournalLine::Release(line) => {
            of_container(&line.container, line.copies.iter().filter_map(from_copy))
        }
    }
}

/// The occurrences of a refresh: each mount has an occurrence, and so has a failed notification. A
/// container without a pod has no occurrences.
pub fn from_refresh(line: &RefreshLine) -> Vec<Occurrence> {
    let mut found: Vec<_> = line.mounts.iter().filter_map(from_mount).collect();
    if let Some(notification) = &line.notification
        && let Some(error) = &notification.error
    {
        let message =
            format!("its files are current, and the application was not notified: {error}");
        found.push((Reason::ApplicationNotNotified, message));
    }
    // Without a mount, the problems kept the whole container from its refresh.
    if found.is_empty() && line.mounts.is_empty() {
        for why in &line.problems {
            let message =
                format!("the container keeps the files of its start until it restarts: {why}");
            found.push((Reason::BindMountNotRefreshed, message));
        }
    }
    of_container(&line.container, found)
}

/// The occurrences on a container; none without a pod.
fn of_container(
    Identity { container, pod }: &Identity,
    found: impl IntoIterator<Item = (Reason, String)>,
) -> Vec<Occurrence> {
    let mut occurrences = Vec::new();
    for (reason, message) in found {
        occurrences.extend(on_pod(pod, container.as_ref(), reason, message));
    }
    occurrences
}

fn on_pod(
    pod: &PodName,
    container: Option<&String>,
    reason: Reason,
    message: String,
) -> Option<Occurrence> {
    pod.uid.as_ref()?;
    Some(Occurrence {
        pod: pod.clone(),
        container: container.cloned(),
        reason,
        message,
    })
}

fn from_copy(copy: &ReleasedCopy) -> Option<(Reason, String)> {
    let place = format!(
        "the mount at {}, which the host has unmounted",
        copy.mount_point
    );
    match copy.result {
        ReleaseResult::Kept => None,
        ReleaseResult::Released => Some((
            Reason::BindMountRefreshed,
            format!("the container released {place}"),
        )),
        ReleaseResult::Busy | ReleaseResult::Refused => {
            let why = copy.error.as_deref().unwrap_or_default();
            let message = format!("the container keeps {place}: {why}");
            Some((Reason::HostMountsPinned, message))
        }
    }
}

fn from_mount(mount: &RefreshedMount) -> Option<(Reason, String)> {
    let place = format!("the mount at {}", mount.destination);
    let why = mount.reason();
    let why = why.as_deref().unwrap_or("policy only reports it");
    let message = match mount.outcome {
        MountResult::Replaced { .. } => {
            return Some((Reason::BindMountRefreshed, format!("{place} is current")));
        }
        // Each change of the volume causes a further refresh, which reports a result.
        MountResult::Restless => return None,
        MountResult::Missing => format!("{place} is gone: {why}"),
        MountResult::Hidden => format!("{place} is not replaced: {why}"),
        _ if mount.is_host_root() => {
            // A create leaves a bind private by the same rules.
            let until = match mount.outcome {
                MountResult::Stale
                | MountResult::Refused(Refused {
                    reason:
                        RefusedReason::RecursivelyReadOnly
                        | RefusedReason::ReadOnlyKept
                        | RefusedReason::OnlyReported
                        | RefusedReason::PrivateOnHost,
                    ..
                }) => "also after a restart of the container",
                _ => "until the container restarts",
            };
            format!("{place} keeps mounts that the host unmounts, {until}: {why}")
        }
        _ => format!("{place} keeps its old content until the container restarts: {why}"),
    };
    Some((Reason::BindMountNotRefreshed, message))
}

pub fn from_binds(Identity { container, pod }: &Identity, binds: &[BindRecord]) -> Vec<Occurrence> {
    let found = binds.iter();
    found
        .filter_map(|bind| from_bind(pod, container.as_ref(), bind))
        .collect()
}

/// The occurrence of a bind; the path of a subpath has the container's name.
fn from_bind(pod: &PodName, container: Option<&String>, bind: &BindRecord) -> Option<Occurrence> {
    let outcome = bind.outcome.as_ref();
    let names = subpath_names(bind);
    let by_path = names.map(|(_, container)| container.to_owned());
    // In the terms of the pod's owner, who knows no path of the kubelet.
    let place = match (&bind.destination, names, bind.kind) {
        (Some(destination), ..) => format!("the mount at {destination}"),
        (None, Some((volume, container)), _) => {
            format!("a subPath of volume {volume} in container {container}")
        }
        (None, None, KindName::Volume) => format!("volume {}", volume_name(bind.source.as_ref())),
        (None, None, _) => bind.source.clone(),
    };
    let why = bind.reason.as_deref().unwrap_or_default();
    // The message of a repair has no cause and no number of tries: equal repairs shall count as one
    // event, also for different payloads. The journal has the cause and the tries.
    let verdict = bind.verdict;
    let message = match outcome {
        Some(Outcome::Rebound { .. }) => {
            format!("{place} was {verdict}; {}", Outcome::Rebound { tries: 1 })
        }
        Some(outcome) if outcome.is_repaired() => format!("{place} was {verdict}; {outcome}"),
        Some(outcome) => format!("{place} is {verdict}: {why}; {outcome}"),
        None => format!("{place} is {verdict}: {why}"),
    };
    let reason = reason(verdict, outcome)?;
    on_pod(pod, container.or(by_path.as_ref()), reason, message)
}

/// The occurrences of a survey: sources that a re-bind cannot repair, and mounts of the host below
/// emptyDirs.
pub fn from_survey(report: &NodeReport) -> Vec<Occurrence> {
    let mut found = Vec::new();
    for NodeBind { bind, pod, .. } in &report.binds {
        let is_reported = match &bind.finding.verdict {
            Verdict::Dead(_)
            | Verdict::Unmounted(Unmounted::Volume { .. })
            | Verdict::Pinning(_) => true,
            // A kubelet that is about to bind a subpath, and stale subpaths, which the watcher
            // reports.
            Verdict::Unmounted(_) | Verdict::Stale { .. } | Verdict::Orphaned { .. } => false,
            Verdict::Wrong(_) | Verdict::Current | Verdict::Foreign => false,
            Verdict::NotProbed | Verdict::Unknown(_) => false,
        };
        if let Some(pod) = pod.as_ref().filter(|_| is_reported) {
            let mut bind = BindRecord::from(bind);
            bind.outcome = None;
            found.extend(from_bind(pod, None, &bind));
        }
    }
    for mount in &report.mounts_below_emptydir {
        let place = mount.mount_point.display();
        let (effect, command) = (mount.effect(), &mount.command);
        let message = format!("on the node, {place} is a mount: {effect}, with {command}");
        found.extend(on_pod(
            &mount.pod,
            None,
            Reason::MountBelowEmptyDir,
            message,
        ));
    }
    found
}

/// The occurrence of a pod whose annotations for live refresh have no effect.
pub fn from_ignored_request(pod: &PodName, problems: &[String]) -> Option<Occurrence> {
    on_pod(
        pod,
        None,
        Reason::RefreshRequestIgnored,
        problems.join("; "),
    )
}

/// The occurrence of a running container that keeps mounts of the host.
pub fn from_keeper(kept: &PinnedMounts) -> Option<Occurrence> {
    let (container, places) = (&kept.container, &kept.places);
    let (first, others) = places.split_first()?;
    let mut kept = first.display().to_string();
    if !others.is_empty() {
        kept += &format!(" and {} more", others.len());
    }
    let message = format!(
        "the container keeps mounts that the host has unmounted: {kept}; restart it, with mountPropagation HostToContainer"
    );
    let (pod, name) = (&container.pod, container.name.as_ref());
    on_pod(pod, name, Reason::HostMountsPinned, message)
}

/// The reason for a bind with this verdict and outcome; `None` if there is nothing to report.
fn reason(verdict: VerdictName, outcome: Option<&Outcome>) -> Option<Reason> {
    match outcome {
        Some(Outcome::Refused) => return Some(Reason::ContainerRefused),
        Some(Outcome::AlreadyCurrent) => return None,
        Some(outcome) if outcome.is_repaired() => return Some(Reason::BindMountRepaired),
        Some(_) | None => {}
    }
    match verdict {
        VerdictName::Stale | VerdictName::Orphaned => Some(Reason::BindMountNotRepaired),
        VerdictName::Unmounted => Some(Reason::VolumeNotMounted),
        VerdictName::Dead => Some(Reason::BindSourceDead),
        VerdictName::Pinning => Some(Reason::HostMountsPinned),
        VerdictName::Wrong => Some(Reason::BindMountWrong),
        VerdictName::Current | VerdictName::Foreign | VerdictName::Unknown => None,
    }
}

/// The names of the volume and of the container in `volume-subpaths/VOLUME/CONTAINER/INDEX`.
fn subpath_names(bind: &BindRecord) -> Option<(&str, &str)> {
    if bind.kind != KindName::Subpath {
        return None;
    }
    let mut names = bind.source.rsplit('/').skip(1);
    let container = names.next()?;
    Some((names.next()?, container))
}

/// The name in `pods/UID/volumes/PLUGIN/NAME`, and in `NAME/mount` of CSI.
fn volume_name(path: &Path) -> String {
    let names: Vec<_> = path.iter().map(|name| name.to_string_lossy()).collect();
    let volumes = names.iter().rposition(|name| name == "volumes");
    let name = volumes.and_then(|volumes| names.get(volumes + 2));
    name.or(names.last())
        .map(ToString::to_string)
        .unwrap_or_default()
}

#[cfg(test)]
mod standing_tests {
    use bindguard_core::identity::PodName;

    use super::*;
    use Reason;

    fn dead(message: &str) -> Occurrence {
        Occurrence {
            pod: PodName::of_uid("u"),
            container: None,
            reason: Reason::BindSourceDead,
            message: message.to_owned(),
        }
    }

    #[test]
    fn only_a_change_is_new() {
        let mut standing = SayOnce::default();
        assert_eq!(news(&mut standing, 1, vec![dead("a")]), [dead("a")]);
        assert_eq!(
            news(&mut standing, 1, vec![dead("a"), dead("b")]),
            [dead("b")]
        );
        assert_eq!(news(&mut standing, 2, vec![dead("a")]), [dead("a")]);
        assert_eq!(news(&mut standing, 1, vec![dead("b")]), []);
        assert_eq!(
            news(&mut standing, 1, vec![dead("a")]),
            [dead("a")],
            "it was gone in between"
        );
        let repaired = Occurrence {
            reason: Reason::BindMountRepaired,
            ..dead("r")
        };
        assert!(
            (0..2).all(|_| news(&mut standing, 3, vec![repaired.clone()]).len() == 1),
            "a repair is new each time"
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    const LINE: &str = r#"{"version":1,"time":null,"attempt":0,
        "container":{"name":"app","pod":"web","namespace":"shop","uid":"u-1"},
        "binds":[{"source":"/s","destination":"/etc/app.conf","kind":"subpath","verdict":"VERDICT","reason":"why","outcome":OUTCOME}],
        "foreign":0,"duration_us":1}"#;

    fn journaled(verdict: &str, outcome: &str) -> Vec<Occurrence> {
        let line = LINE
            .replace('\n', "")
            .replace("VERDICT", verdict)
            .replace("OUTCOME", outcome);
        let line = line.replace(r#","outcome":null"#, "");
        from_journal(&JournalLine::parse(&line).unwrap())
    }

    #[test]
    fn each_bind_of_a_create_has_its_reason() {
        for (verdict, outcome, expected) in [
            (
                "stale",
                r#"{"result":"rebound","tries":1}"#,
                Some(Reason::BindMountRepaired),
            ),
            ("stale", r#"{"result":"already-current"}"#, None),
            (
                "stale",
                r#"{"result":"failed","error":"e"}"#,
                Some(Reason::BindMountNotRepaired),
            ),
            (
                "stale",
                r#"{"result":"planned","action":"rebind"}"#,
                Some(Reason::BindMountNotRepaired),
            ),
            ("orphaned", "null", Some(Reason::BindMountNotRepaired)),
            (
                "dead",
                r#"{"result":"refused"}"#,
                Some(Reason::ContainerRefused),
            ),
            ("dead", "null", Some(Reason::BindSourceDead)),
            ("unmounted", "null", Some(Reason::VolumeNotMounted)),
            (
                "pinning",
                r#"{"result":"made-rslave"}"#,
                Some(Reason::BindMountRepaired),
            ),
            (
                "pinning",
                r#"{"result":"needs-shared-mount","command":"c"}"#,
                Some(Reason::HostMountsPinned),
            ),
            ("unknown", "null", None),
            ("current", "null", None),
        ] {
            let found: Vec<_> = journaled(verdict, outcome)
                .into_iter()
                .map(|found| found.reason)
                .collect();
            assert_eq!(found, Vec::from_iter(expected), "{verdict} {outcome}");
        }
    }

    /// A host root has no content of its own that could be old.
    #[test]
    fn a_mount_that_stays_keeps_old_content_or_old_mounts() {
        let message = |kind: &str, result: &str| {
            let line = format!(
                r#"{{"version":2,"kind":"refresh","time":null,"by":"operator","id":"c","container":{{"uid":"u"}},"mounts":[
                {{"destination":"/host","source":"/",{kind}"outcome":{{"result":"{result}"}}}}],"duration_us":1}}"#
            );
            let found = from_journal(&JournalLine::parse(&line.replace('\n', "")).unwrap());
            found.into_iter().next().unwrap().message
        };
        let host_root = r#""kind":"host-root","#;
        assert_eq!(
            message(host_root, "stale"),
            "the mount at /host keeps mounts that the host unmounts, also after a restart of the container: policy only reports it"
        );
        let refused = |reason: &str| {
            let result = format!(r#"refused","reason":"{reason}","path":"/host"#);
            message(host_root, &result)
        };
        assert!(refused("recursively-read-only").contains("also after a restart"));
        assert!(refused("nested-mount").contains("until the container restarts"));
        assert_eq!(
            message("", "stale"),
            "the mount at /host keeps its old content until the container restarts: policy only reports it"
        );
        assert_eq!(
            message("", "hidden"),
            "the mount at /host is not replaced: the container mounted over it"
        );
    }

    #[test]
    fn a_copy_that_stays_is_a_warning() {
        let line = r#"{"version":2,"kind":"release","time":null,"by":"operator","id":"c","container":{"uid":"u"},"copies":[
            {"mount_point":"/host/a","fs_type":"ext4","device":"8:16","result":"released"},
            {"mount_point":"/host/b","fs_type":"ext4","device":"8:16","result":"busy","error":"it is in use"}],"duration_us":1}"#;
        let found = from_journal(&JournalLine::parse(&line.replace('\n', "")).unwrap());
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.reason, it.message.as_str()))
            .collect();
        assert_eq!(
            found,
            [
                (
                    Reason::BindMountRefreshed,
                    "the container released the mount at /host/a, which the host has unmounted"
                ),
                (
                    Reason::HostMountsPinned,
                    "the container keeps the mount at /host/b, which the host has unmounted: it is in use"
                ),
            ]
        );
    }

    #[test]
    fn the_message_has_the_place_and_the_outcome() {
        let found = journaled("stale", r#"{"result":"rebound","tries":3}"#).remove(0);
        assert_eq!(
            found.message,
            "the mount at /etc/app.conf was stale; re-bound to the current target"
        );
        let dead = journaled("dead", r#"{"result":"refused"}"#).remove(0);
        assert_eq!(
            dead.message,
            "the mount at /etc/app.conf is dead: why; the container is refused"
        );
        let pod = PodName {
            namespace: Some("shop".to_owned()),
            name: Some("web".to_owned()),
            uid: Some("u-1".to_owned()),
        };
        assert_eq!((found.pod, found.container.as_deref()), (pod, Some("app")));
    }

    #[test]
    fn a_volume_has_the_name_that_its_pod_gave_it() {
        let pod = "/var/lib/kubelet/pods/u/volumes";
        assert_eq!(
            volume_name(format!("{pod}/kubernetes.io~nfs/data").as_ref()),
            "data"
        );
        assert_eq!(
            volume_name(format!("{pod}/kubernetes.io~csi/pvc-1/mount").as_ref()),
            "pvc-1"
        );
    }
}
