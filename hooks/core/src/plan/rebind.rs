//! The repair of a stale subpath.

use std::path::PathBuf;

use crate::judge::{Finding, PathInVolume, Remedy, RepairMethod, Verdict};
use crate::kubelet::{DATA_LINK, VolumeSubpath, Writer};
use crate::policy::{Policy, Vanished};
use crate::source::SourceKind;
use crate::spec::SpecEdit;

/// The order to bind a subpath's current target in place of a stale target.
///
/// Only a finding with a remedy yields a re-bind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebind {
    bind: Option<usize>,
    subpath: VolumeSubpath,
    remedy: Remedy,
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

    /// The bind's position in the spec's `mounts`.
    pub fn bind(&self) -> Option<usize> {
        self.bind
    }

    /// The subpath to re-bind.
    pub fn subpath(&self) -> &VolumeSubpath {
        &self.subpath
    }

    /// The volume's directory.
    pub fn volume(&self) -> &PathBuf {
        &self.remedy.volume
    }

    /// The path within the volume.
    pub fn sub_path(&self) -> &PathInVolume {
        &self.remedy.sub_path
    }

    /// The writer of the volume.
    pub fn writer(&self) -> Writer {
        self.remedy.writer
    }

    /// The permitted repair.
    pub fn method(&self) -> RepairMethod {
        self.remedy.method
    }

    /// The edit that points the spec's source at the volume's own path, used when binding is
    /// impossible.
    ///
    /// `None` for volumes that containers write: a container may redirect a path there before the
    /// runtime resolves it. A kubelet-written volume's own names are links through `..data`: the
    /// runtime resolves them to the payload of that moment.
    pub fn spec_edit(&self) -> Option<SpecEdit> {
        let sub_path = &self.remedy.sub_path.path;
        let to = match self.remedy.writer {
            // A pod may mount the payload directory itself.
            Writer::Kubelet if sub_path.as_os_str().is_empty() => {
                self.remedy.volume.join(DATA_LINK)
            }
            Writer::Kubelet => self.remedy.volume.join(sub_path),
            Writer::Containers => return None,
        };
        self.bind.map(|bind| SpecEdit::Source { bind, to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::judge::{Lack, StaleCause};
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
        assert_eq!(remade.bind(), Some(3));
        assert_eq!(remade.volume(), Path::new("/volume"));
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
