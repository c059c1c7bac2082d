//! The occurrences in the agent's and the guard's reports.

use std::fmt;
use std::path::Path;

use bindguard_core::error_chain;
use bindguard_core::judge::{Unmounted, Verdict, VerdictName};
use bindguard_core::report::{
    BindRecord, BindReport, Container, CreateLine, JournalLine, MountResult, Outcome, RefreshLine,
    Report,
};
use bindguard_core::source::SourceKind;
use bindguard_guard::refresh::{NotReplaced, RefreshOutcome, Refreshed};
use bindguard_operator::container_mounts::Keeper;
use bindguard_operator::node_report::{NodeBind, NodeReport};
use bindguard_operator::pods::PodName;

use super::occurrence::{Occurrence, Reason, Subject};
use crate::container::PodIdentity;

/// The occurrences of a line: of a create, of a check after it, or of an operator's command.
pub fn from_journal(line: &JournalLine) -> Vec<Occurrence> {
    match line {
        JournalLine::Create(CreateLine { report, .. })
        | JournalLine::NriCreate(CreateLine { report, .. }) => {
            from_binds(&report.container, &report.binds)
        }
        JournalLine::Rebind(line) => from_binds(&line.container, &line.binds),
        JournalLine::Refresh(line) => from_refresh_line(line),
    }
}

fn from_refresh_line(line: &RefreshLine) -> Vec<Occurrence> {
    let Some(subject) = subject(&line.container) else {
        return Vec::new();
    };
    let occurrence = |(reason, message)| Occurrence {
        subject: subject.clone(),
        container: line.container.name.clone(),
        reason,
        message,
    };
    let mounts = line
        .mounts
        .iter()
        .map(|mount| match mount.outcome.reason() {
            _ if mount.outcome.is_replaced() => refreshed(&mount.destination),
            _ if mount.outcome == MountResult::Missing => missing(&mount.destination),
            why => not_refreshed(
                &mount.destination,
                why.as_deref().unwrap_or("policy only reports it"),
            ),
        });
    let error = line
        .notification
        .as_ref()
        .and_then(|notification| notification.error.as_deref());
    mounts
        .chain(error.map(not_notified))
        .map(occurrence)
        .collect()
}

fn from_binds(container: &Container, binds: &[BindRecord<'_>]) -> Vec<Occurrence> {
    let Some(subject) = subject(container) else {
        return Vec::new();
    };
    let occurrence = |bind: &BindRecord<'_>| {
        let outcome = bind.outcome.as_deref();
        let place = bind.destination.as_deref().unwrap_or(&bind.source);
        let why = bind.reason.as_deref().unwrap_or_default();
        Some(Occurrence {
            subject: subject.clone(),
            container: container.name.clone(),
            reason: reason(bind.verdict, outcome)?,
            message: message(&format!("the mount at {place}"), bind.verdict, why, outcome),
        })
    };
    binds.iter().filter_map(occurrence).collect()
}

/// The occurrences of a re-bind by the agent.
pub fn from_rebind(pod_uid: &str, report: &Report) -> Vec<Occurrence> {
    let occurrence = |bind: &BindReport| {
        let outcome = bind.outcome.as_ref();
        let why = bind.reason()?;
        Some(Occurrence {
            subject: Subject::Uid(pod_uid.to_owned()),
            container: container(&bind.finding.kind),
            reason: reason(bind.verdict(), outcome)?,
            message: message(&place(bind), bind.verdict(), &why, outcome),
        })
    };
    report.binds.iter().filter_map(occurrence).collect()
}

