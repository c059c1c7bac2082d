//! Version 2: a single directory with the files of all controllers, see the kernel's
//! admin-guide/cgroup-v2.
//!
//! The message has the content of Go's `cgroup2`. Without a controller its files are missing, and
//! so is that part of the message; cpu.stat and the pressure files are in every cgroup.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use super::files::{
    FlatKeyed, Metrics, Pairs, device, figure, huge_page_sizes, nested_keyed, number_of, pids,
    rdma, text,
};

const CONTROLLERS: &str = "cgroup.controllers";
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// The keys of memory.stat in the order of the fields of `MemoryStat`, from field 1.
const MEMORY: [&str; 31] = [
    "anon",
    "file",
    "kernel_stack",
    "slab",
    "sock",
    "shmem",
    "file_mapped",
    "file_dirty",
    "file_writeback",
    "anon_thp",
    "inactive_anon",
    "active_anon",
    "inactive_file",
    "active_file",
    "unevictable",
    "slab_reclaimable",
    "slab_unreclaimable",
    "pgfault",
    "pgmajfault",
    "workingset_refault",
    "workingset_activate",
    "workingset_nodereclaim",
    "pgrefill",
    "pgscan",
    "pgsteal",
    "pgactivate",
    "pgdeactivate",
    "pglazyfree",
    "pglazyfreed",
    "thp_fault_alloc",
    "thp_collapse_alloc",
];
/// The files for the fields from 32.
const MEMORY_FILES: [&str; 6] = [
    "memory.current",
    "memory.max",
    "memory.swap.current",
    "memory.swap.max",
    "memory.peak",
    "memory.swap.peak",
];

/// All figures of the cgroup's files.
pub fn metrics(directory: &Path) -> Metrics {
    let mut metrics = Metrics::default();
    metrics.part(1, pids(directory, u64::MAX));
    metrics.part(2, cpu(directory));
    metrics.part(4, memory_stat(directory));
    metrics.part(5, rdma(directory));
    metrics.part(6, io_stat(directory));
    for pagesize in huge_page_sizes() {
        let file = |name| format!("hugetlb.{pagesize}.{name}");
        if let Some(current) = figure(directory, &file("current")) {
            let events = FlatKeyed::read(directory, &file("events"));
            let mut stat = Metrics::default();
            stat.numbers(1, &[current, figure(directory, &file("max")).unwrap_or(0)]);
            stat.bytes(3, pagesize.as_bytes());
            stat.numbers(4, &[events.map_or(0, |events| events.of("max"))]);
            metrics.part(7, Some(stat));
        }
    }
    metrics.part(8, memory_events(directory));
    metrics
}

fn cpu(directory: &Path) -> Option<Metrics> {
    let stat = FlatKeyed::read(directory, "cpu.stat")?;
    let used = ["usage_usec", "user_usec", "system_usec"];
    let throttled = ["nr_periods", "nr_throttled", "throttled_usec"];
    let mut cpu = Metrics::default();
    cpu.numbers(1, &used.map(|key| stat.of(key)));
    cpu.numbers(4, &throttled.map(|key| stat.of(key)));
    cpu.part(7, pressure(directory, "cpu.pressure"));
    cpu.numbers(8, &["nr_bursts", "burst_usec"].map(|key| stat.of(key)));
    Some(cpu)
}

/// The counters, the usage and the limits, see "Memory Interface Files" in admin-guide/cgroup-v2. No
/// limit (`max`) is the largest number.
fn memory_stat(directory: &Path) -> Option<Metrics> {
    let stat = FlatKeyed::read(directory, "memory.stat")?;
    let mut memory = Metrics::default();
    memory.numbers(1, &MEMORY.map(|key| stat.of(key)));
    memory.numbers(
        32,
        &MEMORY_FILES.map(|file| figure(directory, file).unwrap_or(0)),
    );
    memory.part(38, pressure(directory, "memory.pressure"));
    // Since 5.9 the kernel counts anonymous memory and files separately. The newest message of
    // containerd's cgroups library has fields for both parts; the older field is their sum.
    for (sum, parts, key) in [
        (20, 39, "workingset_refault"),
        (21, 41, "workingset_activate"),
    ] {
        let [anon, file] = ["anon", "file"].map(|kind| stat.of(&format!("{key}_{kind}")));
        if stat.get(key).is_none() {
            memory.numbers(sum, &[anon.saturating_add(file)]);
        }
        memory.numbers(parts, &[anon, file]);
    }
    Some(memory)
}

/// Counts of limits reached, and their effects, over the whole tree below.
fn memory_events(directory: &Path) -> Option<Metrics> {
    let events = FlatKeyed::read(directory, "memory.events")?;
    let keys = ["low", "high", "max", "oom", "oom_kill", "oom_group_kill"];
    let mut message = Metrics::default();
    message.numbers(1, &keys.map(|key| events.of(key)));
    Some(message)
}

/// Bytes read and written by block devices, and pressure; none if neither exists. See "IO Interface
/// Files" in admin-guide/cgroup-v2. A line is
/// `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0`.
fn io_stat(directory: &Path) -> Option<Metrics> {
    let usage = text(directory, "io.stat");
    let psi = pressure(directory, "io.pressure");
    if usage.is_none() && psi.is_none() {
        return None;
    }
    let mut stat = Metrics::default();
    for (name, pairs) in nested_keyed(&usage.unwrap_or_default()) {
        if let Some(at) = device(name) {
            let keys = ["rbytes", "wbytes", "rios", "wios"];
            let mut entry = Metrics::default();
            entry.numbers(1, &at);
            entry.numbers(3, &keys.map(|key| number_of(&pairs, key)));
            stat.part(1, Some(entry));
        }
    }
    stat.part(2, psi);
    Some(stat)
}

