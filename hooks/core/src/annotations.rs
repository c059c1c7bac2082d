//! The annotations by which a pod changes its own policy, if the node's config allows it.
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

use crate::policy::{Alarm, FailedRepair, Mode, Policy, ReadOnlyBinds};
use crate::text::cut;

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
    let mode = match value {
        "repair" => Mode::Repair,
        "report" => Mode::Report,
        "off" => Mode::Off,
        _ => {
            policy.stale_subpaths = policy.stale_subpaths.without_repair();
            policy.host_root = policy.host_root.without_repair();
            return false;
        }
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
mod tests {
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
