//! A line of the journal: a JSON object, with the version of its form.
//!
//! | kind | version | about |
//! |---|---|---|
//! | none | 1 | a create, by the shim, the wrapper or a hook |
//! | `nri-create` | 2 | a create, by the NRI plugin |
//! | `rebind` | 2 | the subpaths of a volume, between creates |
//! | `refresh` | 2 | a running container |
//! | `release` | 2 | the copies of unmounted mounts in a running container |
//!
//! After a rollback, an older program reads lines of a newer program. The older program skips and
//! counts every line with a newer version, an unknown key or an unknown value. So the version of a
//! kind changes only when the form of the kind changes.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{EnumString, IntoStaticStr, VariantArray};

use crate::identity::{Identity, PodName};
use crate::places::KindName;
use crate::refresh::Refused;
use crate::refresh_request::Notify;
use crate::report::{BindRecord, RecordedReport, Report, microseconds};

/// A line that was read.
#[derive(Debug, Clone)]
pub enum JournalLine {
    Create(CreateLine),
    /// A create, as the NRI plugin saw it.
    NriCreate(CreateLine),
    /// The subpaths of a volume, between creates.
    Rebind(RebindLine),
    Refresh(RefreshLine),
    /// The copies of unmounted mounts in a running container.
    Release(ReleaseLine),
}

/// Why a line was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnreadLine {
    /// A newer version of bindguard wrote it.
    Newer,
    /// It is no line of a journal.
    Foreign,
}

/// The kind of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum LineKind {
    Create,
    NriCreate,
    Rebind,
    Refresh,
    Release,
}

impl LineKind {
    /// The version that this program writes for the kind. Each new key or value of the kind needs
    /// the next number.
    fn version(self) -> u32 {
        match self {
            Self::Create => 1,
            Self::NriCreate | Self::Rebind | Self::Refresh | Self::Release => 2,
        }
    }
}

impl JournalLine {
    /// Parses a line.
    ///
    /// # Errors
    /// If a newer version wrote it, or it is no line of a journal.
    pub fn parse(line: &str) -> Result<Self, UnreadLine> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
            kind: Option<Value>,
        }
        if !line.starts_with('{') {
            return Err(UnreadLine::Foreign);
        }
        let Head { version, kind } = serde_json::from_str(line).map_err(|_| UnreadLine::Foreign)?;
        let kind = kind
            .map_or(Ok(LineKind::Create), serde_json::from_value)
            .map_err(|_| UnreadLine::Newer)?;
        if version > kind.version() {
            return Err(UnreadLine::Newer);
        }
        let known = match kind {
            LineKind::Create => serde_json::from_str(line).map(Self::Create),
            LineKind::NriCreate => serde_json::from_str(line).map(Self::NriCreate),
            LineKind::Rebind => serde_json::from_str(line).map(Self::Rebind),
            LineKind::Refresh => serde_json::from_str(line).map(Self::Refresh),
            LineKind::Release => serde_json::from_str(line).map(Self::Release),
        };
        known.map_err(|_| UnreadLine::Newer)
    }

    /// The time at which the line was written: RFC 3339, UTC.
    pub fn time(&self) -> Option<&str> {
        match self {
            Self::Create(line) | Self::NriCreate(line) => line.time.as_deref(),
            Self::Rebind(line) => line.time.as_deref(),
            Self::Refresh(line) => line.time.as_deref(),
            Self::Release(line) => line.time.as_deref(),
        }
    }

    /// The container or pod of the line.
    pub fn container(&self) -> &Identity {
        match self {
            Self::Create(line) | Self::NriCreate(line) => &line.report.container,
            Self::Rebind(line) => &line.container,
            Self::Refresh(line) => &line.container,
            Self::Release(line) => &line.container,
        }
    }
}

// A line about a create: the findings and outcomes of the guard.

