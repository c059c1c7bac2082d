//! Version 2: a single directory with the files of all controllers, see the kernel's
//! admin-guide/cgroup-v2.
//!
//! The message has the content of Go's `cgroup2`. Without a controller its files are missing, and
//! so is that part of the message; cpu.stat and the pressure files are in every cgroup.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, HugeTlbStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PSIData, PSIStats,
    PidsStat, RdmaEntry, RdmaStat,
};

use super::files::{Directory, FlatKeyed, device, huge_page_sizes, nested_keyed};

const CONTROLLERS: &str = "cgroup.controllers";
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// All figures of the cgroup's files.
pub fn metrics(directory: &Directory) -> Metrics {
    Metrics {
        pids: pids(directory).into(),
        cpu: cpu(directory).into(),
        memory: memory_stat(directory).into(),
        rdma: rdma(directory).into(),
        io: io_stat(directory).into(),
        hugetlb: hugetlb(directory),
        memory_events: memory_events(directory).into(),
        ..Default::default()
    }
}

fn pids(directory: &Directory) -> Option<PidsStat> {
    Some(PidsStat {
        current: directory.number("pids.current")?,
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
        psi: pressure(directory, "cpu.pressure").into(),
        nr_bursts: stat.of("nr_bursts"),
        burst_usec: stat.of("burst_usec"),
        ..Default::default()
    })
}

