//! Version 1: a directory per controller, see the kernel's admin-guide/cgroup-v1.
//!
//! The message is that of Go's `cgroup1`. Its readers use nested parts without a check that they
//! exist (`cpu.throttling`, `memory.swap`), so a part is set with all of its own parts or not at
//! all.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::path::Path;

use containerd_shim_protos::cgroups::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, HugetlbStat, MemoryEntry, MemoryOomControl,
    MemoryStat, Metrics, PidsStat, RdmaEntry, RdmaStat, Throttle,
};
use protobuf::MessageField;

use super::files::{Directory, device, huge_page_sizes, number, text_of};

/// cpuacct.stat counts in USER_HZ, which is 100 on every architecture that containers run on.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// The cgroup's directory in each mounted controller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Controllers(Vec<(&'static str, Directory)>);

impl Controllers {
    /// The controllers that count something.
    pub const NAMES: [&'static str; 7] = [
        "cpu", "cpuacct", "memory", "pids", "blkio", "hugetlb", "rdma",
    ];

    pub fn put(&mut self, name: &'static str, directory: Directory) {
        self.0.push((name, directory));
    }

    pub fn get(&self, wanted: &str) -> Option<&Directory> {
        let (_, directory) = self.0.iter().find(|(name, _)| *name == wanted)?;
        Some(directory)
    }
}

/// All figures of the controllers' files.
pub fn metrics(controllers: &Controllers) -> Metrics {
    let memory = controllers.get("memory");
    Metrics {
        hugetlb: controllers.get("hugetlb").map(hugetlb).unwrap_or_default(),
        pids: controllers.get("pids").and_then(pids).into(),
        cpu: cpu_stat(controllers.get("cpuacct"), controllers.get("cpu")).into(),
        memory: memory.and_then(memory_stat).into(),
        blkio: controllers.get("blkio").and_then(blkio_stat).into(),
        rdma: controllers.get("rdma").and_then(rdma).into(),
        memory_oom_control: memory.and_then(oom_control).into(),
        ..Default::default()
    }
}

fn pids(directory: &Directory) -> Option<PidsStat> {
    let limit = directory.number("pids.max").unwrap_or(0);
    Some(PidsStat {
        current: directory.number("pids.current")?,
        // In this version's message, unlike in version 2's, 0 means no limit.
        limit: if limit == u64::MAX { 0 } else { limit },
        ..Default::default()
    })
}

fn hugetlb(directory: &Directory) -> Vec<HugetlbStat> {
    let mut all = Vec::new();
    for pagesize in huge_page_sizes() {
        let figure = |name: &str| directory.number(&format!("hugetlb.{pagesize}.{name}"));
        if let Some(usage) = figure("usage_in_bytes") {
            all.push(HugetlbStat {
                usage,
                max: figure("max_usage_in_bytes").unwrap_or(0),
                failcnt: figure("failcnt").unwrap_or(0),
                pagesize,
                ..Default::default()
            });
        }
    }
    all
}

fn rdma(directory: &Directory) -> Option<RdmaStat> {
    let entries = |file| {
        directory.rdma(file, |rdma| RdmaEntry {
            device: rdma.device.to_owned(),
            hca_handles: rdma.handles,
            hca_objects: rdma.objects,
            ..Default::default()
        })
    };
    Some(RdmaStat {
        current: entries("rdma.current")?,
        limit: entries("rdma.max")?,
        ..Default::default()
    })
}