/// A line about a create. `R` is a reference to a [`Report`](super::Report) in a line that is
/// written.
#[derive(Debug, Clone, Serialize, Deserialize)]
// Works beside `flatten`, although serde's documentation excludes it: a test relies on it.
#[serde(deny_unknown_fields)]
pub struct CreateLine<R = RecordedReport> {
    version: u32,
    /// Absent in a line of version 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<LineKind>,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    /// The version of bindguard that wrote the line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bindguard: Option<String>,
    /// The container's id, as the runtime gets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Which create of the container this was, counted from 0.
    pub attempt: u32,
    /// The container's init, in a line about a container that was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Why policy refused the create, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Why no guard checked the create; absent if a guard did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unchecked: Option<Unchecked>,
    #[serde(flatten)]
    pub report: R,
    /// The number of binds that are not in the line, because it would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_binds: Option<usize>,
}

/// Why no guard checked a create.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    EnumString,
    IntoStaticStr,
    VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Unchecked {
    /// The guard did not answer in time, and the shim killed it.
    Late,
    /// The guard ended without an answer.
    Died,
    /// The shim found no guard.
    Missing,
}

impl Unchecked {
    pub const ALL: &[Self] = Self::VARIANTS;
}

impl<R> CreateLine<R> {
    /// A line of the shim or the wrapper about the first create of a container.
    pub fn new(report: R) -> Self {
        Self {
            version: LineKind::Create.version(),
            kind: None,
            time: None,
            bindguard: Some(env!("CARGO_PKG_VERSION").to_owned()),
            id: None,
            attempt: 0,
            pid: None,
            refused: None,
            unchecked: None,
            report,
            omitted_binds: None,
        }
    }

    /// A line of the NRI plugin. The shim may write a second line about the same create.
    pub fn of_nri_plugin(report: R) -> Self {
        let kind = LineKind::NriCreate;
        Self {
            version: kind.version(),
            kind: Some(kind),
            ..Self::new(report)
        }
    }
}

// A line about the subpaths of a volume that were re-bound on the host, between creates.

#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actor {
    #[strum(to_string = "the agent")]
    Agent,
    /// A command of an operator.
    #[strum(to_string = "an operator")]
    Operator,
    /// The guard, at the end of a pod's sandbox.
    #[strum(to_string = "the guard")]
    Guard,
}

/// A line about a volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RebindLine {
    version: u32,
    kind: LineKind,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    pub by: Actor,
    /// The pod; its names are known only if the writer read them.
    pub container: Identity,
    /// The volume's name in the pod's spec.
    pub volume: String,
    /// The subpaths that are not healthy, or were not.
    pub binds: Vec<BindRecord>,
    /// Errors of the check itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The number of subpaths that are not in the line, because it would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_binds: Option<usize>,
    /// Total time, in microseconds.
    pub duration_us: u64,
}

impl RebindLine {
    /// A line with the findings of a report on a volume. Healthy subpaths are left out.
    pub fn new(by: Actor, pod_uid: &str, volume: &str, report: &Report) -> Self {
        let kind = LineKind::Rebind;
        let mut binds: Vec<_> = report.binds.iter().map(BindRecord::from).collect();
        binds.retain(BindRecord::is_finding);
        Self {
            version: kind.version(),
            kind,
            time: None,
            by,
            container: Identity {
                container: None,
                pod: PodName::of_uid(pod_uid),
            },
            volume: volume.to_owned(),
            binds,
            problems: report.problems.clone(),
            omitted_binds: None,
            duration_us: report.duration_us,
        }
    }

    /// The line's volume as `UID/VOLUME`.
    pub fn about(&self) -> String {
        let uid = self.container.pod.uid.as_deref().unwrap_or_default();
        format!("{uid}/{}", self.volume)
    }
}

// A line about the refresh of a running container.

/// A line about a running container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RefreshLine {
    version: u32,
    kind: LineKind,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    pub by: Actor,
    pub id: String,
    /// The container, by its names.
    #[serde(default, skip_serializing_if = "Identity::is_empty")]
    pub container: Identity,
    /// The mounts that were stale.
    pub mounts: Vec<RefreshedMount>,
    /// The notification, if the pod requested a notification and a mount was replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notification: Option<Notification>,
    /// Errors that kept the whole container from its refresh.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The number of mounts that are not in the line, because it would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_mounts: Option<usize>,
    /// Total time, in microseconds.
    pub duration_us: u64,
}