/// Pressure stall information: how long tasks waited for a resource, see the kernel's
/// accounting/psi. None if the kernel does not count (`psi=0`, or `cgroup.pressure` is 0).
///
/// Lines `some …` (some tasks waited) and `full …` (all tasks waited). Kernels before 5.13 have no
/// `full` for the processor.
fn pressure(directory: &Path, file: &str) -> Option<Metrics> {
    let mut stats = Metrics::default();
    for (name, pairs) in nested_keyed(&text(directory, file)?) {
        match name {
            "some" => stats.part(1, pressure_data(&pairs)),
            "full" => stats.part(2, pressure_data(&pairs)),
            _ => {}
        }
    }
    (stats != Metrics::default()).then_some(stats)
}

/// `avg10=0.12 avg60=0.03 avg300=0.00 total=123456`: percent, and microseconds. A line with an
/// unknown word is skipped.
fn pressure_data(pairs: &Pairs<'_>) -> Option<Metrics> {
    let mut data = Metrics::default();
    for (key, value) in pairs {
        let field = match *key {
            "avg10" => 1,
            "avg60" => 2,
            "avg300" => 3,
            "total" => {
                data.numbers(4, &[value.parse().ok()?]);
                continue;
            }
            _ => continue,
        };
        let percent: f64 = value.parse().ok()?;
        if !percent.is_finite() {
            return None;
        }
        data.percent(field, percent);
    }
    Some(data)
}

/// Enables the controllers of the topmost cgroup in all cgroups above this cgroup. A cgroup has a
/// controller if `cgroup.subtree_control` of every ancestor enables the controller, see cgroups(7).
///
/// A runtime enables the controllers for the container's limits, or leaves the work to systemd.
/// After each create Go's shim enables all controllers of the root, so that the figures exist. This
/// shim enables only the missing controllers. A failure is harmless: a cgroup with processes of its
/// own enables no controller, and in a user namespace the upper cgroups belong to a different user.
pub fn enable_controllers(cgroup: &Path) {
    let mut above = Vec::new();
    for path in cgroup.ancestors().skip(1) {
        if fs::metadata(path.join(SUBTREE_CONTROL)).is_err() {
            break;
        }
        above.push(path);
    }
    let Some(root) = above.last() else {
        return;
    };
    let Ok(all) = fs::read_to_string(root.join(CONTROLLERS)) else {
        return;
    };
    for cgroup in above.into_iter().rev() {
        if let Err(error) = hand_down(&cgroup.join(SUBTREE_CONTROL), &all) {
            tracing::debug!(%error, cgroup = %cgroup.display(), "some controllers stay disabled");
        }
    }
}

fn hand_down(file: &Path, all: &str) -> io::Result<()> {
    let enabled = fs::read_to_string(file)?;
    let mut result = Ok(());
    for name in all.split_whitespace() {
        if !enabled.split_whitespace().any(|enabled| enabled == name) {
            // A write for each name: the kernel accepts all names of a write, or no name.
            let opened = fs::OpenOptions::new().append(true).open(file);
            let written = opened.and_then(|mut file| file.write_all(format!("+{name}").as_bytes()));
            result = written.and(result);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::cgroups_v2::metrics as messages;
    use messages::{IOStat, MemoryEvents, MemoryStat, PSIStats};
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
        read(Some(metrics(fixture.directory())))
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
        let stat: MemoryStat = read(memory_stat(fixture.directory()));
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
        let stat: MemoryStat = read(memory_stat(fixture.directory()));
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
        let stat: MemoryStat = read(memory_stat(fixture.directory()));
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
        let fixture = Fixture::of(&[("memory.events", text)]);
        let events: MemoryEvents = read(memory_events(fixture.directory()));
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
        let stat: IOStat = read(io_stat(fixture.directory()));
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
        let stat: IOStat = read(io_stat(fixture.directory()));
        assert!(stat.usage.is_empty() && stat.psi.some.total == 5);
        assert!(io_stat(Fixture::of(&[]).directory()).is_none());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9:x]{0,8}( (rbytes|x)?=?[0-9x]{0,3}){0,3}\n){0,3}", any: String) {
            for text in [text, any] {
                let _ = io_stat(Fixture::of(&[("io.stat", &text)]).directory());
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

    /// Tests on a plain folder, whose files keep what is written.
    #[test]
    fn missing_controllers_are_enabled_from_the_top_down_to_the_parent() {
        let dir = tempfile::tempdir().unwrap();
        let (root, slice) = (dir.path().join("cgroup"), dir.path().join("cgroup/pods"));
        let container = slice.join("c");
        fs::create_dir_all(&container).unwrap();
        let control = |cgroup: &Path| fs::read_to_string(cgroup.join(SUBTREE_CONTROL)).unwrap();
        for (cgroup, enabled) in [(&root, "cpu memory"), (&slice, "cpu "), (&container, "")] {
            fs::write(cgroup.join(CONTROLLERS), "cpu io memory pids\n").unwrap();
            fs::write(cgroup.join(SUBTREE_CONTROL), enabled).unwrap();
        }
        enable_controllers(&container);
        assert_eq!(control(&root), "cpu memory+io+pids");
        assert_eq!(control(&slice), "cpu +io+memory+pids");
        assert_eq!(control(&container), "", "a container decides for itself");
        enable_controllers(Path::new("/nowhere/at/all"));
    }
}
