//! Version 2: a single directory with the files of all controllers, see the kernel's
//! admin-guide/cgroup-v2.
//!
//! The message has the content of Go's `cgroup2`. Without a controller its files are missing, and
//! so is that part of the message; cpu.stat and the pressure files are in every cgroup.

mod io;
mod memory;
mod pressure;

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, HugeTlbStat, Metrics, PidsStat, RdmaEntry, RdmaStat,
};

use super::directory::Directory;
use super::hugepages;
use super::text::Rdma;

/// All figures of the cgroup's files.
pub(super) fn metrics(directory: &Directory) -> Metrics {
    Metrics {
        pids: pids(directory).into(),
        cpu: cpu(directory).into(),
        memory: memory::stat(directory).into(),
        rdma: rdma(directory).into(),
        io: io::stat(directory).into(),
        hugetlb: hugetlb(directory),
        memory_events: memory::events(directory).into(),
        ..Default::default()
    }
}

fn pids(directory: &Directory) -> Option<PidsStat> {
    let current = directory.number("pids.current")?;
    Some(PidsStat {
        current,
        limit: directory.number("pids.max").unwrap_or(0),
        ..Default::default()
    })
}

fn cpu(directory: &Directory) -> Option<CPUStat> {
    let stat = directory.flat_keyed("cpu.stat")?;
    Some(CPUStat {
        usage_usec: stat.of("usage_usec"),
        user_usec: stat.of("user_usec"),
        system_usec: stat.of("system_usec"),
        nr_periods: stat.of("nr_periods"),
        nr_throttled: stat.of("nr_throttled"),
        throttled_usec: stat.of("throttled_usec"),
        psi: pressure::of(directory, "cpu.pressure").into(),
        nr_bursts: stat.of("nr_bursts"),
        burst_usec: stat.of("burst_usec"),
        ..Default::default()
    })
}

fn hugetlb(directory: &Directory) -> Vec<HugeTlbStat> {
    let stat = |pagesize: String| {
        let file = |name: &str| format!("hugetlb.{pagesize}.{name}");
        Some(HugeTlbStat {
            current: directory.number(&file("current"))?,
            max: directory.number(&file("max")).unwrap_or(0),
            failcnt: directory
                .flat_keyed(&file("events"))
                .map_or(0, |events| events.of("max")),
            pagesize,
            ..Default::default()
        })
    };
    hugepages::sizes().into_iter().filter_map(stat).collect()
}

fn rdma(directory: &Directory) -> Option<RdmaStat> {
    let entry = |rdma: Rdma<'_>| RdmaEntry {
        device: rdma.device.to_owned(),
        hca_handles: rdma.handles,
        hca_objects: rdma.objects,
        ..Default::default()
    };
    let entries = |name| directory.rdma(name, entry);
    Some(RdmaStat {
        current: entries("rdma.current")?,
        limit: entries("rdma.max")?,
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::live::Fixture;

    // Fixtures from the kernel's admin-guide/cgroup-v2.

    #[test]
    fn a_cgroup_without_controllers_still_has_processor_time() {
        let fixture = Fixture::of(&[
            (
                "cpu.stat",
                "usage_usec 9\nuser_usec 5\nsystem_usec 4\nnice_usec 0\ncore_sched.force_idle_usec 0\n",
            ),
            (
                "cpu.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
            ),
        ]);
        let metrics = metrics(&fixture.directory());
        assert_eq!(
            (
                metrics.cpu.usage_usec,
                metrics.cpu.user_usec,
                metrics.cpu.system_usec
            ),
            (9, 5, 4)
        );
        assert_eq!(
            (metrics.cpu.psi.some.total, metrics.cpu.psi.full.is_some()),
            (7, false)
        );
        assert!(
            metrics.pids.is_none() && metrics.memory.is_none() && metrics.memory_events.is_none()
        );
        assert!(metrics.io.is_none() && metrics.rdma.is_none() && metrics.hugetlb.is_empty());
    }

    #[test]
    fn throttling_and_pids() {
        let fixture = Fixture::of(&[
            (
                "cpu.stat",
                "usage_usec 9\nnr_periods 1\nnr_throttled 2\nthrottled_usec 3\nnr_bursts 4\nburst_usec 5\n",
            ),
            ("pids.current", "2\n"),
            ("pids.max", "max\n"),
        ]);
        let metrics = metrics(&fixture.directory());
        let cpu = &metrics.cpu;
        assert_eq!(
            (cpu.nr_periods, cpu.nr_throttled, cpu.throttled_usec),
            (1, 2, 3)
        );
        assert_eq!(
            (cpu.nr_bursts, cpu.burst_usec, cpu.psi.is_some()),
            (4, 5, false)
        );
        assert_eq!((metrics.pids.current, metrics.pids.limit), (2, u64::MAX));
    }

    #[test]
    fn huge_pages_and_rdma() {
        let Some(size) = hugepages::sizes().pop() else {
            return eprintln!("SKIPPED: no huge pages here");
        };
        let names = ["current", "max", "events"].map(|name| format!("hugetlb.{size}.{name}"));
        let fixture = Fixture::of(&[
            (&names[0], "2097152\n"),
            (&names[1], "max\n"),
            (&names[2], "max 3\n"),
            ("rdma.current", "ocrdma1 hca_handle=1 hca_object=23\n"),
            ("rdma.max", "ocrdma1 hca_handle=3 hca_object=max\n"),
        ]);
        let metrics = metrics(&fixture.directory());
        let [stat] = metrics.hugetlb.as_slice() else {
            panic!("{:?}", metrics.hugetlb)
        };
        assert_eq!(
            (stat.current, stat.max, stat.failcnt, &stat.pagesize),
            (2_097_152, u64::MAX, 3, &size)
        );
        assert_eq!(
            (
                metrics.rdma.current[0].hca_objects,
                metrics.rdma.limit[0].hca_objects
            ),
            (23, u32::MAX)
        );
    }
}
