//! A spec that no bundle has yet: the host is repaired, and its writer decides which edits the spec
//! gets.

use std::fs;
use std::path::Path;

use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::report::{Outcome, Report};
use bindguard_core::spec::SpecEdit;
use bindguard_guard::admit_spec;
use bindguard_testing::{Pod, mount_of, own_namespace};

fn outcomes(report: &Report) -> Vec<Option<Outcome>> {
    report
        .binds
        .iter()
        .map(|bind| bind.outcome.clone())
        .collect()
}

#[test]
fn a_subpath_is_rebound_and_an_edit_counts_only_if_the_writer_accepts_it() {
    if !own_namespace() {
        return;
    }
    let pod = Pod::with_keys(1);
    pod.write_spec(&[mount_of(Path::new("/"), "/host", "rprivate")]);
    let spec = fs::read(pod.config()).unwrap();
    let rebound = Some(Outcome::Rebound { tries: 1 });
    for (update, accepts, host_root) in [(1, true, Some(Outcome::MadeRslave)), (2, false, None)] {
        pod.update(update);
        let mut offered = Vec::new();
        let admission = admit_spec(&spec, &pod.policy(), &pod.places(), |_, edits| {
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
    let admitted =
        |policy: &Policy| admit_spec(b"7", policy, &Default::default(), |_, edits| edits.to_vec());
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