fn hugetlb(directory: &Directory) -> Vec<HugeTlbStat> {
    let mut all = Vec::new();
    for pagesize in huge_page_sizes() {
        let file = |name: &str| format!("hugetlb.{pagesize}.{name}");
        if let Some(current) = directory.number(&file("current")) {
            let events = directory.flat_keyed(&file("events"));
            all.push(HugeTlbStat {
                current,
                max: directory.number(&file("max")).unwrap_or(0),
                failcnt: events.map_or(0, |events| events.of("max")),
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

/// The counters, the usage and the limits, see "Memory Interface Files" in admin-guide/cgroup-v2. No
/// limit (`max`) is the largest number.
fn memory_stat(directory: &Directory) -> Option<MemoryStat> {
    let stat = directory.flat_keyed("memory.stat")?;
    let figure = |file| directory.number(file).unwrap_or(0);
    let mut memory = MemoryStat {
        anon: stat.of("anon"),
        file: stat.of("file"),
        kernel_stack: stat.of("kernel_stack"),
        slab: stat.of("slab"),
        sock: stat.of("sock"),
        shmem: stat.of("shmem"),
        file_mapped: stat.of("file_mapped"),
        file_dirty: stat.of("file_dirty"),
        file_writeback: stat.of("file_writeback"),
        anon_thp: stat.of("anon_thp"),
        inactive_anon: stat.of("inactive_anon"),
        active_anon: stat.of("active_anon"),
        inactive_file: stat.of("inactive_file"),
        active_file: stat.of("active_file"),
        unevictable: stat.of("unevictable"),
        slab_reclaimable: stat.of("slab_reclaimable"),
        slab_unreclaimable: stat.of("slab_unreclaimable"),
        pgfault: stat.of("pgfault"),
        pgmajfault: stat.of("pgmajfault"),
        workingset_refault: whole(&stat, "workingset_refault"),
        workingset_activate: whole(&stat, "workingset_activate"),
        workingset_nodereclaim: stat.of("workingset_nodereclaim"),
        pgrefill: stat.of("pgrefill"),
        pgscan: stat.of("pgscan"),
        pgsteal: stat.of("pgsteal"),
        pgactivate: stat.of("pgactivate"),
        pgdeactivate: stat.of("pgdeactivate"),
        pglazyfree: stat.of("pglazyfree"),
        pglazyfreed: stat.of("pglazyfreed"),
        thp_fault_alloc: stat.of("thp_fault_alloc"),
        thp_collapse_alloc: stat.of("thp_collapse_alloc"),
        usage: figure("memory.current"),
        usage_limit: figure("memory.max"),
        max_usage: figure("memory.peak"),
        swap_usage: figure("memory.swap.current"),
        swap_limit: figure("memory.swap.max"),
        swap_max_usage: figure("memory.swap.peak"),
        psi: pressure(directory, "memory.pressure").into(),
        ..Default::default()
    };
    // The newest message of containerd's cgroups library has fields for the parts of the working
    // set. The crate lacks the fields, so the parts are sent by field number. Older readers skip
    // unknown fields.
    let unknown = memory.special_fields.mut_unknown_fields();
    for (number, key) in [
        (39, "workingset_refault_anon"),
        (40, "workingset_refault_file"),
        (41, "workingset_activate_anon"),
        (42, "workingset_activate_file"),
    ] {
        // Like every field of proto3, 0 is not sent.
        if stat.of(key) != 0 {
            unknown.add_varint(number, stat.of(key));
        }
    }
    Some(memory)
}

/// Since 5.9 the kernel counts anonymous memory and files separately; the field is their sum.
fn whole(stat: &FlatKeyed, key: &str) -> u64 {
    let part = |kind: &str| stat.of(&format!("{key}_{kind}"));
    stat.get(key)
        .unwrap_or_else(|| part("anon").saturating_add(part("file")))
}

/// Counts of limits reached, and their effects, over the whole tree below.
fn memory_events(directory: &Directory) -> Option<MemoryEvents> {
    let events = directory.flat_keyed("memory.events")?;
    Some(MemoryEvents {
        low: events.of("low"),
        high: events.of("high"),
        max: events.of("max"),
        oom: events.of("oom"),
        oom_kill: events.of("oom_kill"),
        oom_group_kill: events.of("oom_group_kill"),
        ..Default::default()
    })
}

/// Bytes read and written by block devices, and pressure; none if neither exists. See "IO Interface
/// Files" in admin-guide/cgroup-v2.
fn io_stat(directory: &Directory) -> Option<IOStat> {
    let usage = directory.text("io.stat");
    let psi = pressure(directory, "io.pressure");
    if usage.is_none() && psi.is_none() {
        return None;
    }
    Some(IOStat {
        usage: usage.map(|text| entries(&text)).unwrap_or_default(),
        psi: psi.into(),
        ..Default::default()
    })
}

/// `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0`
fn entries(text: &str) -> Vec<IOEntry> {
    let mut entries = Vec::new();
    for (name, pairs) in nested_keyed(text) {
        let Some((major, minor)) = device(name) else {
            continue;
        };
        let of = |key: &str| {
            let pair = pairs.iter().find(|(name, _)| *name == key);
            pair.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
        };
        entries.push(IOEntry {
            major,
            minor,
            rbytes: of("rbytes"),
            wbytes: of("wbytes"),
            rios: of("rios"),
            wios: of("wios"),
            ..Default::default()
        });
    }
    entries
}

/// Pressure stall information: how long tasks waited for a resource, see the kernel's
/// accounting/psi. None if the kernel does not count (`psi=0`, or `cgroup.pressure` is 0).
fn pressure(directory: &Directory, file: &str) -> Option<PSIStats> {
    parse_pressure(&directory.text(file)?)
}

/// Lines `some …` (some tasks waited) and `full …` (all tasks waited). Kernels before 5.13 have no
/// `full` for the processor.
fn parse_pressure(text: &str) -> Option<PSIStats> {
    let mut stats = PSIStats::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("some") => stats.some = pressure_data(words).into(),
            Some("full") => stats.full = pressure_data(words).into(),
            _ => {}
        }
    }
    (stats.some.is_some() || stats.full.is_some()).then_some(stats)
}

/// `avg10=0.12 avg60=0.03 avg300=0.00 total=123456`: percent, and microseconds. A line with an
/// unknown word is skipped.
fn pressure_data<'a>(words: impl Iterator<Item = &'a str>) -> Option<PSIData> {
    let percent = |value: &str| {
        let percent: f64 = value.parse().ok()?;
        percent.is_finite().then_some(percent)
    };
    let mut data = PSIData::new();
    for word in words {
        let (key, value) = word.split_once('=')?;
        match key {
            "avg10" => data.avg10 = percent(value)?,
            "avg60" => data.avg60 = percent(value)?,
            "avg300" => data.avg300 = percent(value)?,
            "total" => data.total = value.parse().ok()?,
            _ => {}
        }
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
    use proptest::prelude::*;
    use protobuf::reflect::ReflectValueRef;
    use protobuf::{Message, MessageFull};

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
        let stat = memory_stat(&fixture.directory()).unwrap();
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
        let stat = memory_stat(&fixture.directory()).unwrap();
        assert_eq!(
            (stat.usage_limit, stat.swap_limit, stat.max_usage),
            (u64::MAX, u64::MAX, 0)
        );
    }

    #[test]
    fn a_working_set_in_two_parts_is_sent_whole_and_in_parts() {
        let text = "workingset_refault_anon 3\nworkingset_refault_file 4\nworkingset_activate_anon 0\n\
                    workingset_activate_file 5\n";
        let stat = memory_stat(&Fixture::of(&[("memory.stat", text)]).directory()).unwrap();
        assert_eq!((stat.workingset_refault, stat.workingset_activate), (7, 5));
        let back = MemoryStat::parse_from_bytes(&stat.write_to_bytes().unwrap()).unwrap();
        let mut numbers: Vec<u32> = back
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
        let events = memory_events(&Fixture::of(&[("memory.events", text)]).directory()).unwrap();
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
        let stat = io_stat(&fixture.directory()).unwrap();
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
        assert!(io_stat(&fixture.directory()).is_some_and(|stat| stat.usage.is_empty()));
        assert!(io_stat(&Fixture::of(&[]).directory()).is_none());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9:x]{0,8}( (rbytes|x)?=?[0-9x]{0,3}){0,3}\n){0,3}", any: String) {
            let _ = (entries(&text), entries(&any));
        }
    }

    #[test]
    fn both_lines() {
        let text = "some avg10=1.50 avg60=0.25 avg300=0.00 total=42\nfull avg10=0.75 avg60=0.00 avg300=99.99 total=7\n";
        let stats = parse_pressure(text).unwrap();
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
        let stats =
            parse_pressure("some avg10=nan total=1\nfull avg10=0.00 new=1 total=2\nmost total=3\n")
                .unwrap();
        assert_eq!((stats.some.is_some(), stats.full.total), (false, 2));
        assert!(parse_pressure("").is_none() && parse_pressure("some total=x\n").is_none());
    }

    proptest! {
        #[test]
        fn no_text_of_pressure_panics(text in "(some|full|x)?( (avg10|total|x)=?[0-9.naif-]{0,5}){0,4}", any: String) {
            let _ = (parse_pressure(&text), parse_pressure(&any));
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
