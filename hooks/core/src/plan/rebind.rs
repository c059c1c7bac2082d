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
