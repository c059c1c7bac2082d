//! The figures of real cgroups.

use std::fs;

use containerd_shim_protos::{cgroups, cgroups_v2};
use protobuf::Message;

use super::{RealCgroup, skipped};
use crate::cgroup::{Cgroup, find, v1, v2};

/// exec replaces the first shell, whose memory is charged to a different cgroup.
const BUSY: &str = "exec sh -c 'while :; do :; done'";
const V1: [&str; 5] = ["memory", "cpu", "cpuacct", "pids", "blkio"];

#[test]
fn a_process_in_version_1_has_all_figures_while_it_lives_and_afterwards() {
    let Some(mut cgroup) = RealCgroup::new(&V1) else {
        return;
    };
    cgroup.write("memory.limit_in_bytes", "67108864");
    let pid = cgroup.run(BUSY);
    let found = find(pid).unwrap();
    let Cgroup::V1(controllers) = &found else {
        panic!("{found:?}")
    };
    assert_eq!(controllers.get("memory"), Some(cgroup.path()));

    wait_until(|| v1_of(&found).cpu.usage.user > 0 && v1_of(&found).memory.usage.usage > 0);
    let metrics = v1_of(&found);
    assert!(metrics.cpu.usage.total > 0 && !metrics.cpu.usage.per_cpu.is_empty());
    assert!(
        metrics.cpu.throttling.is_some()
            && metrics.blkio.is_some()
            && metrics.memory_oom_control.is_some()
    );
    assert_eq!(
        (
            metrics.memory.usage.limit,
            metrics.memory.hierarchical_memory_limit
        ),
        (67_108_864, 67_108_864)
    );
    assert!(
        metrics.memory.usage.usage > 0 && metrics.memory.usage.max >= metrics.memory.usage.usage
    );
    assert_eq!((metrics.pids.current, metrics.pids.limit), (1, 0));
    // The kernel updates these totals every two seconds.
    wait_until(|| v1_of(&found).memory.total_pg_fault > 0);
    assert!(!found.metrics().unwrap().value.is_empty());

    cgroup.end_all();
    assert!(
        v1_of(&found).cpu.usage.total >= metrics.cpu.usage.total,
        "the dead have figures"
    );
    cgroup.remove();
    assert_eq!(found.metrics(), None);
}

#[test]
fn without_a_memory_controller_there_is_still_processor_time() {
    let Some(mut cgroup) = RealCgroup::new(&["cpuacct"]) else {
        return;
    };
    cgroup.run("exec sleep 60");
    let mut controllers = v1::Controllers::default();
    controllers.0.push(("cpuacct", cgroup.path().to_owned()));
    let metrics = v1_of(&Cgroup::V1(controllers));
    assert!(metrics.cpu.usage.is_some() && metrics.memory.is_none() && metrics.pids.is_none());
}

#[test]
fn the_unified_hierarchy_has_processor_time_and_pressure_without_controllers() {
    let Some(mut cgroup) = RealCgroup::new(&["unified"]) else {
        return;
    };
    cgroup.run(BUSY);
    let figures = || {
        let metrics = v2::metrics(cgroup.path());
        cgroups_v2::metrics::Metrics::parse_from_bytes(&metrics.0).unwrap()
    };
    wait_until(|| figures().cpu.usage_usec > 0);
    let metrics = figures();
    match fs::read_to_string(cgroup.path().join("cpu.pressure")) {
        Ok(_) => assert!(metrics.cpu.psi.some.is_some()),
        Err(error) => skipped(&format!("no pressure here: {error}")),
    }
    let has_memory = fs::read_to_string(cgroup.path().join("memory.events")).is_ok();
    assert_eq!(
        (metrics.memory.is_some(), metrics.memory_events.is_some()),
        (has_memory, has_memory)
    );
}

fn v1_of(cgroup: &Cgroup) -> cgroups::metrics::Metrics {
    match cgroup {
        Cgroup::V1(controllers) => {
            cgroups::metrics::Metrics::parse_from_bytes(&v1::metrics(controllers).0).unwrap()
        }
        Cgroup::V2(directory) => panic!("{directory:?}"),
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !is_so() {
        assert!(std::time::Instant::now() < end, "waited in vain");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
