//! The binds that can explain a runtime's error: unrepaired binds whose mount fails.
//!
//! A runtime's error names a path below `volume-subpaths` and ENOENT. The pod's owner needs the
//! volume, the reason and the next step, in the error that reaches the pod's events.

use super::{BindReport, Outcome};
use crate::judge::{Finding, Verdict};
use crate::source::SourceKind;
use crate::text::cut;

/// The number of binds that are named: an event has room for a kibibyte.
const MAX_BINDS: usize = 3;
/// The maximum length of the text for a bind, in bytes.
const MAX_TEXT: usize = 320;

/// The reasons in a single line, with the next step; `None` when no bind explains a failure of the
/// runtime.
pub fn explain_unrepaired(binds: &[BindReport]) -> Option<String> {
    let reasons: Vec<String> = binds.iter().filter_map(explain).collect();
    let named: Vec<_> = reasons
        .iter()
        .take(MAX_BINDS)
        .map(|reason| cut(reason, MAX_TEXT))
        .collect();
    let more = match reasons.len().saturating_sub(MAX_BINDS) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    (!named.is_empty()).then(|| format!("{}{more}", named.join("; ")))
}

fn explain(BindReport { finding, outcome }: &BindReport) -> Option<String> {
    let failed = match outcome {
        None | Some(Outcome::Planned { .. }) => String::new(),
        Some(failed @ Outcome::Failed { .. }) => format!("; {failed}"),
        Some(_) => return None,
    };
    let next = match &finding.verdict {
        // The reason contains the next step, which is the same for every reader.
        Verdict::Orphaned { remake: None, .. } => "",
        Verdict::Orphaned {
            remake: Some(_), ..
        }
        | Verdict::Stale { .. } => "; run on its node: bindguard diagnose",
        Verdict::Dead(_) => "; mount it anew on the node",
        // A mount of these succeeds, or its result is unknown.
        Verdict::Current | Verdict::Unmounted(_) | Verdict::Pinning(_) | Verdict::Wrong(_) => {
            return None;
        }
        Verdict::Foreign | Verdict::NotProbed | Verdict::Unknown(_) => return None,
    };
    let reason = finding.verdict.reason()?;
    Some(format!(
        "{} is {}: {reason}{failed}{next}",
        place(finding),
        finding.verdict.name()
    ))
}

/// The bind in the pod owner's terms: the runtime's error contains the source's path.
fn place(finding: &Finding) -> String {
    let path = finding
        .destination
        .as_deref()
        .unwrap_or(&finding.source)
        .display();
    match &finding.kind {
        SourceKind::Subpath(subpath) => {
            format!("the subPath of volume {} at {path}", subpath.volume())
        }
        SourceKind::MountedVolume(_) | SourceKind::PlainVolume => format!("the volume at {path}"),
        SourceKind::InVolume | SourceKind::HostRoot | SourceKind::Foreign => {
            format!("the mount at {path}")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::judge::{Lack, NoRemedy, StaleCause, Unmounted};
    use crate::places::Places;
    use crate::policy::Scope;

    fn finding(verdict: Verdict) -> Finding {
        let source = Path::new("/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0");
        Finding {
            bind: Some(0),
            source: source.to_owned(),
            destination: Some("/etc/app.conf".into()),
            kind: SourceKind::from_path(source, &Places::default(), Scope::default()),
            verdict,
        }
    }

    fn explained(findings: &[Finding], outcome: Option<Outcome>) -> Option<String> {
        let bind = |finding: &Finding| BindReport {
            finding: finding.clone(),
            outcome: outcome.clone(),
        };
        explain_unrepaired(&findings.iter().map(bind).collect::<Vec<_>>())
    }

    fn without_its_key() -> Finding {
        let lacks = Lack::Key("app.conf".into());
        finding(Verdict::Orphaned {
            cause: StaleCause::DeletedRoot,
            lacks,
            remake: None,
        })
    }

    #[test]
    fn a_key_that_is_gone_is_named_with_the_next_step() {
        assert_eq!(
            explained(&[finding(Verdict::Current), without_its_key()], None).unwrap(),
            "the subPath of volume conf at /etc/app.conf is orphaned: the file it was bound from is deleted, and app.conf is \
             no longer in its volume: put it back, or remove the subPath from the pod"
        );
    }

    #[test]
    fn a_repaired_or_mountable_bind_has_no_explanation() {
        let stale = || {
            finding(Verdict::Stale {
                cause: StaleCause::DeletedRoot,
                remedy: Err(NoRemedy::Unreadable("why".to_owned())),
            })
        };
        let repaired = Outcome::Rebound { tries: 1 };
        assert_eq!(explained(&[stale()], Some(repaired)), None);
        assert_eq!(
            explained(&[finding(Verdict::Unmounted(Unmounted::Subpath))], None),
            None
        );
        let failed = Outcome::Failed {
            error: "no such kernel".to_owned(),
        };
        let text = explained(&[stale()], Some(failed)).unwrap();
        assert!(
            text.contains(
                "why; could not be repaired: no such kernel; run on its node: bindguard diagnose"
            ),
            "{text}"
        );
    }

    #[test]
    fn an_event_has_room_for_it() {
        let lacks = Lack::Key("k".repeat(5000).into());
        let long = finding(Verdict::Orphaned {
            cause: StaleCause::DeletedRoot,
            lacks,
            remake: None,
        });
        let text = explained(&vec![long; 9], None).unwrap();
        assert!(
            text.len() < 1024 && text.ends_with("; and 6 more"),
            "{} bytes",
            text.len()
        );
    }
}
