//! Version 1: a directory per controller, see the kernel's admin-guide/cgroup-v1.
//!
//! The message is that of Go's `cgroup1`. Its readers use nested parts without a check that they
//! exist (`cpu.throttling`, `memory.swap`), so a part is set with all of its own parts or not at
//! all.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::files::{FlatKeyed, Metrics, device, figure, huge_page_sizes, number, pids, rdma, text};

/// cpuacct.stat counts in USER_HZ, which is 100 on every architecture that containers run on.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// The keys of memory.stat in the order of the fields of `MemoryStat`, from field 1.
const MEMORY: [&str; 32] = [
    "cache",
    "rss",
    "rss_huge",
    "mapped_file",
    "dirty",
    "writeback",
    "pgpgin",
    "pgpgout",
    "pgfault",
    "pgmajfault",
    "inactive_anon",
    "active_anon",
    "inactive_file",
    "active_file",
    "unevictable",
    "hierarchical_memory_limit",
    "hierarchical_memsw_limit",
    "total_cache",
    "total_rss",
    "total_rss_huge",
    "total_mapped_file",
    "total_dirty",
    "total_writeback",
    "total_pgpgin",
    "total_pgpgout",
    "total_pgfault",
    "total_pgmajfault",
    "total_inactive_anon",
    "total_active_anon",
    "total_inactive_file",
    "total_active_file",
    "total_unevictable",
];

/// The cgroup's directory in each mounted controller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Controllers(pub Vec<(&'static str, PathBuf)>);

impl Controllers {
    /// The controllers that count something.
    pub const NAMES: [&'static str; 7] = [
        "cpu", "cpuacct", "memory", "pids", "blkio", "hugetlb", "rdma",
    ];

    pub fn get(&self, wanted: &str) -> Option<&Path> {
        let (_, directory) = self.0.iter().find(|(name, _)| *name == wanted)?;
        Some(directory)
    }
}

/// All figures of the controllers' files.
pub fn metrics(controllers: &Controllers) -> Metrics {
    let mut metrics = Metrics::default();
    for pagesize in huge_page_sizes() {
        let hugetlb = controllers.get("hugetlb");
        let file = |name| figure(hugetlb?, &format!("hugetlb.{pagesize}.{name}"));
        if let Some(usage) = file("usage_in_bytes") {
            let [max, failcnt] = ["max_usage_in_bytes", "failcnt"].map(file);
            let mut stat = Metrics::default();
            stat.numbers(1, &[usage, max.unwrap_or(0), failcnt.unwrap_or(0)]);
            stat.bytes(4, pagesize.as_bytes());
            metrics.part(1, Some(stat));
        }
    }
    // In this version's message, unlike in version 2's, 0 means no limit.
    metrics.part(2, controllers.get("pids").and_then(|at| pids(at, 0)));
    metrics.part(
        3,
        cpu_stat(controllers.get("cpuacct"), controllers.get("cpu")),
    );
    let memory = controllers.get("memory");
    metrics.part(4, memory.and_then(memory_stat));
    metrics.part(5, controllers.get("blkio").and_then(blkio_stat));
    metrics.part(6, controllers.get("rdma").and_then(rdma));
    metrics.part(9, memory.and_then(oom_control));
    metrics
}

/// Processor time, from the controllers cpuacct (usage) and cpu (throttling), see
/// admin-guide/cgroup-v1/cpuacct and scheduler/sched-bwc; `None` if both lack figures.
fn cpu_stat(cpuacct: Option<&Path>, cpu: Option<&Path>) -> Option<Metrics> {
    let (mut usage, mut throttling) = (Metrics::default(), Metrics::default());
    let total = cpuacct.and_then(|directory| figure(directory, "cpuacct.usage"));
    if let (Some(directory), Some(total)) = (cpuacct, total) {
        let ticks = FlatKeyed::read(directory, "cpuacct.stat");
        let [kernel, user] = ["system", "user"].map(|key| {
            let ticks = ticks.as_ref().map_or(0, |ticks| ticks.of(key));
            ticks.saturating_mul(NANOSECONDS_PER_TICK)
        });
        usage.numbers(1, &[total, kernel, user]);
        let mut packed = Metrics::default();
        for figure in per_cpu(&text(directory, "cpuacct.usage_percpu").unwrap_or_default()) {
            packed.varint(figure);
        }
        usage.bytes(4, &packed.0);
    }
    let stat = cpu.and_then(|directory| FlatKeyed::read(directory, "cpu.stat"));
    if let Some(stat) = &stat {
        let keys = ["nr_periods", "nr_throttled", "throttled_time"];
        throttling.numbers(1, &keys.map(|key| stat.of(key)));
    }
    if total.is_none() && stat.is_none() {
        return None;
    }
    let mut both = Metrics::default();
    both.part(1, Some(usage));
    both.part(2, Some(throttling));
    Some(both)
}