/// Processor time, from the controllers cpuacct (usage) and cpu (throttling), see
/// admin-guide/cgroup-v1/cpuacct and scheduler/sched-bwc; `None` if both lack figures.
fn cpu_stat(cpuacct: Option<&Directory>, cpu: Option<&Directory>) -> Option<CPUStat> {
    let usage = cpuacct.and_then(|directory| {
        let ticks = directory.flat_keyed("cpuacct.stat");
        let nanoseconds = |key| {
            let ticks = ticks.as_ref().map_or(0, |ticks| ticks.of(key));
            ticks.saturating_mul(NANOSECONDS_PER_TICK)
        };
        let of_each = directory.text("cpuacct.usage_percpu").unwrap_or_default();
        Some(CPUUsage {
            total: directory.number("cpuacct.usage")?,
            kernel: nanoseconds("system"),
            user: nanoseconds("user"),
            per_cpu: per_cpu(&of_each),
            ..Default::default()
        })
    });
    let throttling = cpu.and_then(|directory| {
        let stat = directory.flat_keyed("cpu.stat")?;
        Some(Throttle {
            periods: stat.of("nr_periods"),
            throttled_periods: stat.of("nr_throttled"),
            throttled_time: stat.of("throttled_time"),
            ..Default::default()
        })
    });
    if usage.is_none() && throttling.is_none() {
        return None;
    }
    Some(CPUStat {
        usage: MessageField::some(usage.unwrap_or_default()),
        throttling: MessageField::some(throttling.unwrap_or_default()),
        ..Default::default()
    })
}

/// A single line, a number per processor. A bad number discards all: the next numbers would be
/// assigned to the wrong processor.
fn per_cpu(text: &str) -> Vec<u64> {
    let figures: Result<_, _> = text.split_ascii_whitespace().map(str::parse).collect();
    figures.unwrap_or_default()
}

/// The counters and the four accounts, see admin-guide/cgroup-v1/memory.
fn memory_stat(directory: &Directory) -> Option<MemoryStat> {
    let stat = directory.flat_keyed("memory.stat")?;
    let account = |account: &str| {
        let figure = |name: &str| directory.number(&format!("{account}.{name}")).unwrap_or(0);
        MessageField::some(MemoryEntry {
            limit: figure("limit_in_bytes"),
            usage: figure("usage_in_bytes"),
            max: figure("max_usage_in_bytes"),
            failcnt: figure("failcnt"),
            ..Default::default()
        })
    };
    Some(MemoryStat {
        cache: stat.of("cache"),
        rss: stat.of("rss"),
        rss_huge: stat.of("rss_huge"),
        mapped_file: stat.of("mapped_file"),
        dirty: stat.of("dirty"),
        writeback: stat.of("writeback"),
        pg_pg_in: stat.of("pgpgin"),
        pg_pg_out: stat.of("pgpgout"),
        pg_fault: stat.of("pgfault"),
        pg_maj_fault: stat.of("pgmajfault"),
        inactive_anon: stat.of("inactive_anon"),
        active_anon: stat.of("active_anon"),
        inactive_file: stat.of("inactive_file"),
        active_file: stat.of("active_file"),
        unevictable: stat.of("unevictable"),
        hierarchical_memory_limit: stat.of("hierarchical_memory_limit"),
        hierarchical_swap_limit: stat.of("hierarchical_memsw_limit"),
        total_cache: stat.of("total_cache"),
        total_rss: stat.of("total_rss"),
        total_rss_huge: stat.of("total_rss_huge"),
        total_mapped_file: stat.of("total_mapped_file"),
        total_dirty: stat.of("total_dirty"),
        total_writeback: stat.of("total_writeback"),
        total_pg_pg_in: stat.of("total_pgpgin"),
        total_pg_pg_out: stat.of("total_pgpgout"),
        total_pg_fault: stat.of("total_pgfault"),
        total_pg_maj_fault: stat.of("total_pgmajfault"),
        total_inactive_anon: stat.of("total_inactive_anon"),
        total_active_anon: stat.of("total_active_anon"),
        total_inactive_file: stat.of("total_inactive_file"),
        total_active_file: stat.of("total_active_file"),
        total_unevictable: stat.of("total_unevictable"),
        usage: account("memory"),
        // Missing without swap accounting (swapaccount=0); the entry stays, with zeroes.
        swap: account("memory.memsw"),
        kernel: account("memory.kmem"),
        kernel_tcp: account("memory.kmem.tcp"),
        ..Default::default()
    })
}

