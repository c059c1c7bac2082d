//! A spec that no bundle has yet: the host is repaired, and its writer decides which edits the spec
//! gets.

use std::fs;
use std::path::Path;
use std::time::Duration;

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::report::{Outcome, Report};
use bindguard_core::spec::SpecEdit;
use bindguard_guard::admit_spec;
use bindguard_testing::{Fuse, Pod, mount_of, own_namespace, test_if};

/// The time that the NRI plugin has.
const DEADLINE: Duration = Duration::from_millis(500);

fn outcomes(report: &Report) -> Vec<Option<Outcome>> {
    report
        .binds
        .iter()
        .map(|bind| bind.outcome.clone())
        .collect()
}

#[test_if(own_namespace)]
fn a_subpath_is_rebound_and_an_edit_counts_only_if_the_writer_accepts_it() {
    let pod = Pod::with_keys(1);
    pod.write_spec(&[mount_of(Path::new("/"), "/host", "rprivate")]);
    let spec = fs::read(pod.config()).unwrap();
    let rebound = Some(Outcome::Rebound { tries: 1 });
    for (update, accepts, host_root) in [(1, true, Some(Outcome::MadeRslave)), (2, false, None)] {
        pod.update(update);
        let mut offered = Vec::new();
        let admission = admit_spec(&spec, &pod.policy(), &pod.places(), DEADLINE, |_, edits| {
            offered.extend_from_slice(edits);
            if accepts { edits.to_vec() } else { Vec::new() }
        });
        assert_eq!(offered, [SpecEdit::BindRslave { bind: 1 }]);
        assert_eq!(outcomes(&admission.report), [rebound.clone(), host_root]);
        assert_eq!(admission.report.bundle, None);
    }
    assert_eq!(fs::read(pod.config()).unwrap(), spec);
    assert_eq!(fs::read_to_string(pod.subpath(0)).unwrap(), "2");
}

#[test]
fn bytes_that_are_no_spec_are_a_problem_and_refused_where_policy_refuses_anything() {
    let admitted = |policy: &Policy| {
        let places = Places::default();
        admit_spec(b"7", policy, &places, DEADLINE, |_, edits| edits.to_vec())
    };
    let admission = admitted(&Policy::default());
    assert_eq!(
        (admission.report.problems.len(), admission.refusal),
        (1, None)
    );
    let strict = Policy {
        dead_sources: Alarm::Refuse,
        ..Policy::default()
    };
    assert!(admitted(&strict).refusal.is_some());
}

/// A caller that waits for less than a create does still gets the refusal before it gives up.
#[test_if(own_namespace)]
fn a_source_that_never_answers_is_refused_before_the_callers_deadline() {
    let Some(silent) = Fuse::mounted() else {
        return;
    };
    let pod = Pod::with_keys(0);
    pod.write_spec(&[mount_of(&silent.path().join("below"), "/data", "rprivate")]);
    let spec = fs::read(pod.config()).unwrap();
    let strict = Policy {
        dead_sources: Alarm::Refuse,
        ..pod.policy()
    };
    let admitted = |deadline| {
        let admission = admit_spec(&spec, &strict, &pod.places(), deadline, |_, edits| {
            edits.to_vec()
        });
        assert_eq!(admission.report.binds[0].verdict().as_str(), "dead");
        admission.refusal.unwrap()
    };
    for (deadline, probed) in [(500, 300), (800, 480), (1_000, 600), (60_000, 700)] {
        let refusal = admitted(Duration::from_millis(deadline));
        let silence = format!("did not answer within {probed} ms");
        assert!(refusal.contains(&silence), "{refusal}");
    }
}