/// A single line, a number per processor. A bad number discards all: the next numbers would be
/// assigned to the wrong processor.
fn per_cpu(text: &str) -> Vec<u64> {
    let figures: Result<_, _> = text.split_ascii_whitespace().map(str::parse).collect();
    figures.unwrap_or_default()
}

/// The counters and the four accounts, see admin-guide/cgroup-v1/memory.
fn memory_stat(directory: &Path) -> Option<Metrics> {
    let counters = FlatKeyed::read(directory, "memory.stat")?;
    let mut stat = Metrics::default();
    stat.numbers(1, &MEMORY.map(|key| counters.of(key)));
    // The files of memsw are missing without swap accounting (swapaccount=0); the entry stays, with
    // zeroes.
    let accounts = ["memory", "memory.memsw", "memory.kmem", "memory.kmem.tcp"];
    for (field, account) in (33..).zip(accounts) {
        let files = [
            "limit_in_bytes",
            "usage_in_bytes",
            "max_usage_in_bytes",
            "failcnt",
        ];
        let mut entry = Metrics::default();
        entry.numbers(
            1,
            &files.map(|file| figure(directory, &format!("{account}.{file}")).unwrap_or(0)),
        );
        stat.part(field, Some(entry));
    }
    Some(stat)
}

/// The reaction to running out of memory, and the count.
fn oom_control(directory: &Path) -> Option<Metrics> {
    let control = FlatKeyed::read(directory, "memory.oom_control")?;
    let mut message = Metrics::default();
    let keys = ["oom_kill_disable", "under_oom", "oom_kill"];
    message.numbers(1, &keys.map(|key| control.of(key)));
    Some(message)
}

/// Block devices, see admin-guide/cgroup-v1/blkio-controller; `None` without a file of transferred
/// bytes.
///
/// The counting scheduler depends on the kernel: up to 4.20 the CFQ scheduler, then BFQ for the
/// devices that it schedules. The throttling layer always counts, for every device, but only bytes
/// and operations. Each list of the message is from the first source with entries. BFQ is read only
/// for figures that CFQ and the throttling layer lack.
fn blkio_stat(directory: &Path) -> Option<Metrics> {
    let partitions = || text(Path::new("/proc"), "partitions").unwrap_or_default();
    // Read for the first entry.
    let devices = LazyCell::new(|| device_names(&partitions()));
    let mut stat = Metrics::default();
    // Adds the entries of the first file that has any. Returns false if there is no such file.
    let mut add = |field, files: &[String]| {
        let mut exists = false;
        for file in files {
            let text = text(directory, &format!("blkio.{file}"));
            exists |= text.is_some();
            let mut has_entries = false;
            for line in text.iter().flat_map(|text| text.lines()) {
                if let Some((at, mut entry)) = blkio_entry(line) {
                    let name = devices.get(&at).map_or("", String::as_str);
                    entry.bytes(2, name.as_bytes());
                    stat.part(field, Some(entry));
                    has_entries = true;
                }
            }
            if has_entries {
                break;
            }
        }
        exists
    };
    for (field, name) in [(1, "io_service_bytes"), (2, "io_serviced")] {
        let exists = add(
            field,
            &[
                format!("{name}_recursive"),
                format!("throttle.{name}_recursive"),
                // Older kernels count per cgroup only, without the cgroups below; containers seldom
                // have any.
                format!("throttle.{name}"),
            ],
        );
        if field == 1 && !exists {
            return None;
        }
    }
    let scheduled = [
        "io_queued",
        "io_service_time",
        "io_wait_time",
        "io_merged",
        "time",
        "sectors",
    ];
    for (field, name) in (3..).zip(scheduled) {
        add(
            field,
            &[format!("{name}_recursive"), format!("bfq.{name}_recursive")],
        );
    }
    Some(stat)
}

