//! Version 1: a directory per controller, see the kernel's admin-guide/cgroup-v1.

use std::{
    fs,
    path::{Path, PathBuf},
};

use containerd_shim_protos::cgroups::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, MemoryEntry, MemoryOomControl, MemoryStat, Metrics, PidsStat, Throttle,
};
use protobuf::MessageField;

use super::keyed::{Keyed, fill, single};

/// cpuacct.stat counts in USER_HZ, which is 100 on every architecture that containers run on.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// All that these controllers' files say.
pub(super) fn read(controllers: &[(String, PathBuf)]) -> Metrics {
    let directory = |name: &str| controllers.iter().find(|(controller, _)| controller == name).map(|(_, path)| path);
    let memory_directory = directory("memory");
    Metrics {
        pids: MessageField::from_option(directory("pids").and_then(|path| pids(path))),
        cpu: MessageField::from_option(directory("cpuacct").map(|path| cpu(path, directory("cpu")))),
        memory: MessageField::from_option(memory_directory.and_then(|path| memory(path))),
        memory_oom_control: MessageField::from_option(memory_directory.and_then(|path| oom_control(path))),
        blkio: MessageField::from_option(directory("blkio").map(|path| blkio(path))),
        ..Default::default()
    }
}

fn pids(directory: &Path) -> Option<PidsStat> {
    let current = single(directory, "pids.current")?;
    // No limit is 0 here, unlike in version 2.
    let limit = single(directory, "pids.max").filter(|limit| *limit != u64::MAX).unwrap_or(0);
    Some(PidsStat { current, limit, ..Default::default() })
}

fn cpu(accounting: &Path, controller: Option<&PathBuf>) -> CPUStat {
    let ticks = Keyed::read(accounting, "cpuacct.stat").unwrap_or_default();
    let per_cpu = fs::read_to_string(accounting.join("cpuacct.usage_percpu")).unwrap_or_default();
    let usage = CPUUsage {
        total: single(accounting, "cpuacct.usage").unwrap_or(0),
        kernel: ticks.of("system") * NANOSECONDS_PER_TICK,
        user: ticks.of("user") * NANOSECONDS_PER_TICK,
        per_cpu: per_cpu.split_whitespace().filter_map(|figure| figure.parse().ok()).collect(),
        ..Default::default()
    };
    let throttling = controller.and_then(|path| Keyed::read(path, "cpu.stat")).map(|lines| {
        let mut throttle = Throttle::new();
        fill!(throttle from lines; periods = "nr_periods", throttled_periods = "nr_throttled", throttled_time);
        throttle
    });
    let throttling = MessageField::from_option(throttling);
    CPUStat { usage: MessageField::some(usage), throttling, ..Default::default() }
}

fn memory(directory: &Path) -> Option<MemoryStat> {
    let lines = Keyed::read(directory, "memory.stat")?;
    let mut memory = MemoryStat::new();
    fill!(memory from lines;
        cache, rss, rss_huge, mapped_file, dirty, writeback, pg_pg_in = "pgpgin", pg_pg_out = "pgpgout",
        pg_fault = "pgfault", pg_maj_fault = "pgmajfault", inactive_anon, active_anon, inactive_file, active_file,
        unevictable, hierarchical_memory_limit, hierarchical_swap_limit = "hierarchical_memsw_limit",
        total_cache, total_rss, total_rss_huge, total_mapped_file, total_dirty, total_writeback,
        total_pg_pg_in = "total_pgpgin", total_pg_pg_out = "total_pgpgout", total_pg_fault = "total_pgfault",
        total_pg_maj_fault = "total_pgmajfault", total_inactive_anon, total_active_anon, total_inactive_file,
        total_active_file, total_unevictable,
    );
    let entry = |kind: &str| MessageField::some(memory_entry(directory, kind));
    memory.usage = entry("memory");
    memory.swap = entry("memory.memsw");
    memory.kernel = entry("memory.kmem");
    memory.kernel_tcp = entry("memory.kmem.tcp");
    Some(memory)
}

fn memory_entry(directory: &Path, kind: &str) -> MemoryEntry {
    let number = |file: &str| single(directory, &format!("{kind}.{file}")).unwrap_or(0);
    MemoryEntry {
        limit: number("limit_in_bytes"),
        usage: number("usage_in_bytes"),
        max: number("max_usage_in_bytes"),
        failcnt: number("failcnt"),
        ..Default::default()
    }
}

fn oom_control(directory: &Path) -> Option<MemoryOomControl> {
    let lines = Keyed::read(directory, "memory.oom_control")?;
    let mut control = MemoryOomControl::new();
    fill!(control from lines; oom_kill_disable, under_oom, oom_kill);
    Some(control)
}

fn blkio(directory: &Path) -> BlkIOStat {
    let entries = |file: &str| {
        let text = fs::read_to_string(directory.join(file)).unwrap_or_default();
        text.lines().filter_map(blkio_entry).collect()
    };
    BlkIOStat {
        io_service_bytes_recursive: entries("blkio.throttle.io_service_bytes_recursive"),
        io_serviced_recursive: entries("blkio.throttle.io_serviced_recursive"),
        ..Default::default()
    }
}

/// `254:0 Read 4096`; the last line is `Total 8192` and names no device.
fn blkio_entry(line: &str) -> Option<BlkIOEntry> {
    let mut words = line.split_whitespace();
    let (device, op, value) = (words.next()?, words.next()?, words.next()?);
    let (major, minor) = device.split_once(':')?;
    Some(BlkIOEntry {
        op: op.to_owned(),
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        value: value.parse().ok()?,
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_three_controllers() {
        let dir = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
        write("cpuacct.usage", "77\n");
        write("cpuacct.stat", "user 3\nsystem 2\n");
        write("cpuacct.usage_percpu", "40 37 \n");
        write("cpu.stat", "nr_periods 5\nnr_throttled 1\nthrottled_time 9\n");
        write("memory.stat", "cache 1\ntotal_pgpgin 8\nhierarchical_memsw_limit 4\n");
        write("memory.memsw.usage_in_bytes", "6\n");
        write("pids.current", "2\n");
        write("pids.max", "max\n");
        let all = ["cpuacct", "cpu", "memory", "pids"].map(|name| (name.to_owned(), dir.path().to_owned()));
        let metrics = read(&all);
        assert_eq!((metrics.cpu.usage.total, metrics.cpu.usage.user), (77, 30_000_000));
        assert_eq!((metrics.cpu.usage.per_cpu.len(), metrics.cpu.throttling.throttled_periods), (2, 1));
        assert_eq!((metrics.memory.total_pg_pg_in, metrics.memory.hierarchical_swap_limit), (8, 4));
        assert_eq!((metrics.memory.swap.usage, metrics.pids.current, metrics.pids.limit), (6, 2, 0));
        assert!(metrics.blkio.is_none());
    }

    #[test]
    fn a_device_line_is_one_and_a_total_is_none() {
        assert_eq!(blkio_entry("254:0 Read 4096").map(|entry| (entry.major, entry.value)), Some((254, 4096)));
        assert_eq!(blkio_entry("Total 4096"), None);
    }
}
