//! The rules by which a refresh leaves a stale mount as it is. A refused mount is refused again until
//! the node, the pod or the policy changes; a failed step may succeed at the next refresh.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Why a refresh leaves a stale mount as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The reason.
    pub reason: RefusedReason,
    /// The symlink, folder, file or mount that the rule is about: on the host, or a mount point in
    /// the container.
    pub path: PathBuf,
    /// Details that the reason lacks.
    pub error: Option<String>,
}

/// The rules of a refresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusedReason {
    /// The symlink does not belong to root.
    LinkOfUser,
    /// A user other than root may write the folder of the symlink.
    LinkInWritableFolder,
    /// A container may write the folder of the symlink.
    LinkBelowWritableBind,
    /// The folder is not the folder of the container's start, and users besides root may have put
    /// the folder there.
    OtherFolderOfUser,
    /// The folder is not the folder of the container's start, and a container may have put the folder
    /// there.
    OtherFolderBelowWritableBind,
    /// Another file is mounted on the name.
    MountPoint,
    /// The file's type differs from the old file's, for example a socket.
    OtherType,
    /// The mounts of a running container could not be read: the container may be able to write the
    /// folder.
    MountsUnknown,
    /// SELinux denies the container to read the file.
    SelinuxDenies,
    /// A container of the pod has a writable mount of the CSI volume, and may have made `..data`.
    WritableVolume,
    /// Attaching the new mount would reach the host and other containers.
    ParentIsShared,
    /// The container's mount is a peer of a mount of the host.
    MountIsShared,
    /// On this kernel a mount that propagates beneath a locked mount takes its lock.
    KernelFault,
    /// The kernel locked the old mount when the new one arrived beneath.
    Locked,
    /// The mount is idmapped, and its ids are not known to be the container's own.
    OtherIds,
    /// The volume, or a bind in the volume, is unbindable.
    Unbindable,
    /// The source of a nested bind is no longer the file that the container has.
    NestedSource,
    /// A mount in the bind would be lost.
    NestedMount,
    /// The volume contains more binds than a refresh can attach.
    ManyNestedBinds,
    /// The spec itself mounts or masks a path in the bind.
    SpecMountsBelow,
    /// The host has several mounts at a place where the container's mount is more restricted.
    StackedMounts,
    /// The spec was not understood, and may make mounts below the bind.
    SpecUnknown,
    /// Mounts that arrive later would be writable.
    RecursivelyReadOnly,
    /// Policy keeps read-only binds private: mounts that arrive later would be writable.
    ReadOnlyKept,
    /// Policy, or an annotation of the pod, permits no change.
    OnlyReported,
    /// The new mount would receive no umount either.
    PrivateOnHost,
    /// The host's present mount does not answer.
    SourceIsDead,
    /// The source is no mount point any more, or cannot be opened.
    NoSource,
}

impl RefusedReason {
    /// All of them, for tests of documents.
    pub const ALL: [Self; 28] = [
        Self::LinkOfUser,
        Self::LinkInWritableFolder,
        Self::LinkBelowWritableBind,
        Self::OtherFolderOfUser,
        Self::OtherFolderBelowWritableBind,
        Self::MountPoint,
        Self::OtherType,
        Self::MountsUnknown,
        Self::SelinuxDenies,
        Self::WritableVolume,
        Self::ParentIsShared,
        Self::MountIsShared,
        Self::KernelFault,
        Self::Locked,
        Self::OtherIds,
        Self::Unbindable,
        Self::NestedSource,
        Self::NestedMount,
        Self::ManyNestedBinds,
        Self::SpecMountsBelow,
        Self::StackedMounts,
        Self::SpecUnknown,
        Self::RecursivelyReadOnly,
        Self::ReadOnlyKept,
        Self::OnlyReported,
        Self::PrivateOnHost,
        Self::SourceIsDead,
        Self::NoSource,
    ];

    /// The refusal for people.
    pub fn describe(self, path: &str, error: Option<&str>) -> String {
        let error = error.map(|error| format!(": {error}")).unwrap_or_default();
        format!("{path} {}{error}", self.words())
    }

    /// The reason in words, after the path.
    fn words(self) -> &'static str {
        match self {
            Self::LinkOfUser => "is a symlink that does not belong to root",
            Self::LinkInWritableFolder => {
                "is a symlink in a folder that others than root may write"
            }
            Self::LinkBelowWritableBind => "is a symlink in a folder that a container may write",
            Self::OtherFolderOfUser => {
                "is another folder than at the container's start, and others than root may have put it there"
            }
            Self::OtherFolderBelowWritableBind => {
                "is another folder than at the container's start, and a container may have put it there"
            }
            Self::MountPoint => "is a mount point",
            Self::OtherType => "has another type than the old file",
            Self::MountsUnknown => "may be writable for a container whose mounts could not be read",
            Self::SelinuxDenies => "has an SELinux label that the container may not read",
            Self::WritableVolume => {
                "is a CSI volume that a container of the pod may write; mount it read-only in all containers"
            }
            Self::ParentIsShared => {
                "is on a mount that is shared with the host: a new mount would reach the host"
            }
            Self::MountIsShared => "is shared with the host: detaching it would reach the host",
            Self::KernelFault => {
                "is in a container with a user namespace of its own, which could remove locked mounts after a refresh on Linux 7.1 to 7.2.10 (CVE-2026-98976)"
            }
            Self::Locked => {
                "was locked by the kernel when the new mount arrived beneath it; restart the pod, and update the kernel (fixed in 6.1.143 and 6.12.36)"
            }
            Self::OtherIds => {
                "is idmapped with other ids than the container's, or with unknown ids"
            }
            Self::Unbindable => "is unbindable: the new mounts cannot be copied with it",
            Self::NestedSource => "is a nested bind whose source was replaced, or is not local",
            Self::NestedMount => {
                "is a nested mount that may not be a copy of a mount of the host, and would be lost"
            }
            Self::ManyNestedBinds => "has more binds in it than one refresh can attach",
            Self::SpecMountsBelow => "is mounted or masked below the bind by the spec",
            Self::StackedMounts => "has several mounts below the bind",
            Self::SpecUnknown => "may have mounts of the spec, which was not understood",
            Self::RecursivelyReadOnly => {
                "is bound recursively read-only (rro), which requires a private mount"
            }
            Self::ReadOnlyKept => "is bound read-only, and policy keeps read-only binds private",
            Self::OnlyReported => "is a host-root bind, which policy only reports",
            Self::PrivateOnHost => {
                "is private on the host, so rslave has no effect; run mount --make-rshared on it"
            }
            Self::SourceIsDead => "is mounted on the host, but does not answer",
            Self::NoSource => "is not mounted on the host, or cannot be opened",
        }
    }
}

impl Refused {
    /// A refusal without details.
    pub fn new(reason: RefusedReason, path: impl Into<PathBuf>) -> Self {
        Self {
            reason,
            path: path.into(),
            error: None,
        }
    }

    /// The same, with details.
    #[must_use]
    pub fn with_error(self, error: String) -> Self {
        Self {
            error: Some(error),
            ..self
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.to_string_lossy();
        f.write_str(&self.reason.describe(&path, self.error.as_deref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_path_the_reason_and_the_error() {
        let refused = Refused::new(RefusedReason::LinkOfUser, "/etc/x");
        let text = "/etc/x is a symlink that does not belong to root";
        assert_eq!(refused.to_string(), text);
        let refused = refused.with_error("EIO".to_owned());
        assert_eq!(refused.to_string(), format!("{text}: EIO"));
    }
}