/// The occurrences of a refresh: what succeeded, and what did not.
pub fn from_refresh(pod: &PodIdentity, container: &str, done: &Refreshed) -> Vec<Occurrence> {
    let occurrence = |reason, message| Occurrence {
        subject: Subject::Pod(pod.clone()),
        container: Some(container.to_owned()),
        reason,
        message,
    };
    let mounts = done.mounts.iter().filter_map(|mount| {
        let place = mount.destination.display();
        let (reason, message) = match &mount.outcome {
            RefreshOutcome::Replaced(_) => refreshed(place),
            // The events of these changes, and the checks after the last one, repeat it.
            RefreshOutcome::NotReplaced(NotReplaced::Restless(_)) => return None,
            RefreshOutcome::KeyGone => not_refreshed(
                place,
                &format!("the volume has no {} any more", mount.sub_path.display()),
            ),
            RefreshOutcome::Hidden => not_refreshed(place, "the container mounted over it"),
            RefreshOutcome::Occupied => not_refreshed(place, "other mounts are in it"),
            RefreshOutcome::Missing => missing(place),
            RefreshOutcome::Stale => not_refreshed(place, "policy only reports it"),
            RefreshOutcome::NotReplaced(why) => not_refreshed(place, &error_chain(why)),
        };
        Some(occurrence(reason, message))
    });
    let not_notified = done.not_notified.as_ref().map(|error| {
        let (reason, message) = not_notified(&error_chain(error));
        occurrence(reason, message)
    });
    mounts.chain(not_notified).collect()
}

/// The occurrence of a container that could not be refreshed at all.
pub fn from_refusal(pod: &PodIdentity, container: &str, why: &str) -> Occurrence {
    Occurrence {
        subject: Subject::Pod(pod.clone()),
        container: Some(container.to_owned()),
        reason: Reason::BindMountNotRefreshed,
        message: format!("the container keeps the files of its start until it restarts: {why}"),
    }
}

fn not_notified(error: &str) -> (Reason, String) {
    let message = format!("its files are current, and the application was not notified: {error}");
    (Reason::ApplicationNotNotified, message)
}

fn refreshed(place: impl fmt::Display) -> (Reason, String) {
    (
        Reason::BindMountRefreshed,
        format!("the mount at {place} is current"),
    )
}

fn missing(place: impl fmt::Display) -> (Reason, String) {
    let message = format!(
        "the mount at {place} is gone: the kernel detached it when the directory around it was updated; restart the container"
    );
    (Reason::BindMountNotRefreshed, message)
}

fn not_refreshed(place: impl fmt::Display, why: &str) -> (Reason, String) {
    let message =
        format!("the mount at {place} keeps its old content until the container restarts: {why}");
    (Reason::BindMountNotRefreshed, message)
}

/// The occurrences of a survey: sources that a re-bind cannot repair.
pub fn from_survey(report: &NodeReport) -> Vec<Occurrence> {
    report.binds.iter().filter_map(surveyed).collect()
}

fn surveyed(NodeBind { bind, pod, .. }: &NodeBind) -> Option<Occurrence> {
    match &bind.finding.verdict {
        Verdict::Dead(_) | Verdict::Unmounted(Unmounted::Volume { .. }) | Verdict::Pinning(_) => {}
        // A kubelet that is about to bind a subpath, and stale subpaths, which the watcher reports.
        Verdict::Unmounted(_) | Verdict::Stale { .. } | Verdict::Orphaned { .. } => return None,
        Verdict::Wrong(_) | Verdict::Current | Verdict::Foreign => return None,
        Verdict::NotProbed | Verdict::Unknown(_) => return None,
    }
    Some(Occurrence {
        subject: Subject::Uid(pod.as_ref()?.uid.clone()?),
        container: container(&bind.finding.kind),
        reason: reason(bind.verdict(), None)?,
        message: message(&place(bind), bind.verdict(), &bind.reason()?, None),
    })
}

/// The occurrence of a pod whose annotations for live refresh have no effect.
pub fn from_ignored_request(pod: &PodName, problems: &[String]) -> Option<Occurrence> {
    let uid = pod.uid.clone()?;
    let subject = match (&pod.namespace, &pod.name) {
        (Some(namespace), Some(name)) => Subject::Pod(PodIdentity {
            namespace: namespace.clone(),
            name: name.clone(),
            uid,
        }),
        _ => Subject::Uid(uid),
    };
    let message = problems.join("; ");
    Some(Occurrence {
        subject,
        container: None,
        reason: Reason::RefreshRequestIgnored,
        message,
    })
}

