//! Memory, see "Memory Interface Files" in admin-guide/cgroup-v2.

use containerd_shim_protos::cgroups_v2::metrics::{MemoryEvents, MemoryStat};

use super::pressure;
use crate::cgroup::directory::Directory;
use crate::cgroup::text::FlatKeyed;

/// The counters, the usage and the limits. No limit (`max`) is the largest number.
pub(super) fn stat(directory: &Directory) -> Option<MemoryStat> {
    let stat = directory.flat_keyed("memory.stat")?;
    let mut memory = counters(&stat);
    add_split_working_set(&mut memory, &stat);
    let figure = |name| directory.number(name).unwrap_or(0);
    memory.usage = figure("memory.current");
    memory.usage_limit = figure("memory.max");
    memory.max_usage = figure("memory.peak");
    memory.swap_usage = figure("memory.swap.current");
    memory.swap_limit = figure("memory.swap.max");
    memory.swap_max_usage = figure("memory.swap.peak");
    memory.psi = pressure::of(directory, "memory.pressure").into();
    Some(memory)
}

fn counters(stat: &FlatKeyed) -> MemoryStat {
    MemoryStat {
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
        workingset_refault: whole(stat, "workingset_refault"),
        workingset_activate: whole(stat, "workingset_activate"),
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
        ..Default::default()
    }
}

/// Since 5.9 the kernel counts anonymous memory and files separately; the field is their sum.
fn whole(stat: &FlatKeyed, key: &str) -> u64 {
    let part = |kind: &str| stat.of(&format!("{key}_{kind}"));
    stat.get(key)
        .unwrap_or_else(|| part("anon").saturating_add(part("file")))
}

/// The newest message of containerd's cgroups library has fields for these parts. The crate lacks
/// the fields, so the parts are sent by field number. Older readers skip unknown fields.
fn add_split_working_set(memory: &mut MemoryStat, stat: &FlatKeyed) {
    let fields = [
        (39, "workingset_refault_anon"),
        (40, "workingset_refault_file"),
        (41, "workingset_activate_anon"),
        (42, "workingset_activate_file"),
    ];
    let unknown = memory.special_fields.mut_unknown_fields();
    for (number, key) in fields {
        // Like every field of proto3, 0 is not sent.
        if let Some(value) = stat.get(key).filter(|value| *value != 0) {
            unknown.add_varint(number, value);
        }
    }
}

/// Counts of limits reached, and their effects, over the whole tree below.
pub(super) fn events(directory: &Directory) -> Option<MemoryEvents> {
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

#[cfg(test)]
mod tests {
    use protobuf::reflect::ReflectValueRef;
    use protobuf::{Message, MessageFull};

    use super::*;
    use crate::cgroup::live::Fixture;

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
        let stat = stat(&fixture.directory()).unwrap();
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
        let stat = stat(&fixture.directory()).unwrap();
        assert_eq!(
            (stat.usage_limit, stat.swap_limit, stat.max_usage),
            (u64::MAX, u64::MAX, 0)
        );
    }

    #[test]
    fn a_working_set_in_two_parts_is_sent_whole_and_in_parts() {
        let text = "workingset_refault_anon 3\nworkingset_refault_file 4\nworkingset_activate_anon 0\n\
                    workingset_activate_file 5\n";
        let stat = stat(&Fixture::of(&[("memory.stat", text)]).directory()).unwrap();
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
        let events = events(&Fixture::of(&[("memory.events", text)]).directory()).unwrap();
        assert_eq!((events.low, events.high, events.max), (1, 2, 3));
        assert_eq!(
            (events.oom, events.oom_kill, events.oom_group_kill),
            (4, 5, 6)
        );
    }
}
