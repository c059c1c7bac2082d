//! Which findings refuse a container, and by which key of the policy: no other key does.

use std::path::Path;

use bindguard_core::judge::{
    Finding, NoRemedy, StaleCause, Unmounted, Verdict, refusal_of, refusal_of_failed,
    refusal_of_uncompared, refusal_of_unseen, refusal_of_wrong,
};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::mount_table::MountAttributes;
use bindguard_core::places::SourceKind;
use bindguard_core::policy::{Alarm, FailedRepair, Mode, Policy};
use bindguard_core::proof::Difference;

const SOURCE: &str = "/var/lib/kubelet/pods/u/volume-subpaths/v/c/0";

/// A policy with one key that refuses, by the key's name.
fn policies() -> Vec<(&'static str, Policy)> {
    let policy = Policy::default;
    vec![
        ("none", policy()),
        (
            "unmounted-volumes",
            Policy {
                unmounted_volumes: Alarm::Refuse,
                ..policy()
            },
        ),
        (
            "proof",
            Policy {
                proof: Alarm::Refuse,
                ..policy()
            },
        ),
        (
            "dead-sources",
            Policy {
                dead_sources: Alarm::Refuse,
                ..policy()
            },
        ),
        (
            "failed-repairs",
            Policy {
                failed_repairs: FailedRepair::Refuse,
                ..policy()
            },
        ),
        (
            "failed-repairs without repairs",
            Policy {
                failed_repairs: FailedRepair::Refuse,
                stale_subpaths: Mode::Report,
                ..policy()
            },
        ),
    ]
}

/// The names of the policies that refuse. Each refusal names the words.
fn refusing(refusal: impl Fn(&Policy) -> Option<String>, words: &str) -> Vec<&'static str> {
    let mut names = Vec::new();
    for (name, policy) in policies() {
        if let Some(why) = refusal(&policy) {
            assert!(why.contains(words), "{name}: {why}");
            names.push(name);
        }
    }
    names
}

fn finding(verdict: Verdict) -> Finding {
    let subpath = VolumeSubpath::from_path(Path::new(SOURCE), [Path::new("/var/lib/kubelet")]);
    Finding {
        bind: Some(0),
        source: SOURCE.into(),
        destination: Some("/etc/app.conf".into()),
        kind: SourceKind::Subpath(subpath.unwrap()),
        verdict,
    }
}

#[test]
fn each_finding_has_the_key_that_refuses_it() {
    let stale = Verdict::Stale {
        cause: StaleCause::DeletedRoot,
        remedy: Err(NoRemedy::NoVolume),
    };
    let cases = [
        (Verdict::Current, vec![]),
        (Verdict::Foreign, vec![]),
        (Verdict::Unknown("EIO".to_owned()), vec![]),
        (
            Verdict::Unmounted(Unmounted::Subpath),
            vec!["unmounted-volumes"],
        ),
        (Verdict::Dead("ENOTCONN".to_owned()), vec!["dead-sources"]),
        (Verdict::NotProbed, vec!["dead-sources"]),
        (stale, vec!["failed-repairs"]),
        // A create's own proof has a function of its own.
        (Verdict::Wrong(Difference::NotMounted), vec![]),
    ];
    for (verdict, expected) in cases {
        let finding = finding(verdict);
        let found = refusing(|policy| refusal_of(&finding, policy), SOURCE);
        assert_eq!(found, expected, "{:?}", finding.verdict);
    }
}

#[test]
fn only_the_proof_refuses_what_a_runtime_mounted() {
    let nosuid = Difference::Permits(MountAttributes::from_bits(2));
    for difference in [Difference::NotMounted, Difference::Propagates, nosuid] {
        let finding = finding(Verdict::Wrong(difference));
        let found = refusing(|policy| refusal_of_wrong(&finding, policy), SOURCE);
        assert_eq!(found, ["proof"]);
    }
    // The host's umounts do not reach it: pinning, which no key refuses.
    let pinning = finding(Verdict::Wrong(Difference::WithoutMaster));
    assert!(refusing(|policy| refusal_of_wrong(&pinning, policy), "").is_empty());
    let current = finding(Verdict::Current);
    assert!(refusing(|policy| refusal_of_wrong(&current, policy), "").is_empty());
    let uncompared = |policy: &Policy| refusal_of_uncompared("EIO", policy);
    assert_eq!(refusing(uncompared, "EIO"), ["proof"]);
}

#[test]
fn what_was_not_seen_is_refused_if_anything_is() {
    let unseen = |policy: &Policy| refusal_of_unseen("the spec is too long", policy);
    assert_eq!(
        refusing(unseen, "too long"),
        [
            "unmounted-volumes",
            "proof",
            "dead-sources",
            "failed-repairs"
        ]
    );
    let stale = finding(Verdict::Foreign);
    let failed = |policy: &Policy| refusal_of_failed(&stale, "EPERM", policy);
    assert_eq!(
        refusing(failed, "EPERM"),
        ["failed-repairs", "failed-repairs without repairs"]
    );
}