/// The reaction to running out of memory, and the count.
fn oom_control(directory: &Directory) -> Option<MemoryOomControl> {
    let control = directory.flat_keyed("memory.oom_control")?;
    Some(MemoryOomControl {
        oom_kill_disable: control.of("oom_kill_disable"),
        under_oom: control.of("under_oom"),
        oom_kill: control.of("oom_kill"),
        ..Default::default()
    })
}

/// Block devices, see admin-guide/cgroup-v1/blkio-controller; `None` without a file of transferred
/// bytes.
///
/// The counting scheduler depends on the kernel: up to 4.20 the CFQ scheduler, then BFQ for the
/// devices that it schedules. The throttling layer always counts, for every device, but only bytes
/// and operations. Each list of the message is from the first source with entries. BFQ is read only
/// for figures that CFQ and the throttling layer lack.
fn blkio_stat(directory: &Directory) -> Option<BlkIOStat> {
    // Read for the first entry.
    let devices =
        LazyCell::new(|| device_names(&text_of(Path::new("/proc/partitions")).unwrap_or_default()));
    // The entries of the first file that has any; an empty list if all are empty, none if there is
    // no such file.
    let first = |files: &[String]| {
        let mut found = None;
        for file in files {
            let Some(text) = directory.text(&format!("blkio.{file}")) else {
                continue;
            };
            let mut entries: Vec<_> = text.lines().filter_map(blkio_entry).collect();
            if entries.is_empty() {
                found = Some(entries);
                continue;
            }
            for entry in &mut entries {
                let name = devices.get(&(entry.major, entry.minor));
                entry.device = name.cloned().unwrap_or_default();
            }
            return Some(entries);
        }
        found
    };
    // Older kernels count per cgroup only, without the cgroups below; containers seldom have any.
    let throttled = |name: &str| {
        first(&[
            format!("{name}_recursive"),
            format!("throttle.{name}_recursive"),
            format!("throttle.{name}"),
        ])
    };
    let scheduled = |name: &str| {
        let files = [format!("{name}_recursive"), format!("bfq.{name}_recursive")];
        first(&files).unwrap_or_default()
    };
    Some(BlkIOStat {
        io_service_bytes_recursive: throttled("io_service_bytes")?,
        io_serviced_recursive: throttled("io_serviced").unwrap_or_default(),
        io_queued_recursive: scheduled("io_queued"),
        io_service_time_recursive: scheduled("io_service_time"),
        io_wait_time_recursive: scheduled("io_wait_time"),
        io_merged_recursive: scheduled("io_merged"),
        io_time_recursive: scheduled("time"),
        sectors_recursive: scheduled("sectors"),
        ..Default::default()
    })
}

/// `254:0 Read 4096`, or `254:0 4096` for time and sectors. The line `Total 8192` names no device
/// and is left out.
fn blkio_entry(line: &str) -> Option<BlkIOEntry> {
    let mut words = line.split_ascii_whitespace();
    let (major, minor) = device(words.next()?)?;
    let (op, value) = match (words.next()?, words.next(), words.next()) {
        (value, None, None) => ("", value),
        (op, Some(value), None) => (op, value),
        _ => return None,
    };
    Some(BlkIOEntry {
        op: op.to_owned(),
        major,
        minor,
        value: number(value)?,
        ..Default::default()
    })
}

