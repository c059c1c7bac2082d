//! The policy that a node's operator chooses.

use serde::{Deserialize, Serialize};
use strum::{Display, EnumIter, IntoStaticStr};

use crate::mount_table::MountAttributes;
use crate::spec::Bind;

/// The action for a kind of finding.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Display,
    EnumIter,
    IntoStaticStr,
    Serialize,
    Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Mode {
    /// Check, repair and report.
    #[default]
    Repair,
    /// Check and report, without changes.
    Report,
    /// Do not check.
    Off,
}

impl Mode {
    /// The mode if the operator may have meant less than a repair.
    #[must_use]
    pub fn without_repair(self) -> Self {
        match self {
            Self::Repair | Self::Report => Self::Report,
            Self::Off => Self::Off,
        }
    }
}

/// The action for a source that cannot be repaired.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Alarm {
    /// Report the source; the runtime decides.
    #[default]
    Report,
    /// Refuse the container, with the reason.
    Refuse,
    /// Do not check.
    Off,
}

/// The action for a directory that is missing from a container's own volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Vanished {
    /// Leave the directory missing: the runtime fails on it.
    #[default]
    Leave,
    /// Create the directory again, empty, as the kubelet does when it starts the container for the
    /// first time.
    Remake,
}

/// The action for mounts of the host below a pod's emptyDirs, whose files the kubelet would remove.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum BelowEmptyDirs {
    /// Report them.
    #[default]
    Report,
    /// Detach them at the end of the pod's sandbox, too.
    Detach,
    /// Nothing.
    Off,
}

/// The action if a repair is impossible or fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum FailedRepair {
    /// Report the failure; the runtime gets the unchanged bind.
    #[default]
    Pass,
    /// Refuse the container, with the reason.
    Refuse,
}

/// The binds that are checked, because they may keep the host's mounts alive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Scope {
    /// Only binds of `/`.
    HostRoot,
    /// Binds of `/`, of directories in which the kubelet or a runtime mounts things, and of their
    /// ancestors.
    #[strum(serialize = "runtime-dirs")]
    #[default]
    RuntimeDirectories,
    /// Every recursive bind of a directory that contains a mount. This requires reading the mount
    /// table.
    AnySubmounts,
}

/// The action for host-root binds that are read-only (`ro`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ReadOnlyBinds {
    /// Make read-only binds rslave, like writable binds. The container can then write to mounts
    /// that the host makes after its start.
    #[strum(serialize = "rslave")]
    #[default]
    MakeRslave,
    /// Leave read-only binds unchanged, and report them.
    Keep,
}

/// The reason for which a bind that pins host mounts is left unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// The bind is recursively read-only (`rro`): a mount that arrives later would be writable in
    /// the container.
    RecursivelyReadOnly,
    /// The bind is read-only, and policy keeps read-only binds, because later mounts would be
    /// writable.
    ReadOnly,
}

/// Choices that a pod's annotations may change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PodsMay {
    /// `bindguard.io/mode`
    pub set_mode: bool,
    /// `bindguard.io/propagation`
    pub set_propagation: bool,
}

/// The operator's choices, as far as decisions depend on them. [`Places`](crate::places::Places)
/// has the node's directories.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// Stale volume-subpaths.
    pub stale_subpaths: Mode,
    /// Binds that keep the host's mounts alive.
    pub host_root: Mode,
    /// The binds that [`Policy::host_root`] applies to.
    pub host_root_scope: Scope,
    /// Host-root binds that are read-only.
    pub read_only_binds: ReadOnlyBinds,
    /// Directories that are missing from container-written volumes.
    pub vanished_directories: Vanished,
    pub failed_repairs: FailedRepair,
    /// Volumes whose required mount is missing.
    pub unmounted_volumes: Alarm,
    /// Sources whose server or daemon does not answer.
    pub dead_sources: Alarm,
    /// Mounts of a new container that differ from its spec.
    pub proof: Alarm,
    /// Mounts below a pod's emptyDirs.
    pub below_emptydirs: BelowEmptyDirs,
    /// The annotations that pods may use.
    pub pods_may: PodsMay,
    /// True if the runtime is crun, which makes a bind recursive for every propagation word with an
    /// r: `["bind", "rprivate"]` includes the mounts below the source.
    pub words_recurse: bool,
}

impl Policy {
    /// True if the bind includes the mounts below its source.
    pub fn is_recursive(&self, bind: &Bind<'_>) -> bool {
        bind.is_recursive || self.words_recurse && bind.has_recursive_word
    }

    /// The reason for which a host-root bind stays unchanged, by the permissions that the spec denies
    /// on the bind and on the mounts below. An `rro` bind always stays: Kubernetes requires
    /// propagation None for `rro`.
    pub fn keeps(&self, denied: MountAttributes, below: MountAttributes) -> Option<Kept> {
        if below.is_read_only() {
            return Some(Kept::RecursivelyReadOnly);
        }
        let is_kept = denied.is_read_only() && self.read_only_binds == ReadOnlyBinds::Keep;
        is_kept.then_some(Kept::ReadOnly)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test says what it expects")]
mod tests {
    use std::ffi::OsStr;

    use super::*;
    use crate::spec::SpecView;

    #[test]
    fn a_read_only_bind_is_kept_where_the_policy_keeps_it_and_rro_always() {
        let attributes = |options: &str| MountAttributes::from_options(OsStr::new(options));
        let (writable, read_only) = (attributes("rw,relatime"), attributes("ro,relatime"));
        let keeping = Policy {
            read_only_binds: ReadOnlyBinds::Keep,
            ..Policy::default()
        };
        let rro = Some(Kept::RecursivelyReadOnly);
        for (policy, denied, below, expected) in [
            (Policy::default(), writable, writable, None),
            (Policy::default(), read_only, writable, None),
            (Policy::default(), read_only, read_only, rro),
            (keeping, writable, writable, None),
            (keeping, read_only, writable, Some(Kept::ReadOnly)),
            (keeping, read_only, read_only, rro),
        ] {
            assert_eq!(policy.keeps(denied, below), expected, "{policy:?}");
        }
    }

    #[test]
    fn only_crun_makes_a_bind_recursive_by_its_propagation() {
        let crun = Policy {
            words_recurse: true,
            ..Policy::default()
        };
        for (options, of_runc, of_crun) in [
            (r#"["bind"]"#, false, false),
            (r#"["bind","private"]"#, false, false),
            (r#"["bind","rprivate"]"#, false, true),
            (r#"["rbind","private"]"#, true, true),
        ] {
            let spec = format!(
                r#"{{"mounts":[{{"destination":"/a","type":"bind","source":"/b","options":{options}}}]}}"#
            );
            let spec = SpecView::from_bytes(spec.as_bytes()).unwrap();
            let bind = &spec.binds()[0];
            let found = [Policy::default(), crun].map(|policy| policy.is_recursive(bind));
            assert_eq!(found, [of_runc, of_crun], "{options}");
        }
    }

    #[test]
    fn a_mode_is_named_as_in_the_config() {
        let names = [Mode::Repair, Mode::Report, Mode::Off].map(|mode| mode.to_string());
        assert_eq!(names, ["repair", "report", "off"]);
    }
}