impl RefreshLine {
    /// A line about a container whose mounts are all current.
    pub fn new(by: Actor, id: &str, container: Identity) -> Self {
        let kind = LineKind::Refresh;
        Self {
            version: kind.version(),
            kind,
            time: None,
            by,
            id: id.to_owned(),
            container,
            mounts: Vec::new(),
            notification: None,
            problems: Vec::new(),
            omitted_mounts: None,
            duration_us: 0,
        }
    }

    /// Sets the total time.
    pub fn set_duration(&mut self, elapsed: Duration) {
        self.duration_us = microseconds(elapsed);
    }

    /// True if a mount is still stale, or something failed.
    pub fn has_unrepaired(&self) -> bool {
        self.mounts.iter().any(|mount| !mount.outcome.is_replaced())
            || !self.problems.is_empty()
            || matches!(&self.notification, Some(told) if told.error.is_some())
    }
}

/// A stale mount of a container, and the result.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RefreshedMount {
    /// Its mount point in the container.
    pub destination: String,
    /// The current file on the host.
    pub source: String,
    /// The kind of the bind, if the bind is a host root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<KindName>,
    pub outcome: MountResult,
}

/// The result for a stale mount of a container.
#[derive(Debug, Clone, PartialEq, Eq, Hash, IntoStaticStr, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "kebab-case", deny_unknown_fields)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum MountResult {
    /// The container shows the current file.
    Replaced { method: AttachMethod },
    /// The stale mount was not replaced.
    Stale,
    /// The volume lost the key: the container keeps the old content.
    KeyGone,
    /// The container mounted something over the mount, or in its place.
    Hidden,
    /// Mounts are in the stale directory.
    Occupied,
    /// A bind of the spec that was mounted in a directory of the volume is gone.
    Missing,
    /// The volume changed faster than the mount could be replaced.
    Restless,
    /// A rule leaves the mount as it is.
    Refused(Refused),
    /// It could not be replaced.
    Failed { error: String },
}

/// The method that attached a new mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachMethod {
    /// `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer.
    Beneath,
    /// Through propagation.
    Tucked,
    /// An earlier refresh had attached the new mount; this refresh detached the stale mount.
    Finished,
}

/// The notification of an application after a refresh.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notification {
    /// The notification, as an annotation requests it.
    pub request: Notify,
    /// Why the application was not notified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl RefreshedMount {
    /// A mount of a container, and the file on the host that it is to show.
    pub fn new(destination: &Path, source: &Path, outcome: MountResult) -> Self {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        Self {
            destination: text(destination),
            source: text(source),
            kind: None,
            outcome,
        }
    }

    /// True for a bind of the host's root, which keeps old mounts, not old content.
    pub fn is_host_root(&self) -> bool {
        self.kind == Some(KindName::HostRoot)
    }

    /// Why the container does not show the current file.
    pub fn reason(&self) -> Option<Cow<'_, str>> {
        Some(match &self.outcome {
            MountResult::Replaced { .. } | MountResult::Stale => return None,
            MountResult::KeyGone => {
                let key = self.source.rsplit('/').next().unwrap_or_default();
                format!("its volume has no {key} any more").into()
            }
            MountResult::Hidden => "the container mounted over it".into(),
            MountResult::Occupied => "other mounts are in the directory, and would be lost".into(),
            MountResult::Missing => {
                "the kernel detached this bind when the directory around it was updated; restart the container".into()
            }
            MountResult::Restless => "its volume changed all the time".into(),
            MountResult::Refused(refused) => refused.to_string().into(),
            MountResult::Failed { error } => error.into(),
        })
    }
}

impl MountResult {
    /// Its name in JSON and in texts.
    pub fn as_str(&self) -> &'static str {
        self.into_str()
    }

    /// True if the container shows the current file.
    pub fn is_replaced(&self) -> bool {
        matches!(self, Self::Replaced { .. })
    }
}

impl From<Refused> for MountResult {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl fmt::Display for RefreshedMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason() {
            Some(reason) => write!(f, "{}: {reason}", self.destination),
            None => f.write_str(&self.destination),
        }
    }
}

