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

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{CreateLine, RebindLine, RefreshLine, ReleaseLine};
use crate::identity::Identity;

/// A line that was read.
#[derive(Debug, Clone)]
pub enum JournalLine {
    /// A create.
    Create(CreateLine),
    /// A create, as the NRI plugin saw it.
    NriCreate(CreateLine),
    /// The subpaths of a volume, between creates.
    Rebind(RebindLine),
    /// A running container.
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum LineKind {
    #[default]
    Create,
    NriCreate,
    Rebind,
    Refresh,
    Release,
}

impl LineKind {
    /// The version that this program writes for the kind. Each new key or value of the kind needs
    /// the next number.
    pub(super) fn version(self) -> u32 {
        match self {
            Self::Create => 1,
            Self::NriCreate | Self::Rebind | Self::Refresh | Self::Release => 2,
        }
    }

    #[allow(
        clippy::trivially_copy_pass_by_ref,
        reason = "serde passes a reference"
    )]
    pub(super) fn is_create(&self) -> bool {
        *self == Self::Create
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
            LineKind::Create => create(line).map(Self::Create),
            LineKind::NriCreate => create(line).map(Self::NriCreate),
            LineKind::Rebind => serde_json::from_str(line).ok().map(Self::Rebind),
            LineKind::Refresh => serde_json::from_str(line).ok().map(Self::Refresh),
            LineKind::Release => serde_json::from_str(line).ok().map(Self::Release),
        };
        known.ok_or(UnreadLine::Newer)
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

fn create(line: &str) -> Option<CreateLine> {
    serde_json::from_str(line)
        .ok()
        .filter(|line: &CreateLine| !line.has_unknown_keys())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::{Finding, NoRemedy, StaleCause, Verdict};
    use crate::places::Places;
    use crate::policy::Scope;
    use crate::refresh_request::Notify;
    use crate::report::{
        Actor, AttachMethod, MountResult, Notification, Outcome, RefreshedMount, ReleaseResult,
        ReleasedCopy, Report,
    };
    use crate::source::SourceKind;

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
