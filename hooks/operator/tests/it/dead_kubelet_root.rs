//! A kubelet whose directories lie on a server that hangs: a survey and a repair report it, and do
//! not wait.

use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_operator::{RepairAct, repair_node, survey_node};
use bindguard_testing::own_namespace;
use bindguard_testing::{Fuse, test_if};

#[test_if(own_namespace)]
fn a_root_that_never_answers_is_reported_in_time() {
    let Some(mut fuse) = Fuse::mounted() else {
        return;
    };
    fuse.take_request();
    let places = Places {
        kubelet_roots: vec![fuse.path()],
        ..Places::default()
    };
    let policy = Policy::default();
    let surveyed = survey_node(&policy, &places, &Default::default(), |_| true);
    let repaired = repair_node(
        &policy,
        &places,
        &Default::default(),
        RepairAct::Rebind,
        |_| true,
    );
    for report in [surveyed, repaired] {
        assert!(
            report
                .problems
                .iter()
                .any(|problem| problem.contains("did not answer")),
            "{:?}",
            report.problems
        );
    }
}