// A line about the copies of unmounted mounts that a running container was to release.

/// A line about a running container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseLine {
    version: u32,
    kind: LineKind,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    pub by: Actor,
    pub id: String,
    /// The container, by its names.
    #[serde(default, skip_serializing_if = "Identity::is_empty")]
    pub container: Identity,
    pub copies: Vec<ReleasedCopy>,
    /// The number of copies that are not in the line, because it would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_copies: Option<usize>,
    /// Total time, in microseconds.
    pub duration_us: u64,
}

/// A copy of a mount that the host has unmounted, and the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleasedCopy {
    /// Its mount point in the container.
    pub mount_point: String,
    /// The type of its filesystem.
    pub fs_type: String,
    /// Its device, `major:minor`.
    pub device: String,
    pub result: ReleaseResult,
    /// Why the copy is not released.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The result for a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum ReleaseResult {
    /// The copy is unmounted, or detached.
    Released,
    /// The copy would be released: a dry run, which has no line in the journal.
    Kept,
    /// The copy is in use.
    Busy,
    /// The copy stays for another reason.
    Refused,
}

impl ReleaseLine {
    /// A line about a container that has no copy.
    pub fn new(by: Actor, id: &str, container: Identity) -> Self {
        let kind = LineKind::Release;
        Self {
            version: kind.version(),
            kind,
            time: None,
            by,
            id: id.to_owned(),
            container,
            copies: Vec::new(),
            omitted_copies: None,
            duration_us: 0,
        }
    }

    /// Sets the total time.
    pub fn set_duration(&mut self, elapsed: Duration) {
        self.duration_us = microseconds(elapsed);
    }

    /// True if the container still has a copy.
    pub fn has_unrepaired(&self) -> bool {
        let mut copies = self.copies.iter();
        copies.any(|copy| copy.result != ReleaseResult::Released)
    }
}

