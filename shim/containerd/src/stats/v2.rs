//! Version 2: one directory, see the kernel's admin-guide/cgroup-v2.

use std::{fs, path::Path};

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PidsStat,
};
use protobuf::MessageField;

use super::keyed::{Keyed, fill, single};

/// All that this cgroup's files say.
pub(super) fn read(directory: &Path) -> Metrics {
    Metrics {
        pids: MessageField::from_option(pids(directory)),
        cpu: MessageField::from_option(cpu(directory)),
        memory: MessageField::from_option(memory(directory)),
        memory_events: MessageField::from_option(memory_events(directory)),
        io: MessageField::from_option(io(directory)),
        ..Default::default()
    }
}

fn pids(directory: &Path) -> Option<PidsStat> {
    let current = single(directory, "pids.current")?;
    Some(PidsStat { current, limit: single(directory, "pids.max").unwrap_or(0), ..Default::default() })
}

fn cpu(directory: &Path) -> Option<CPUStat> {
    let lines = Keyed::read(directory, "cpu.stat")?;
    let mut cpu = CPUStat::new();
    fill!(cpu from lines; usage_usec, user_usec, system_usec, nr_periods, nr_throttled, throttled_usec, nr_bursts, burst_usec);
    Some(cpu)
}

fn memory(directory: &Path) -> Option<MemoryStat> {
    let lines = Keyed::read(directory, "memory.stat")?;
    let mut memory = MemoryStat::new();
    fill!(memory from lines;
        anon, file, kernel_stack, slab, sock, shmem, file_mapped, file_dirty, file_writeback, anon_thp,
        inactive_anon, active_anon, inactive_file, active_file, unevictable, slab_reclaimable, slab_unreclaimable,
        pgfault, pgmajfault, workingset_refault, workingset_activate, workingset_nodereclaim,
        pgrefill, pgscan, pgsteal, pgactivate, pgdeactivate, pglazyfree, pglazyfreed,
        thp_fault_alloc, thp_collapse_alloc,
    );
    let number = |file| single(directory, file).unwrap_or(0);
    memory.usage = number("memory.current");
    memory.usage_limit = number("memory.max");
    memory.max_usage = number("memory.peak");
    memory.swap_usage = number("memory.swap.current");
    memory.swap_limit = number("memory.swap.max");
    memory.swap_max_usage = number("memory.swap.peak");
    Some(memory)
}

fn memory_events(directory: &Path) -> Option<MemoryEvents> {
    let lines = Keyed::read(directory, "memory.events")?;
    let mut events = MemoryEvents::new();
    fill!(events from lines; low, high, max, oom, oom_kill, oom_group_kill);
    Some(events)
}

fn io(directory: &Path) -> Option<IOStat> {
    let text = fs::read_to_string(directory.join("io.stat")).ok()?;
    Some(IOStat { usage: text.lines().filter_map(io_entry).collect(), ..Default::default() })
}

/// `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0`
fn io_entry(line: &str) -> Option<IOEntry> {
    let (device, figures) = line.split_once(' ')?;
    let (major, minor) = device.split_once(':')?;
    let of = |name: &str| {
        let figure = figures.split(' ').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        figure.and_then(|figure| figure.parse().ok()).unwrap_or(0)
    };
    Some(IOEntry {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        rbytes: of("rbytes"),
        wbytes: of("wbytes"),
        rios: of("rios"),
        wios: of("wios"),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_said_and_the_rest_is_unset() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cpu.stat"), "usage_usec 9\nuser_usec 5\nsystem_usec 4\n").unwrap();
        fs::write(dir.path().join("memory.stat"), "anon 4096\nfile 1\n").unwrap();
        fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        fs::write(dir.path().join("io.stat"), "254:0 rbytes=1 wbytes=2 rios=3 wios=4\n7:1\n").unwrap();
        let metrics = read(dir.path());
        assert_eq!((metrics.cpu.usage_usec, metrics.cpu.system_usec), (9, 4));
        assert_eq!((metrics.memory.anon, metrics.memory.usage_limit), (4096, u64::MAX));
        assert_eq!((metrics.io.usage.len(), metrics.io.usage[0].wios), (1, 4));
        assert!(metrics.pids.is_none());
    }
}
