//! The policy that a node's operator chooses, and the annotations by which a pod changes its own
//! policy, if the node's config allows it.
//!
//! | annotation | value | effect on this pod's containers |
//! |---|---|---|
//! | `bindguard.io/mode` | `repair`, `report`, `off` | the node's choice for stale subpaths and host-root binds; `report` and `off` refuse nothing |
//! | `bindguard.io/propagation` | `rslave`, `keep`, `keep-read-only` | host-root binds: `rslave` makes all rslave, `keep` leaves all unchanged, `keep-read-only` leaves the read-only binds unchanged; unchanged binds are reported |
//!
//! An unknown value repairs nothing of what its annotation sets: the person may have meant `report`.
//!
//! The runtime passes annotations on only if it is configured to: containerd's `pod_annotations =
//! ["bindguard.io/*"]`.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use strum::{Display, EnumIter, EnumString, IntoStaticStr};

use crate::mount_table::MountAttributes;
use crate::spec::Bind;
use crate::text::cut;

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
    EnumString,
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

/// Names the mode in a pod's annotations.
pub const MODE: &str = "bindguard.io/mode";
/// Names the propagation in a pod's annotations.
pub const PROPAGATION: &str = "bindguard.io/propagation";

/// The quoted length of an invalid value: a pod may have written a quarter of a mebibyte.
const QUOTED: usize = 64;

/// The policy for a pod: the node's policy, with the changes of the pod's annotations. The second
/// part names the invalid annotations, and the forbidden annotations, which change nothing.
pub fn policy_of_pod<'a, 'p>(
    node: &'p Policy,
    annotation: impl Fn(&str) -> Option<&'a str>,
) -> (Cow<'p, Policy>, Vec<String>) {
    let (mut policy, mut problems) = (Cow::Borrowed(node), Vec::new());
    let mut follow = |name: &str, allowed: bool, change: fn(&mut Policy, &str) -> bool| {
        let Some(value) = annotation(name) else {
            return;
        };
        if !allowed {
            problems.push(format!(
                "annotation {name} is not followed: the node's config does not allow it"
            ));
        } else if !change(policy.to_mut(), value) {
            let value = cut(value, QUOTED);
            problems.push(format!(
                "annotation {name} is not followed, and repairs nothing: {value:?} is not one of its values"
            ));
        }
    };
    follow(MODE, node.pods_may.set_mode, set_mode);
    follow(PROPAGATION, node.pods_may.set_propagation, set_propagation);
    (policy, problems)
}

fn set_mode(policy: &mut Policy, value: &str) -> bool {
    let Ok(mode) = value.parse() else {
        policy.stale_subpaths = policy.stale_subpaths.without_repair();
        policy.host_root = policy.host_root.without_repair();
        return false;
    };
    (policy.stale_subpaths, policy.host_root) = (mode, mode);
    if mode != Mode::Repair {
        for alarm in [
            &mut policy.unmounted_volumes,
            &mut policy.dead_sources,
            &mut policy.proof,
        ] {
            if mode == Mode::Off {
                *alarm = Alarm::Off;
            } else if *alarm == Alarm::Refuse {
                *alarm = Alarm::Report;
            }
        }
        policy.failed_repairs = FailedRepair::Pass;
    }
    true
}

fn set_propagation(policy: &mut Policy, value: &str) -> bool {
    (policy.host_root, policy.read_only_binds) = match value {
        "rslave" => (Mode::Repair, ReadOnlyBinds::MakeRslave),
        "keep-read-only" => (Mode::Repair, ReadOnlyBinds::Keep),
        "keep" => (policy.host_root.without_repair(), policy.read_only_binds),
        _ => {
            policy.host_root = policy.host_root.without_repair();
            return false;
        }
    };
    true
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

#[cfg(test)]
mod annotations_tests {
    use super::*;
    use crate::policy::PodsMay;

    fn policy_with(node: &Policy, name: &str, value: &str) -> (Policy, Vec<String>) {
        let (policy, problems) =
            policy_of_pod(node, |annotation| (annotation == name).then_some(value));
        (policy.into_owned(), problems)
    }

    #[test]
    fn a_pods_annotation_is_followed_only_where_the_node_allows_it() {
        let strict = Policy {
            unmounted_volumes: Alarm::Refuse,
            ..Policy::default()
        };
        let (policy, problems) = policy_with(&strict, MODE, "off");
        assert_eq!((policy, problems.len()), (strict, 1));

        let open = Policy {
            pods_may: PodsMay {
                set_mode: true,
                set_propagation: true,
            },
            ..strict
        };
        let (policy, problems) = policy_with(&open, MODE, "report");
        assert_eq!(
            (policy.stale_subpaths, policy.host_root),
            (Mode::Report, Mode::Report)
        );
        assert_eq!(
            (policy.unmounted_volumes, problems.len()),
            (Alarm::Report, 0)
        );
        let (policy, _) = policy_with(&open, PROPAGATION, "keep");
        assert_eq!(
            (policy.stale_subpaths, policy.host_root),
            (Mode::Repair, Mode::Report)
        );
        let (policy, _) = policy_with(&open, PROPAGATION, "keep-read-only");
        assert_eq!(
            (policy.host_root, policy.read_only_binds),
            (Mode::Repair, ReadOnlyBinds::Keep)
        );
        let keeping = Policy {
            read_only_binds: ReadOnlyBinds::Keep,
            ..open
        };
        assert_eq!(
            policy_with(&keeping, PROPAGATION, "rslave")
                .0
                .read_only_binds,
            ReadOnlyBinds::MakeRslave
        );
    }

    /// A person may have meant "report" or "off".
    #[test]
    fn an_invalid_value_repairs_nothing_and_is_reported() {
        let open = Policy {
            unmounted_volumes: Alarm::Refuse,
            pods_may: PodsMay {
                set_mode: true,
                set_propagation: true,
            },
            ..Policy::default()
        };
        let no_host_root = Policy {
            host_root: Mode::Report,
            ..open
        };
        let no_repair = Policy {
            stale_subpaths: Mode::Report,
            ..no_host_root
        };
        for (name, value, expected) in [
            (MODE, "Report", no_repair),
            (MODE, "Repair\n", no_repair),
            (MODE, "", no_repair),
            (PROPAGATION, "rshared", no_host_root),
        ] {
            let (policy, problems) = policy_with(&open, name, value);
            assert_eq!(policy, expected, "{name} {value}");
            assert!(
                problems[0].contains(name) && problems[0].contains(&format!("{value:?}")),
                "{problems:?}"
            );
        }
        let off = Policy {
            stale_subpaths: Mode::Off,
            host_root: Mode::Off,
            ..open
        };
        assert_eq!(policy_with(&off, MODE, "Off").0, off);
        let (_, problems) = policy_with(&open, MODE, &"x".repeat(100_000));
        assert!(problems[0].len() < 200, "{} bytes", problems[0].len());
    }
}