impl fmt::Display for ReleasedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} {})", self.mount_point, self.fs_type, self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::{Finding, NoRemedy, StaleCause, Verdict};
    use crate::places::{Places, SourceKind};
    use crate::policy::Scope;
    use crate::refresh_request::Notify;
    use crate::report::{
        Actor, AttachMethod, MountResult, Notification, Outcome, RefreshedMount, ReleaseResult,
        ReleasedCopy, Report,
    };

    fn report() -> Report {
        let source = "/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0";
        let finding = Finding {
            bind: Some(0),
            source: source.into(),
            destination: Some("/etc/app.conf".into()),
            kind: SourceKind::from_path(source.as_ref(), &Places::default(), Scope::default()),
            verdict: Verdict::Stale {
                cause: StaleCause::DeletedRoot,
                remedy: Err(NoRemedy::Unreadable("why".to_owned())),
            },
        };
        let mut report = Report::about_bundle("/b".as_ref());
        report.add(vec![finding], |_| Some(Outcome::Rebound { tries: 2 }));
        report
    }

    fn written() -> String {
        let report = report();
        let mut line = CreateLine::new(&report);
        line.id = Some("c".to_owned());
        serde_json::to_string(&line).unwrap()
    }

    fn rebind() -> String {
        serde_json::to_string(&RebindLine::new(Actor::Agent, "u", "conf", &report())).unwrap()
    }

    fn refresh() -> String {
        let mount = |outcome| RefreshedMount::new("/d".as_ref(), "/s".as_ref(), outcome);
        let mut line = RefreshLine::new(Actor::Operator, "c", Identity::default());
        line.mounts = vec![
            mount(MountResult::Replaced {
                method: AttachMethod::Beneath,
            }),
            mount(MountResult::Failed {
                error: "why".to_owned(),
            }),
        ];
        line.notification = Some(Notification {
            request: Notify::Touch,
            error: Some("no".to_owned()),
        });
        serde_json::to_string(&line).unwrap()
    }

    fn release() -> String {
        let mut line = ReleaseLine::new(Actor::Operator, "c", Identity::default());
        line.copies = vec![ReleasedCopy {
            mount_point: "/host/mnt".to_owned(),
            fs_type: "ext4".to_owned(),
            device: "8:16".to_owned(),
            result: ReleaseResult::Busy,
            error: Some("it is in use".to_owned()),
        }];
        serde_json::to_string(&line).unwrap()
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let JournalLine::Create(line) = JournalLine::parse(&written()).unwrap() else {
            panic!("another kind")
        };
        let bind = &line.report.binds[0];
        assert!(bind.is_finding() && bind.is_repaired());
        assert_eq!(bind.destination.as_deref(), Some("/etc/app.conf"));
        assert_eq!(serde_json::to_string(&line).unwrap(), written());
        let JournalLine::Rebind(line) = JournalLine::parse(&rebind()).unwrap() else {
            panic!("another kind")
        };
        assert_eq!(
            (line.binds.len(), line.container.pod.uid.as_deref()),
            (1, Some("u"))
        );
        assert_eq!(serde_json::to_string(&line).unwrap(), rebind());
        let JournalLine::Refresh(line) = JournalLine::parse(&refresh()).unwrap() else {
            panic!("another kind")
        };
        assert!(line.has_unrepaired() && line.mounts[0].outcome.is_replaced());
        assert_eq!(serde_json::to_string(&line).unwrap(), refresh());
        let JournalLine::Release(line) = JournalLine::parse(&release()).unwrap() else {
            panic!("another kind")
        };
        assert!(line.has_unrepaired());
        assert_eq!(serde_json::to_string(&line).unwrap(), release());
    }

    /// A program of version 1 passes over the lines of version 2.
    #[test]
    fn a_create_keeps_version_1_and_any_other_line_has_version_2() {
        let report = report();
        let of_plugin = serde_json::to_string(&CreateLine::of_nri_plugin(&report)).unwrap();
        assert!(
            written().starts_with(r#"{"version":1,"time""#),
            "{}",
            written()
        );
        for line in [&of_plugin, &rebind(), &refresh(), &release()] {
            assert!(line.starts_with(r#"{"version":2,"kind":""#), "{line}");
        }
        assert!(matches!(
            JournalLine::parse(&of_plugin),
            Ok(JournalLine::NriCreate(_))
        ));
    }

    #[test]
    fn a_line_of_a_newer_version_is_passed_over() {
        let newer = |line: String, from: &str, to: &str| {
            let changed = line.replace(from, to);
            assert_ne!(changed, line, "{from}");
            assert_eq!(
                JournalLine::parse(&changed).unwrap_err(),
                UnreadLine::Newer,
                "{to}"
            );
        };
        for (from, to) in [
            (r#""version":1"#, r#""version":2"#),
            (r#""attempt":0"#, r#""attempt":0,"agent":"a""#),
            (r#""verdict":"stale""#, r#""verdict":"outdated""#),
            (r#""kind":"subpath""#, r#""kind":"device""#),
            (r#""kind":"subpath""#, r#""kind":"subpath","node":"n""#),
            (r#""rebound""#, r#""replaced""#),
            (r#""tries":2"#, r#""tries":2,"pause":1"#),
        ] {
            newer(written(), from, to);
        }
        for (from, to) in [
            (r#""version":2"#, r#""version":3"#),
            (r#""kind":"rebind""#, r#""kind":"remount""#),
            (r#""kind":"rebind""#, r#""kind":7"#),
            (r#""by":"agent""#, r#""by":"kubelet""#),
            (r#""volume":"conf""#, r#""volume":"conf","more":1"#),
        ] {
            newer(rebind(), from, to);
        }
        for (from, to) in [
            (r#""method":"beneath""#, r#""method":"exchanged""#),
            (r#""request":"touch""#, r#""request":"restart""#),
            (r#""mounts""#, r#""more":1,"mounts""#),
        ] {
            newer(refresh(), from, to);
        }
        newer(release(), r#""busy""#, r#""waiting""#);
    }

    #[test]
    fn any_other_line_is_foreign() {
        for line in ["", "no", "{}", r#"{"time":null,"binds":[]}"#, "[1]"] {
            assert_eq!(
                JournalLine::parse(line).unwrap_err(),
                UnreadLine::Foreign,
                "{line}"
            );
        }
    }
}
