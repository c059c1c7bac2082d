//! Memory, see admin-guide/cgroup-v1/memory.

use containerd_shim_protos::cgroups::metrics::{MemoryEntry, MemoryOomControl, MemoryStat};
use protobuf::MessageField;

use crate::cgroup::directory::Directory;
use crate::cgroup::text::FlatKeyed;

/// The counters and the four accounts.
pub(super) fn stat(directory: &Directory) -> Option<MemoryStat> {
    let mut memory = counters(&directory.flat_keyed("memory.stat")?);
    memory.usage = MessageField::some(entry(directory, "memory"));
    // Missing without swap accounting (swapaccount=0); the entry stays, with zeroes.
    memory.swap = MessageField::some(entry(directory, "memory.memsw"));
    memory.kernel = MessageField::some(entry(directory, "memory.kmem"));
    memory.kernel_tcp = MessageField::some(entry(directory, "memory.kmem.tcp"));
    Some(memory)
}

fn counters(stat: &FlatKeyed) -> MemoryStat {
    MemoryStat {
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
        ..Default::default()
    }
}

fn entry(directory: &Directory, account: &str) -> MemoryEntry {
    let figure = |name: &str| directory.number(&format!("{account}.{name}")).unwrap_or(0);
    MemoryEntry {
        limit: figure("limit_in_bytes"),
        usage: figure("usage_in_bytes"),
        max: figure("max_usage_in_bytes"),
        failcnt: figure("failcnt"),
        ..Default::default()
    }
}

/// The reaction to running out of memory, and the count.
pub(super) fn oom_control(directory: &Directory) -> Option<MemoryOomControl> {
    let control = directory.flat_keyed("memory.oom_control")?;
    Some(MemoryOomControl {
        oom_kill_disable: control.of("oom_kill_disable"),
        under_oom: control.of("under_oom"),
        oom_kill: control.of("oom_kill"),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use protobuf::MessageFull;
    use protobuf::reflect::ReflectValueRef;

    use super::*;
    use crate::cgroup::live::Fixture;

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
        let stat = stat(&Fixture::of(&[("memory.stat", STAT)]).directory()).unwrap();
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
        let stat = stat(&fixture.directory()).unwrap();
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
}
