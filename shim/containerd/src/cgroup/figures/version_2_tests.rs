use containerd_shim_protos::cgroups_v2::metrics as messages;
use messages::{IOStat, MemoryStat, PSIStats};
use proptest::prelude::*;
use protobuf::reflect::ReflectValueRef;
use protobuf::{Message, MessageFull};

use super::*;
use crate::cgroup::live::Fixture;

/// Decodes the message as containerd does.
fn read<M: Message>(metrics: Option<Metrics>) -> M {
    M::parse_from_bytes(&metrics.unwrap().0).unwrap()
}

fn metrics_of(fixture: &Fixture) -> messages::Metrics {
    read(Some(of_version_2(fixture.directory())))
}

fn psi(text: &str) -> Option<Metrics> {
    pressure(Fixture::of(&[("pressure", text)]).directory(), "pressure")
}

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
    let metrics = metrics_of(&fixture);
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
    assert!(metrics.pids.is_none() && metrics.memory.is_none() && metrics.memory_events.is_none());
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
    let metrics = metrics_of(&fixture);
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
    let Some(size) = huge_page_sizes().pop() else {
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
    let metrics = metrics_of(&fixture);
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

/// From the kernel's admin-guide/cgroup-v2. Each value is the number of a field in the message.
const STAT: &str = "\
    anon 1\nfile 2\nkernel 90\nkernel_stack 3\npagetables 91\nsec_pagetables 92\npercpu 93\nsock 5\nvmalloc 94\n\
    shmem 6\nzswap 95\nzswapped 96\nfile_mapped 7\nfile_dirty 8\nfile_writeback 9\nswapcached 97\nanon_thp 10\n\
    file_thp 98\nshmem_thp 99\ninactive_anon 11\nactive_anon 12\ninactive_file 13\nactive_file 14\nunevictable 15\n\
    slab_reclaimable 16\nslab_unreclaimable 17\nslab 4\nworkingset_refault 20\nworkingset_activate 21\n\
    workingset_restore_anon 89\nworkingset_nodereclaim 22\npgscan 24\npgsteal 25\npgfault 18\npgmajfault 19\n\
    pgrefill 23\npgactivate 26\npgdeactivate 27\npglazyfree 28\npglazyfreed 29\nthp_fault_alloc 30\n\
    thp_collapse_alloc 31\n";

#[test]
fn every_counter_is_in_its_field() {
    let fixture = Fixture::of(&[
        ("memory.stat", STAT),
        ("memory.current", "32\n"),
        ("memory.max", "33\n"),
        ("memory.swap.current", "34\n"),
        ("memory.swap.max", "35\n"),
        ("memory.peak", "36\n"),
        ("memory.swap.peak", "37\n"),
        (
            "memory.pressure",
            "some avg10=0.00 total=38\nfull avg10=0.00 total=39\n",
        ),
    ]);
    let stat: MemoryStat = read(memory_of_version_2(fixture.directory()));
    for number in 1..=37 {
        let field = MemoryStat::descriptor().field_by_number(number).unwrap();
        let value = field.get_singular(&stat);
        assert!(
            matches!(value, Some(ReflectValueRef::U64(n)) if n == u64::from(number)),
            "{}",
            field.name()
        );
    }
    assert_eq!((stat.psi.some.total, stat.psi.full.total), (38, 39));
}

#[test]
fn no_limit_is_the_largest_number() {
    let fixture = Fixture::of(&[
        ("memory.stat", ""),
        ("memory.max", "max\n"),
        ("memory.swap.max", "max\n"),
    ]);
    let stat: MemoryStat = read(memory_of_version_2(fixture.directory()));
    assert_eq!(
        (stat.usage_limit, stat.swap_limit, stat.max_usage),
        (u64::MAX, u64::MAX, 0)
    );
}

#[test]
fn a_working_set_in_two_parts_is_sent_whole_and_in_parts() {
    let text = "workingset_refault_anon 3\nworkingset_refault_file 4\nworkingset_activate_anon 0\n\
                    workingset_activate_file 5\n";
    let fixture = Fixture::of(&[("memory.stat", text)]);
    let stat: MemoryStat = read(memory_of_version_2(fixture.directory()));
    assert_eq!((stat.workingset_refault, stat.workingset_activate), (7, 5));
    let mut numbers: Vec<u32> = stat
        .special_fields
        .unknown_fields()
        .iter()
        .map(|(number, _)| number)
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [39, 40, 42]);
}

#[test]
fn events_of_a_limit() {
    let text = "low 1\nhigh 2\nmax 3\noom 4\noom_kill 5\noom_group_kill 6\nsock_throttled 7\n";
    let events = metrics_of(&Fixture::of(&[("memory.events", text)])).memory_events;
    assert_eq!((events.low, events.high, events.max), (1, 2, 3));
    assert_eq!(
        (events.oom, events.oom_kill, events.oom_group_kill),
        (4, 5, 6)
    );
}

#[test]
fn devices_and_pressure() {
    // The first line is from admin-guide/cgroup-v2.
    let fixture = Fixture::of(&[
        (
            "io.stat",
            "8:16 rbytes=1459200 wbytes=314773504 rios=192 wios=353 dbytes=0 dios=0\n7:1\n",
        ),
        (
            "io.pressure",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n",
        ),
    ]);
    let stat: IOStat = read(io(fixture.directory()));
    let [entry] = stat.usage.as_slice() else {
        panic!("{:?}", stat.usage)
    };
    assert_eq!((entry.major, entry.minor), (8, 16));
    assert_eq!(
        (entry.rbytes, entry.wbytes, entry.rios, entry.wios),
        (1_459_200, 314_773_504, 192, 353)
    );
    assert_eq!(stat.psi.some.total, 5);
}

#[test]
fn pressure_is_there_without_the_controller() {
    let fixture = Fixture::of(&[("io.pressure", "some total=5\n")]);
    let stat: IOStat = read(io(fixture.directory()));
    assert!(stat.usage.is_empty() && stat.psi.some.total == 5);
    assert!(io(Fixture::of(&[]).directory()).is_none());
}

proptest! {
    #[test]
    fn no_text_panics(text in "([0-9:x]{0,8}( (rbytes|x)?=?[0-9x]{0,3}){0,3}\n){0,3}", any: String) {
        for text in [text, any] {
            let _ = io(Fixture::of(&[("io.stat", &text)]).directory());
        }
    }
}

#[test]
fn both_lines() {
    let text = "some avg10=1.50 avg60=0.25 avg300=0.00 total=42\nfull avg10=0.75 avg60=0.00 avg300=99.99 total=7\n";
    let stats: PSIStats = read(psi(text));
    assert_eq!(
        (stats.some.avg10, stats.some.avg60, stats.some.total),
        (1.5, 0.25, 42)
    );
    assert_eq!(
        (stats.full.avg10, stats.full.avg300, stats.full.total),
        (0.75, 99.99, 7)
    );
}

#[test]
fn an_odd_line_is_no_line() {
    let stats: PSIStats = read(psi(
        "some avg10=nan total=1\nfull avg10=0.00 new=1 total=2\nmost total=3\n",
    ));
    assert_eq!((stats.some.is_some(), stats.full.total), (false, 2));
    assert!(psi("").is_none() && psi("some total=x\n").is_none());
}

proptest! {
    #[test]
    fn no_text_of_pressure_panics(text in "(some|full|x)?( (avg10|total|x)=?[0-9.naif-]{0,5}){0,4}", any: String) {
        let _ = (psi(&text), psi(&any));
    }
}
