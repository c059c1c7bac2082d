use containerd_shim_protos::cgroups::metrics as messages;
use messages::{BlkIOEntry, BlkIOStat, MemoryStat};
use proptest::prelude::*;
use protobuf::reflect::ReflectValueRef;
use protobuf::{Message, MessageFull};

use super::*;
use crate::cgroup::live::Fixture;

fn of(controllers: &[&'static str], files: &[(&str, &str)]) -> messages::Metrics {
    let fixture = Fixture::of(files);
    let mut all = Controllers::default();
    for name in controllers {
        all.insert(name, fixture.directory().to_owned());
    }
    read(Some(of_version_1(&all)))
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
        metrics.cpu.is_none() && metrics.memory.is_none() && metrics.memory_oom_control.is_none()
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
    let files = [
        ("cpuacct.usage", "2589794180066\n"),
        ("cpuacct.stat", "user 148474\nsystem 110505\n"),
        ("cpuacct.usage_percpu", "1282271994253 1307522797749 \n"),
        (
            "cpu.stat",
            "nr_periods 5\nnr_throttled 2\nthrottled_time 9\nnr_bursts 0\nburst_time 0\n",
        ),
    ];
    let stat = of(&["cpuacct", "cpu"], &files).cpu;
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
    let stat = of(&["cpuacct"], &[("cpuacct.usage", "7\n")]).cpu;
    assert_eq!((stat.usage.total, stat.throttling.is_some()), (7, true));
    assert!(of(&["cpu"], &[]).cpu.is_none());
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
    let stat: MemoryStat = read(memory_of_version_1(fixture.directory()));
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
    let stat: MemoryStat = read(memory_of_version_1(fixture.directory()));
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
    let file = ("memory.oom_control", "oom_kill_disable 1\nunder_oom 1\n");
    let control = of(&["memory"], &[file]).memory_oom_control;
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
    let stat: BlkIOStat = read(blkio(
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
    assert!(blkio(Fixture::of(&[]).directory()).is_none());
    let idle = Fixture::of(&[("blkio.throttle.io_service_bytes_recursive", "Total 0\n")]);
    assert_eq!(blkio(idle.directory()), Some(Metrics::default()));
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