/// The occurrence of a running container that keeps mounts of the host.
pub fn from_keeper(Keeper { container, places }: &Keeper) -> Option<Occurrence> {
    let pod = &container.pod;
    let uid = pod.uid.clone()?;
    let subject = match (&pod.namespace, &pod.name) {
        (Some(namespace), Some(name)) => Subject::Pod(PodIdentity {
            namespace: namespace.clone(),
            name: name.clone(),
            uid,
        }),
        _ => Subject::Uid(uid),
    };
    let (first, others) = places.split_first()?;
    let more = if others.is_empty() {
        String::new()
    } else {
        format!(" and {} more", others.len())
    };
    let message = format!(
        "the container keeps mounts that the host has unmounted: {}{more}; restart it, with mountPropagation HostToContainer",
        first.display()
    );
    Some(Occurrence {
        subject,
        container: container.name.clone(),
        reason: Reason::HostMountsPinned,
        message,
    })
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

/// The pod of a container, if enough of its names is known.
fn subject(container: &Container) -> Option<Subject> {
    let uid = container.uid.clone()?;
    Some(match (&container.namespace, &container.pod) {
        (Some(namespace), Some(name)) => Subject::Pod(PodIdentity {
            namespace: namespace.clone(),
            name: name.clone(),
            uid,
        }),
        _ => Subject::Uid(uid),
    })
}

fn container(kind: &SourceKind) -> Option<String> {
    match kind {
        SourceKind::Subpath(subpath) => Some(subpath.container().to_owned()),
        SourceKind::MountedVolume(_) | SourceKind::PlainVolume | SourceKind::InVolume => None,
        SourceKind::HostRoot | SourceKind::Foreign => None,
    }
}

/// A bind in the terms of the pod's owner, who knows no path of the kubelet.
fn place(bind: &BindReport) -> String {
    match &bind.finding.kind {
        SourceKind::Subpath(subpath) => {
            format!(
                "a subPath of volume {} in container {}",
                subpath.volume(),
                subpath.container()
            )
        }
        SourceKind::MountedVolume(_) | SourceKind::PlainVolume => {
            format!("volume {}", volume_name(bind.source()))
        }
        SourceKind::InVolume | SourceKind::HostRoot | SourceKind::Foreign => {
            bind.source().display().to_string()
        }
    }
}

/// The name in `pods/UID/volumes/PLUGIN/NAME`, and in `NAME/mount` of CSI.
fn volume_name(path: &Path) -> String {
    let names: Vec<_> = path.iter().map(|name| name.to_string_lossy()).collect();
    let volumes = names.iter().rposition(|name| name == "volumes");
    let name = volumes
        .and_then(|volumes| names.get(volumes + 2))
        .or(names.last());
    name.map(|name| name.to_string()).unwrap_or_default()
}

/// A repair has no cause in its message, and no number of tries: each update has another payload,
/// and equal repairs shall be counted in one event. The journal has both.
fn message(place: &str, verdict: VerdictName, why: &str, outcome: Option<&Outcome>) -> String {
    match outcome {
        Some(Outcome::Rebound { .. }) => {
            format!("{place} was {verdict}; {}", Outcome::Rebound { tries: 1 })
        }
        Some(outcome) if outcome.is_repaired() => format!("{place} was {verdict}; {outcome}"),
        Some(outcome) => format!("{place} is {verdict}: {why}; {outcome}"),
        None => format!("{place} is {verdict}: {why}"),
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
        let pod = PodIdentity {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            uid: "u-1".to_owned(),
        };
        assert_eq!(
            (found.subject, found.container.as_deref()),
            (Subject::Pod(pod), Some("app"))
        );
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
