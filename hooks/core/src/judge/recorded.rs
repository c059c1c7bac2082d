//! Judging a node that is not here: a mount table and a copy of its files, out of a support bundle.
//!
//! A copy has other inodes than the node had, and no secrets as a rule. So files are told apart by their names alone, and
//! where the volume is missing from the copy, a deleted root is still certain: nothing can be bound from it.

use crate::evidence::{FileIdentity, FileKind, Observed, SubpathEvidence};
use crate::kubelet::VolumeSubpath;

use super::subpath::judge_subpath;
use super::verdict::{StaleCause, Verdict};

/// The one identity of every file of that kind in a copy: what has the same names counts as the same file.
pub fn recorded_identity(kind: FileKind) -> FileIdentity {
    FileIdentity { device: 0, inode: 0, kind }
}

/// Judges one subpath from what was recorded of it.
pub fn judge_recorded(subpath: &VolumeSubpath, evidence: &SubpathEvidence) -> Verdict {
    let mount = match &evidence.mount {
        Observed::Seen(mount) if mount.root.deleted => mount,
        Observed::Seen(_) | Observed::Absent | Observed::Unreadable(_) => return judge_subpath(subpath, evidence),
    };
    match (&evidence.volume, &evidence.target) {
        (Observed::Unreadable(why), _) | (_, Observed::Unreadable(why)) if mount.fs_type.is_local() => {
            Verdict::Stale { cause: StaleCause::DeletedRoot, remedy: Err(why.clone()) }
        }
        _ => judge_subpath(subpath, evidence),
    }
}