/// The lines of /proc/partitions: `major minor  #blocks  name`, after a heading. The first of two
/// names is used.
fn device_names(partitions: &str) -> HashMap<(u64, u64), String> {
    let mut names = HashMap::new();
    for line in partitions.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        if let [major, minor, _, name, ..] = words[..]
            && let (Ok(major), Ok(minor)) = (major.parse(), minor.parse())
        {
            names
                .entry((major, minor))
                .or_insert_with(|| format!("/dev/{name}"));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protobuf::MessageFull;
    use protobuf::reflect::ReflectValueRef;

    use super::*;
    use crate::cgroup::live::Fixture;

    fn of(controllers: &[&'static str], files: &[(&str, &str)]) -> Metrics {
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
        let Some(size) = huge_page_sizes().pop() else {
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

    #[test]
    fn ticks_become_nanoseconds() {
        // From Linux 6.18.
        let used = Fixture::of(&[
            ("cpuacct.usage", "2589794180066\n"),
            ("cpuacct.stat", "user 148474\nsystem 110505\n"),
            ("cpuacct.usage_percpu", "1282271994253 1307522797749 \n"),
        ]);
        let withheld = Fixture::of(&[(
            "cpu.stat",
            "nr_periods 5\nnr_throttled 2\nthrottled_time 9\nnr_bursts 0\nburst_time 0\n",
        )]);
        let stat = cpu_stat(Some(&used.directory()), Some(&withheld.directory())).unwrap();
        assert_eq!(stat.usage.total, 2_589_794_180_066);
        assert_eq!(
            (stat.usage.user, stat.usage.kernel),
            (1_484_740_000_000, 1_105_050_000_000)
        );
        assert_eq!(stat.usage.per_cpu, [1_282_271_994_253, 1_307_522_797_749]);
        let throttling = &stat.throttling;
        assert_eq!(
            (
                throttling.periods,
                throttling.throttled_periods,
                throttling.throttled_time
            ),
            (5, 2, 9)
        );
    }

    #[test]
    fn one_controller_is_enough_and_the_other_part_is_there_but_empty() {
        let used = Fixture::of(&[("cpuacct.usage", "7\n")]);
        let stat = cpu_stat(Some(&used.directory()), None).unwrap();
        assert_eq!((stat.usage.total, stat.throttling.is_some()), (7, true));
        assert!(cpu_stat(None, Some(&Fixture::of(&[]).directory())).is_none());
    }

    #[test]
    fn an_odd_number_leaves_no_processor_in_the_wrong_place() {
        assert!(per_cpu("1 x 3").is_empty());
    }

    /// From Linux 6.18, with a different number for each figure.
    const STAT: &str = "\
    cache 1\nrss 2\nrss_huge 3\nshmem 90\nmapped_file 4\ndirty 5\nwriteback 6\nworkingset_refault_anon 91\n\
    workingset_refault_file 92\nswap 93\nswapcached 94\npgpgin 7\npgpgout 8\npgfault 9\npgmajfault 10\n\
    inactive_anon 11\nactive_anon 12\ninactive_file 13\nactive_file 14\nunevictable 15\n\
    hierarchical_memory_limit 16\nhierarchical_memsw_limit 17\ntotal_cache 18\ntotal_rss 19\ntotal_rss_huge 20\n\
    total_shmem 95\ntotal_mapped_file 21\ntotal_dirty 22\ntotal_writeback 23\ntotal_workingset_refault_anon 96\n\
    total_workingset_refault_file 97\ntotal_swap 98\ntotal_swapcached 99\ntotal_pgpgin 24\ntotal_pgpgout 25\n\
    total_pgfault 26\ntotal_pgmajfault 27\ntotal_inactive_anon 28\ntotal_active_anon 29\ntotal_inactive_file 30\n\
    total_active_file 31\ntotal_unevictable 32\n";

    #[test]
    fn every_counter_is_in_its_field() {
        let stat = memory_stat(&Fixture::of(&[("memory.stat", STAT)]).directory()).unwrap();
        // Each figure above is the number of its field.
        for number in 1..=32 {
            let field = MemoryStat::descriptor().field_by_number(number).unwrap();
            let value = field.get_singular(&stat);
            assert!(
                matches!(value, Some(ReflectValueRef::U64(n)) if n == u64::from(number)),
                "{}",
                field.name()
            );
        }
    }

    #[test]
    fn accounts_are_there_even_without_files() {
        let fixture = Fixture::of(&[
            ("memory.stat", STAT),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory.usage_in_bytes", "1\n"),
            ("memory.max_usage_in_bytes", "2\n"),
            ("memory.failcnt", "3\n"),
            ("memory.kmem.tcp.usage_in_bytes", "4\n"),
        ]);
        let stat = memory_stat(&fixture.directory()).unwrap();
        assert_eq!(
            (stat.usage.limit, stat.usage.usage),
            (9_223_372_036_854_771_712, 1)
        );
        assert_eq!(
            (stat.usage.max, stat.usage.failcnt, stat.kernel_tcp.usage),
            (2, 3, 4)
        );
        assert!(stat.swap.is_some() && stat.kernel.is_some());
    }

    #[test]
    fn oom_control_of_an_old_kernel_has_no_count() {
        let fixture = Fixture::of(&[("memory.oom_control", "oom_kill_disable 1\nunder_oom 1\n")]);
        let control = oom_control(&fixture.directory()).unwrap();
        assert_eq!(
            (
                control.oom_kill_disable,
                control.under_oom,
                control.oom_kill
            ),
            (1, 1, 0)
        );
    }

    #[test]
    fn lines_with_and_without_an_operation() {
        let read = blkio_entry("254:0 Read 4096").unwrap();
        assert_eq!(
            (read.major, read.minor, read.op.as_str(), read.value),
            (254, 0, "Read", 4096)
        );
        let time = blkio_entry("8:16 17").unwrap();
        assert_eq!((time.minor, time.op.as_str(), time.value), (16, "", 17));
        for odd in [
            "Total 4096",
            "",
            "254:0",
            "254:0 Read 1 2",
            "254:x Read 1",
            "254:0 Read x",
        ] {
            assert_eq!(blkio_entry(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn the_throttling_layer_counts_where_no_scheduler_does() {
        // From Linux 6.18 with a disk that BFQ does not schedule.
        let stat = blkio_stat(
            &Fixture::of(&[
                ("blkio.bfq.io_service_bytes_recursive", "Total 0\n"),
                (
                    "blkio.throttle.io_service_bytes_recursive",
                    "254:0 Read 4096\n254:0 Total 4096\nTotal 4096\n",
                ),
                ("blkio.throttle.io_service_bytes", "Total 0\n"),
                ("blkio.throttle.io_serviced", "254:0 Read 1\nTotal 1\n"),
                ("blkio.bfq.sectors_recursive", "254:0 8\nTotal 8\n"),
            ])
            .directory(),
        )
        .unwrap();
        let ops: Vec<_> = stat
            .io_service_bytes_recursive
            .iter()
            .map(|entry| entry.op.as_str())
            .collect();
        assert_eq!(ops, ["Read", "Total"]);
        assert_eq!(
            (
                stat.io_serviced_recursive[0].value,
                stat.sectors_recursive[0].value
            ),
            (1, 8)
        );
        assert!(stat.io_queued_recursive.is_empty());
    }

    #[test]
    fn no_file_at_all_is_no_message_and_an_empty_one_is_an_empty_message() {
        assert!(blkio_stat(&Fixture::of(&[]).directory()).is_none());
        let idle = Fixture::of(&[("blkio.throttle.io_service_bytes_recursive", "Total 0\n")]);
        assert_eq!(blkio_stat(&idle.directory()), Some(BlkIOStat::default()));
    }

    #[test]
    fn devices_have_the_first_of_their_names() {
        let text = "major minor  #blocks  name\n\n 254        0   268435456 vda\n 254  0  1 again\n   8  16   1 sdb\n";
        let names = device_names(text);
        assert_eq!(
            (
                names.len(),
                names[&(254, 0)].as_str(),
                names[&(8, 16)].as_str()
            ),
            (2, "/dev/vda", "/dev/sdb")
        );
    }

    proptest! {
        #[test]
        fn any_line_is_read_without_panic(text: String) {
            let _ = (blkio_entry(&text), device_names(&text));
        }

        #[test]
        fn entries_survive(major: u32, minor: u32, value: u64, op in "[A-Z][a-z]{0,8}") {
            let entry = blkio_entry(&format!("{major}:{minor} {op} {value}")).unwrap();
            prop_assert_eq!((entry.major, entry.minor), (u64::from(major), u64::from(minor)));
            prop_assert_eq!((entry.op, entry.value), (op, value));
        }
    }
}
