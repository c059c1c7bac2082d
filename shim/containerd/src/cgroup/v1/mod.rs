//! Version 1: a directory per controller, see the kernel's admin-guide/cgroup-v1.
//!
//! The message is that of Go's `cgroup1`. Its readers use nested parts without a check that they
//! exist (`cpu.throttling`, `memory.swap`), so a part is set with all of its own parts or not at
//! all.

mod blkio;
mod cpu;
mod memory;

use containerd_shim_protos::cgroups::metrics::{
    HugetlbStat, Metrics, PidsStat, RdmaEntry, RdmaStat,
};

use super::directory::Directory;
use super::hugepages;
use super::text::Rdma;

/// The cgroup's directory in each mounted controller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Controllers {
    cpu: Option<Directory>,
    cpuacct: Option<Directory>,
    memory: Option<Directory>,
    pids: Option<Directory>,
    blkio: Option<Directory>,
    hugetlb: Option<Directory>,
    rdma: Option<Directory>,
}

impl Controllers {
    /// The controllers that count something.
    pub(super) const NAMES: [&'static str; 7] = [
        "cpu", "cpuacct", "memory", "pids", "blkio", "hugetlb", "rdma",
    ];

    /// Stores a controller's directory; unused controllers are ignored.
    pub(super) fn put(&mut self, name: &str, directory: Directory) {
        let place = match name {
            "cpu" => &mut self.cpu,
            "cpuacct" => &mut self.cpuacct,
            "memory" => &mut self.memory,
            "pids" => &mut self.pids,
            "blkio" => &mut self.blkio,
            "hugetlb" => &mut self.hugetlb,
            "rdma" => &mut self.rdma,
            _ => return,
        };
        *place = Some(directory);
    }

    /// The memory controller's directory.
    pub(super) fn memory(&self) -> Option<&Directory> {
        self.memory.as_ref()
    }
}

/// All figures of the controllers' files.
pub(super) fn metrics(controllers: &Controllers) -> Metrics {
    Metrics {
        hugetlb: controllers
            .hugetlb
            .as_ref()
            .map(hugetlb)
            .unwrap_or_default(),
        pids: controllers.pids.as_ref().and_then(pids).into(),
        cpu: cpu::stat(controllers.cpuacct.as_ref(), controllers.cpu.as_ref()).into(),
        memory: controllers.memory.as_ref().and_then(memory::stat).into(),
        blkio: controllers.blkio.as_ref().and_then(blkio::stat).into(),
        rdma: controllers.rdma.as_ref().and_then(rdma).into(),
        memory_oom_control: controllers
            .memory
            .as_ref()
            .and_then(memory::oom_control)
            .into(),
        ..Default::default()
    }
}

fn pids(directory: &Directory) -> Option<PidsStat> {
    let current = directory.number("pids.current")?;
    // In this version's message, unlike in version 2's, 0 means no limit.
    let limit = directory
        .number("pids.max")
        .filter(|limit| *limit != u64::MAX)
        .unwrap_or(0);
    Some(PidsStat {
        current,
        limit,
        ..Default::default()
    })
}

fn hugetlb(directory: &Directory) -> Vec<HugetlbStat> {
    let stat = |pagesize: String| {
        let figure = |name: &str| directory.number(&format!("hugetlb.{pagesize}.{name}"));
        Some(HugetlbStat {
            usage: figure("usage_in_bytes")?,
            max: figure("max_usage_in_bytes").unwrap_or(0),
            failcnt: figure("failcnt").unwrap_or(0),
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

    fn of(controllers: &[&str], files: &[(&str, &str)]) -> Metrics {
        let fixture = Fixture::of(files);
        let mut all = Controllers::default();
        controllers
            .iter()
            .for_each(|name| all.put(name, fixture.directory()));
        metrics(&all)
    }

    #[test]
    fn pids_without_a_limit_have_the_limit_0() {
        let metrics = of(&["pids"], &[("pids.current", "7\n"), ("pids.max", "max\n")]);
        assert_eq!((metrics.pids.current, metrics.pids.limit), (7, 0));
        let metrics = of(&["pids"], &[("pids.current", "7\n"), ("pids.max", "100\n")]);
        assert_eq!(metrics.pids.limit, 100);
        assert!(
            metrics.cpu.is_none()
                && metrics.memory.is_none()
                && metrics.memory_oom_control.is_none()
        );
        assert!(metrics.blkio.is_none() && metrics.rdma.is_none() && metrics.hugetlb.is_empty());
    }

    #[test]
    fn rdma_needs_both_files() {
        let current = ("rdma.current", "mlx4_0 hca_handle=2 hca_object=20\n");
        let metrics = of(
            &["rdma"],
            &[
                current,
                ("rdma.max", "mlx4_0 hca_handle=max hca_object=30\n"),
            ],
        );
        assert_eq!(
            (
                metrics.rdma.current[0].hca_handles,
                metrics.rdma.current[0].hca_objects
            ),
            (2, 20)
        );
        assert_eq!(
            (
                metrics.rdma.limit[0].device.as_str(),
                metrics.rdma.limit[0].hca_handles
            ),
            ("mlx4_0", u32::MAX)
        );
        assert!(of(&["rdma"], &[current]).rdma.is_none());
    }

    #[test]
    fn huge_pages_of_the_sizes_this_kernel_has() {
        let Some(size) = hugepages::sizes().pop() else {
            return eprintln!("SKIPPED: no huge pages here");
        };
        let names = ["usage_in_bytes", "max_usage_in_bytes", "failcnt"]
            .map(|name| format!("hugetlb.{size}.{name}"));
        let metrics = of(
            &["hugetlb"],
            &[(&names[0], "3\n"), (&names[1], "4\n"), (&names[2], "5\n")],
        );
        let [stat] = metrics.hugetlb.as_slice() else {
            panic!("{:?}", metrics.hugetlb)
        };
        assert_eq!(
            (stat.usage, stat.max, stat.failcnt, &stat.pagesize),
            (3, 4, 5, &size)
        );
    }
}