/// `254:0 Read 4096`, or `254:0 4096` for time and sectors, as the device and a `BlkIOEntry` without
/// its name. The line `Total 8192` names no device and is left out.
fn blkio_entry(line: &str) -> Option<([u64; 2], Metrics)> {
    let mut words = line.split_ascii_whitespace();
    let at @ [major, minor] = device(words.next()?)?;
    let (op, value) = match (words.next()?, words.next(), words.next()) {
        (value, None, None) => ("", value),
        (op, Some(value), None) => (op, value),
        _ => return None,
    };
    let mut entry = Metrics::default();
    entry.bytes(1, op.as_bytes());
    entry.numbers(3, &[major, minor, number(value)?]);
    Some((at, entry))
}

/// The lines of /proc/partitions: `major minor  #blocks  name`, after a heading. The first of two
/// names is used.
fn device_names(partitions: &str) -> HashMap<[u64; 2], String> {
    let mut names = HashMap::new();
    for line in partitions.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        if let [major, minor, _, name, ..] = words[..]
            && let (Ok(major), Ok(minor)) = (major.parse(), minor.parse())
        {
            names
                .entry([major, minor])
                .or_insert_with(|| format!("/dev/{name}"));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::cgroups::metrics as messages;
    use messages::{BlkIOEntry, BlkIOStat, CPUStat, MemoryOomControl, MemoryStat};
    use proptest::prelude::*;
    use protobuf::reflect::ReflectValueRef;
    use protobuf::{Message, MessageFull};

    use super::*;
    use crate::cgroup::live::Fixture;

    fn of(controllers: &[&'static str], files: &[(&str, &str)]) -> messages::Metrics {
        let fixture = Fixture::of(files);
        let mut all = Controllers::default();
        for name in controllers {
            all.0.push((name, fixture.directory().to_owned()));
        }
        read(Some(metrics(&all)))
    }

    /// Decodes the message as containerd does.
    fn read<M: Message>(metrics: Option<Metrics>) -> M {
        M::parse_from_bytes(&metrics.unwrap().0).unwrap()
    }

    fn entry(line: &str) -> BlkIOEntry {
        read(blkio_entry(line).map(|(_, entry)| entry))
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
        let stat: CPUStat = read(cpu_stat(Some(used.directory()), Some(withheld.directory())));
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
        let stat: CPUStat = read(cpu_stat(Some(used.directory()), None));
        assert_eq!((stat.usage.total, stat.throttling.is_some()), (7, true));
        assert!(cpu_stat(None, Some(Fixture::of(&[]).directory())).is_none());
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
        let fixture = Fixture::of(&[("memory.stat", STAT)]);
        let stat: MemoryStat = read(memory_stat(fixture.directory()));
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
        let stat: MemoryStat = read(memory_stat(fixture.directory()));
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
        let control: MemoryOomControl = read(oom_control(fixture.directory()));
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
        let read = entry("254:0 Read 4096");
        assert_eq!(
            (read.major, read.minor, read.op.as_str(), read.value),
            (254, 0, "Read", 4096)
        );
        let time = entry("8:16 17");
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
        let stat: BlkIOStat = read(blkio_stat(
            Fixture::of(&[
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
        ));
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
        assert!(blkio_stat(Fixture::of(&[]).directory()).is_none());
        let idle = Fixture::of(&[("blkio.throttle.io_service_bytes_recursive", "Total 0\n")]);
        assert_eq!(blkio_stat(idle.directory()), Some(Metrics::default()));
    }

    #[test]
    fn devices_have_the_first_of_their_names() {
        let text = "major minor  #blocks  name\n\n 254        0   268435456 vda\n 254  0  1 again\n   8  16   1 sdb\n";
        let names = device_names(text);
        assert_eq!(
            (
                names.len(),
                names[&[254, 0]].as_str(),
                names[&[8, 16]].as_str()
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
            let entry = entry(&format!("{major}:{minor} {op} {value}"));
            prop_assert_eq!((entry.major, entry.minor), (u64::from(major), u64::from(minor)));
            prop_assert_eq!((entry.op, entry.value), (op, value));
        }
    }
}
