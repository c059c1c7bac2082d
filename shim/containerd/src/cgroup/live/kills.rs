//! Real out-of-memory kills, in cgroups of version 1 with a small limit.

use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use tokio::time::timeout;

use super::{RealCgroup, skipped};
use crate::cgroup::v1::Controllers;
use crate::cgroup::{Cgroup, OomWatch};

const LONG: Duration = Duration::from_secs(60);
/// Longer than all checks after an alarm together.
const QUIET: Duration = Duration::from_secs(3);
/// Allocates without limit: tail keeps a whole line, and no line ends.
const EAT: &str = "exec tail /dev/zero";
const REST: &str = "exec sleep 60";

/// A memory cgroup with a limit of 16 MiB, with swap or without.
fn limited() -> Option<RealCgroup> {
    let cgroup = RealCgroup::new(&["memory"])?;
    if !cgroup
        .path()
        .join("memory.oom_control")
        .try_exists()
        .unwrap()
    {
        skipped("no memory controller of version 1");
        return None;
    }
    cgroup.write("memory.limit_in_bytes", "16777216");
    if cgroup
        .path()
        .join("memory.memsw.limit_in_bytes")
        .try_exists()
        .unwrap()
    {
        cgroup.write("memory.memsw.limit_in_bytes", "16777216");
    }
    Some(cgroup)
}

fn watch(cgroup: &RealCgroup) -> OomWatch {
    let mut controllers = Controllers::default();
    controllers.0.push(("memory", cgroup.path().to_owned()));
    OomWatch::open(&Cgroup::V1(controllers)).unwrap()
}

#[tokio::test]
async fn a_kill_is_reported_once_and_the_watch_ends_with_the_cgroup() {
    let Some(mut cgroup) = limited() else { return };
    let mut ooms = watch(&cgroup);
    assert!(!ooms.take_unreported());
    cgroup.run(EAT);
    assert!(timeout(LONG, ooms.next()).await.unwrap());
    cgroup.wait();
    assert!(!ooms.take_unreported());
    cgroup.remove();
    assert!(!timeout(LONG, ooms.next()).await.unwrap());
    assert!(!timeout(LONG, ooms.next()).await.unwrap());
    assert!(!ooms.take_unreported());
}

#[tokio::test]
async fn the_kill_of_a_reaped_victim_is_reported() {
    let Some(mut cgroup) = limited() else { return };
    let mut ooms = watch(&cgroup);
    for _ in 0..3 {
        cgroup.run(EAT);
        cgroup.wait();
        assert!(ooms.take_unreported());
        assert!(!ooms.take_unreported());
    }
    cgroup.run(EAT);
    cgroup.wait();
    assert!(timeout(LONG, ooms.next()).await.unwrap());
    assert!(timeout(QUIET, ooms.next()).await.is_err());
}

#[tokio::test]
async fn a_neighbour_killed_by_the_limit_of_the_pod_is_not_reported() {
    let Some(pod) = limited() else { return };
    let (mut eater, mut neighbour) = (pod.below("eater"), pod.below("neighbour"));
    let (mut of_eater, mut of_neighbour) = (watch(&eater), watch(&neighbour));
    neighbour.run(REST);
    eater.run(EAT);
    assert!(timeout(LONG, of_eater.next()).await.unwrap());
    eater.wait();
    assert!(timeout(QUIET, of_neighbour.next()).await.is_err());
    assert!(!of_neighbour.take_unreported());
}

#[tokio::test]
async fn a_kill_in_a_cgroup_below_is_reported() {
    let Some(container) = limited() else { return };
    let mut below = container.below("below");
    let mut ooms = watch(&container);
    below.run(EAT);
    assert!(timeout(LONG, ooms.next()).await.unwrap());
    below.wait();
    assert!(!ooms.take_unreported());
}

#[tokio::test]
async fn lack_of_memory_is_reported_where_kills_are_disabled() {
    let Some(mut cgroup) = limited() else { return };
    cgroup.write("memory.oom_control", "1");
    let mut ooms = watch(&cgroup);
    cgroup.run(EAT);
    assert!(timeout(LONG, ooms.next()).await.unwrap());
}

#[tokio::test]
async fn a_cancelled_wait_loses_no_kill() {
    let Some(mut cgroup) = limited() else { return };
    let mut ooms = watch(&cgroup);
    cgroup.run(EAT);
    let begin = Instant::now();
    while timeout(Duration::from_micros(500), ooms.next()).await != Ok(true) {
        assert!(begin.elapsed() < LONG, "it is never reported");
    }
    let end = Instant::now() + QUIET;
    while Instant::now() < end {
        assert!(
            timeout(Duration::from_micros(500), ooms.next())
                .await
                .is_err(),
            "it is reported again"
        );
    }
}

#[tokio::test]
async fn an_end_without_a_kill_reports_nothing() {
    let Some(mut cgroup) = limited() else { return };
    let mut ooms = watch(&cgroup);
    cgroup.run("exit 3");
    cgroup.wait();
    assert!(!ooms.take_unreported());
    cgroup.remove();
    assert!(!timeout(LONG, ooms.next()).await.unwrap());
    assert!(!ooms.take_unreported());
}

#[tokio::test]
async fn the_cgroup_has_no_open_descriptor_afterwards() {
    let Some(cgroup) = limited() else { return };
    let _watch = watch(&cgroup);
    assert_eq!(cgroup.open_files(), 0);
}

#[tokio::test]
async fn a_missing_memory_controller_is_an_error() {
    let nothing = OomWatch::open(&Cgroup::V1(Controllers::default()));
    let message = "watch for out-of-memory kills: the cgroup has no memory controller";
    assert_eq!(error_chain(&nothing.unwrap_err()), message);
    let directory = super::Fixture::of(&[]);
    let nothing = OomWatch::open(&Cgroup::V2(directory.directory().to_owned()));
    assert_eq!(error_chain(&nothing.unwrap_err()), message);
}
