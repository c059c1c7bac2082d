//! The figures of a cgroup: the small files in its directories, and containerd's messages of
//! version 1 and version 2.
//!
//! The files have three formats: one number, flat keyed, nested keyed, see "Interface Files" in the
//! kernel's admin-guide/cgroup-v2. The kernel generates the files' text at each read. A missing file
//! means that the kernel or the cgroup lacks the figure; the figure is left out. A line in an
//! unknown format is skipped, since kernels add lines.
//!
//! Version 1 has a directory per controller, see the kernel's admin-guide/cgroup-v1. Its message is
//! that of Go's `cgroup1`. The message's readers use nested parts without a check that they exist
//! (`cpu.throttling`, `memory.swap`), so a part is set with all of its own parts or not at all.
//!
//! Version 2 has a single directory with the files of all controllers, see the kernel's
//! admin-guide/cgroup-v2. Its message has the content of Go's `cgroup2`. Without a controller its
//! files are missing, and so is that part of the message; cpu.stat and the pressure files are in
//! every cgroup.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;

use nix::libc;

use super::Controllers;

/// cpuacct.stat counts in USER_HZ, which is 100 on every architecture that containers run on.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// The keys of memory.stat of version 1, in the order of the fields of `MemoryStat` from field 1.
const MEMORY_1: &str = "cache rss rss_huge mapped_file dirty writeback pgpgin pgpgout pgfault \
    pgmajfault inactive_anon active_anon inactive_file active_file unevictable \
    hierarchical_memory_limit hierarchical_memsw_limit total_cache total_rss total_rss_huge \
    total_mapped_file total_dirty total_writeback total_pgpgin total_pgpgout total_pgfault \
    total_pgmajfault total_inactive_anon total_active_anon total_inactive_file total_active_file \
    total_unevictable";
/// The same of version 2.
const MEMORY_2: &str = "anon file kernel_stack slab sock shmem file_mapped file_dirty \
    file_writeback anon_thp inactive_anon active_anon inactive_file active_file unevictable \
    slab_reclaimable slab_unreclaimable pgfault pgmajfault workingset_refault workingset_activate \
    workingset_nodereclaim pgrefill pgscan pgsteal pgactivate pgdeactivate pglazyfree pglazyfreed \
    thp_fault_alloc thp_collapse_alloc";

/// A file's text; `None` if the cgroup lacks that file.
pub fn text(directory: &Path, name: &str) -> Option<String> {
    let path = directory.join(name);
    match fs::read(&path) {
        Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) => {
            if !is_absent(&error) {
                log::debug!(path:% = path.display(), error:%; "a figure cannot be read");
            }
            None
        }
    }
}

/// True if there is no such file, if it was removed while open (ENODEV), or if the kernel does not
/// count it (EOPNOTSUPP, as pressure returns with `psi=0`).
pub fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP)
    )
}

/// The number in a file with a single number.
pub fn figure(directory: &Path, name: &str) -> Option<u64> {
    number(&text(directory, name)?)
}

/// A number in the format of these files. `max`, no limit, is the largest number. A negative
/// number, which some kernels show for a counter that ran below zero, is 0.
pub fn number(text: &str) -> Option<u64> {
    match text.trim() {
        "max" => Some(u64::MAX),
        word => match word.strip_prefix('-') {
            Some(below_zero) => below_zero.parse::<u64>().ok().map(|_| 0),
            None => word.parse().ok(),
        },
    }
}

/// `key value` lines.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FlatKeyed(HashMap<String, u64>);

impl FlatKeyed {
    pub fn read(directory: &Path, name: &str) -> Option<Self> {
        Some(Self::parse(&text(directory, name)?))
    }

    pub fn parse(text: &str) -> Self {
        let mut pairs = HashMap::new();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            if let (Some(key), Some(value), None) = (words.next(), words.next(), words.next())
                && let Some(value) = number(value)
            {
                pairs.insert(key.to_owned(), value);
            }
        }
        Self(pairs)
    }

    /// A line's number, if the line exists.
    pub fn get(&self, key: &str) -> Option<u64> {
        self.0.get(key).copied()
    }

    /// A line's number for a message, in which a missing figure is 0 (proto3 cannot express a
    /// missing number).
    pub fn of(&self, key: &str) -> u64 {
        self.get(key).unwrap_or(0)
    }
}

pub type Pairs<'a> = Vec<(&'a str, &'a str)>;

/// `NAME key=value key=value` lines: the name and its pairs.
///
/// A name without pairs is left out. In `io.stat`, some kernels forget the end of the line after a
/// device without pairs (`7:1 7:0 rbytes=0 …`): the pairs belong to the last name.
pub fn nested_keyed(text: &str) -> Vec<(&str, Pairs<'_>)> {
    let mut found = Vec::new();
    for line in text.lines() {
        let (mut name, mut pairs) = (None, Vec::new());
        for word in line.split_ascii_whitespace() {
            match word.split_once('=') {
                Some(pair) => pairs.push(pair),
                None if pairs.is_empty() => name = Some(word),
                None => {}
            }
        }
        if let Some(name) = name
            && !pairs.is_empty()
        {
            found.push((name, pairs));
        }
    }
    found
}

/// The number of a pair; 0 without this key.
pub fn number_of(pairs: &Pairs<'_>, key: &str) -> u64 {
    let pair = pairs.iter().find(|(name, _)| *name == key);
    pair.and_then(|(_, value)| number(value)).unwrap_or(0)
}

/// `major:minor`.
pub fn device(word: &str) -> Option<[u64; 2]> {
    let (major, minor) = word.split_once(':')?;
    Some([major.parse().ok()?, minor.parse().ok()?])
}

/// A message of containerd's metrics.proto, as its bytes.
///
/// The fields are written by number. A list of a file's keys, in the order of the message's fields,
/// is then all that a controller needs. It can name a field that the generated types lack.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Metrics(pub Vec<u8>);

impl Metrics {
    /// The keys of a file, from field 1.
    fn of_file(directory: &Path, file: &str, keys: &str) -> Option<Self> {
        let counters = FlatKeyed::read(directory, file)?;
        let mut message = Self::default();
        message.keys(1, &counters, keys);
        Some(message)
    }

    /// Adds the numbers of keys to consecutive fields.
    fn keys(&mut self, first: u64, counters: &FlatKeyed, keys: &str) {
        let keys = keys.split_ascii_whitespace();
        self.numbers(first, keys.map(|key| counters.of(key)));
    }

    /// Adds the numbers in files, whose names begin with the same word, to consecutive fields.
    fn files(&mut self, first: u64, directory: &Path, word: &str, names: &str) {
        let names = names.split_ascii_whitespace();
        let figures = names.map(|name| figure(directory, &format!("{word}.{name}")));
        self.numbers(first, figures.map(Option::unwrap_or_default));
    }

    /// Adds numbers to consecutive fields. As every field of proto3, 0 is not sent.
    fn numbers(&mut self, first: u64, numbers: impl IntoIterator<Item = u64>) {
        for (field, number) in (first..).zip(numbers) {
            if number != 0 {
                self.varint(field << 3);
                self.varint(number);
            }
        }
    }

    /// Adds a text, or packed numbers.
    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.delimited(field, bytes);
        }
    }

    /// Adds a message, even if it is empty: its presence is a fact.
    fn part(&mut self, field: u64, part: Option<Self>) {
        if let Some(part) = part {
            self.delimited(field, &part.0);
        }
    }

    fn delimited(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// See "Base 128 Varints" in protobuf's encoding.
    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
}

/// All figures of the controllers' files of version 1.
pub fn of_version_1(controllers: &Controllers) -> Metrics {
    let of = |name, message: fn(&Path) -> Option<Metrics>| message(controllers.get(name)?);
    let mut metrics = Metrics::default();
    if let Some(directory) = controllers.get("hugetlb") {
        for pagesize in huge_page_sizes() {
            let word = format!("hugetlb.{pagesize}");
            if figure(directory, &format!("{word}.usage_in_bytes")).is_some() {
                let names = "usage_in_bytes max_usage_in_bytes failcnt";
                let mut stat = Metrics::default();
                stat.files(1, directory, &word, names);
                stat.bytes(4, pagesize.as_bytes());
                metrics.part(1, Some(stat));
            }
        }
    }
    // In this version's message, unlike in version 2's, 0 means no limit.
    metrics.part(2, of("pids", |directory| pids(directory, 0)));
    let usage = of("cpuacct", cpu_usage);
    let throttling = of("cpu", |directory| {
        Metrics::of_file(
            directory,
            "cpu.stat",
            "nr_periods nr_throttled throttled_time",
        )
    });
    if usage.is_some() || throttling.is_some() {
        let mut cpu = Metrics::default();
        cpu.part(1, Some(usage.unwrap_or_default()));
        cpu.part(2, Some(throttling.unwrap_or_default()));
        metrics.part(3, Some(cpu));
    }
    metrics.part(4, of("memory", memory_of_version_1));
    metrics.part(5, of("blkio", blkio));
    metrics.part(6, of("rdma", rdma));
    // The reaction to running out of memory, and the count.
    let oom_control = of("memory", |directory| {
        let keys = "oom_kill_disable under_oom oom_kill";
        Metrics::of_file(directory, "memory.oom_control", keys)
    });
    metrics.part(9, oom_control);
    metrics
}

/// All figures of the files of a cgroup of version 2.
pub fn of_version_2(directory: &Path) -> Metrics {
    let mut metrics = Metrics::default();
    metrics.part(1, pids(directory, u64::MAX));
    if let Some(stat) = FlatKeyed::read(directory, "cpu.stat") {
        let keys = "usage_usec user_usec system_usec nr_periods nr_throttled throttled_usec";
        let mut cpu = Metrics::default();
        cpu.keys(1, &stat, keys);
        cpu.part(7, pressure(directory, "cpu.pressure"));
        cpu.keys(8, &stat, "nr_bursts burst_usec");
        metrics.part(2, Some(cpu));
    }
    metrics.part(4, memory_of_version_2(directory));
    metrics.part(5, rdma(directory));
    metrics.part(6, io(directory));
    for pagesize in huge_page_sizes() {
        let word = format!("hugetlb.{pagesize}");
        if figure(directory, &format!("{word}.current")).is_some() {
            let events = FlatKeyed::read(directory, &format!("{word}.events"));
            let mut stat = Metrics::default();
            stat.files(1, directory, &word, "current max");
            stat.bytes(3, pagesize.as_bytes());
            stat.keys(4, &events.unwrap_or_default(), "max");
            metrics.part(7, Some(stat));
        }
    }
    // Counts of limits reached, and their effects, over the whole tree below.
    let keys = "low high max oom oom_kill oom_group_kill";
    metrics.part(8, Metrics::of_file(directory, "memory.events", keys));
    metrics
}

/// Processor time, see admin-guide/cgroup-v1/cpuacct.
fn cpu_usage(directory: &Path) -> Option<Metrics> {
    let total = figure(directory, "cpuacct.usage")?;
    let ticks = FlatKeyed::read(directory, "cpuacct.stat").unwrap_or_default();
    let [kernel, user] =
        ["system", "user"].map(|key| ticks.of(key).saturating_mul(NANOSECONDS_PER_TICK));
    let mut usage = Metrics::default();
    usage.numbers(1, [total, kernel, user]);
    let mut packed = Metrics::default();
    for figure in per_cpu(&text(directory, "cpuacct.usage_percpu").unwrap_or_default()) {
        packed.varint(figure);
    }
    usage.bytes(4, &packed.0);
    Some(usage)
}

/// A single line, a number per processor. A bad number discards all: the next numbers would be
/// assigned to the wrong processor.
fn per_cpu(text: &str) -> Vec<u64> {
    let figures: Result<_, _> = text.split_ascii_whitespace().map(str::parse).collect();
    figures.unwrap_or_default()
}

/// The counters and the four accounts, see admin-guide/cgroup-v1/memory.
fn memory_of_version_1(directory: &Path) -> Option<Metrics> {
    let mut stat = Metrics::of_file(directory, "memory.stat", MEMORY_1)?;
    // The files of memsw are missing without swap accounting (swapaccount=0); the entry stays, with
    // zeroes.
    let accounts = ["memory", "memory.memsw", "memory.kmem", "memory.kmem.tcp"];
    for (field, account) in (33..).zip(accounts) {
        let names = "limit_in_bytes usage_in_bytes max_usage_in_bytes failcnt";
        let mut entry = Metrics::default();
        entry.files(1, directory, account, names);
        stat.part(field, Some(entry));
    }
    Some(stat)
}

/// The counters, the usage and the limits, see "Memory Interface Files" in admin-guide/cgroup-v2. No
/// limit (`max`) is the largest number.
fn memory_of_version_2(directory: &Path) -> Option<Metrics> {
    let stat = FlatKeyed::read(directory, "memory.stat")?;
    let mut memory = Metrics::default();
    memory.keys(1, &stat, MEMORY_2);
    memory.files(
        32,
        directory,
        "memory",
        "current max swap.current swap.max peak swap.peak",
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
            memory.numbers(sum, [anon.saturating_add(file)]);
        }
        memory.numbers(parts, [anon, file]);
    }
    Some(memory)
}

/// The `PidsStat` of either version. `unlimited` is the limit that means no limit.
fn pids(directory: &Path, unlimited: u64) -> Option<Metrics> {
    let mut limit = figure(directory, "pids.max").unwrap_or(0);
    if limit == u64::MAX {
        limit = unlimited;
    }
    let mut stat = Metrics::default();
    stat.numbers(1, [figure(directory, "pids.current")?, limit]);
    Some(stat)
}

/// The `RdmaStat` of either version, from lines of `mlx4_0 hca_handle=2 hca_object=max`; `max` is
/// the largest number of the message.
fn rdma(directory: &Path) -> Option<Metrics> {
    let mut stat = Metrics::default();
    for (field, file) in [(1, "rdma.current"), (2, "rdma.max")] {
        for (device, pairs) in nested_keyed(&text(directory, file)?) {
            let mut entry = Metrics::default();
            entry.bytes(1, device.as_bytes());
            let numbers = ["hca_handle", "hca_object"]
                .map(|key| number_of(&pairs, key).min(u64::from(u32::MAX)));
            entry.numbers(2, numbers);
            stat.part(field, Some(entry));
        }
    }
    Some(stat)
}

/// Block devices, see admin-guide/cgroup-v1/blkio-controller; `None` without a file of transferred
/// bytes.
///
/// The counting scheduler depends on the kernel: up to 4.20 the CFQ scheduler, then BFQ for the
/// devices that it schedules. The throttling layer always counts, for every device, but only bytes
/// and operations. Each list of the message is from the first source with entries. BFQ is read only
/// for figures that CFQ and the throttling layer lack.
fn blkio(directory: &Path) -> Option<Metrics> {
    let partitions = || text(Path::new("/proc"), "partitions").unwrap_or_default();
    // Read for the first entry.
    let devices = LazyCell::new(|| device_names(&partitions()));
    let mut stat = Metrics::default();
    let lists = "io_service_bytes io_serviced io_queued io_service_time io_wait_time io_merged \
        time sectors";
    for (field, name) in (1..).zip(lists.split_ascii_whitespace()) {
        let files = match name {
            "io_service_bytes" | "io_serviced" => vec![
                format!("{name}_recursive"),
                format!("throttle.{name}_recursive"),
                // Older kernels count per cgroup only, without the cgroups below; containers seldom
                // have any.
                format!("throttle.{name}"),
            ],
            _ => vec![format!("{name}_recursive"), format!("bfq.{name}_recursive")],
        };
        let (mut exists, mut has_entries) = (false, false);
        for file in files {
            let text = text(directory, &format!("blkio.{file}"));
            exists |= text.is_some();
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
        if field == 1 && !exists {
            return None;
        }
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
    entry.numbers(3, [major, minor, number(value)?]);
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

/// Bytes read and written by block devices, and pressure; none if neither exists. See "IO Interface
/// Files" in admin-guide/cgroup-v2. A line is
/// `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0`.
fn io(directory: &Path) -> Option<Metrics> {
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
            entry.numbers(1, at);
            entry.numbers(3, keys.map(|key| number_of(&pairs, key)));
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
                data.numbers(4, [value.parse().ok()?]);
                continue;
            }
            _ => continue,
        };
        let percent: f64 = value.parse().ok()?;
        if !percent.is_finite() {
            return None;
        }
        if percent != 0.0 {
            data.varint(field << 3 | 1);
            data.0.extend(percent.to_le_bytes());
        }
    }
    Some(data)
}

/// The sizes of this kernel's huge pages, as they are written in the names of a cgroup's files
/// (`hugetlb.2MB.current`). They are read each time: usually two names, and a module can add a
/// third.
fn huge_page_sizes() -> Vec<String> {
    let mut sizes = Vec::new();
    let entries = fs::read_dir("/sys/kernel/mm/hugepages");
    for entry in entries.into_iter().flatten().flatten() {
        sizes.extend(huge_page_size(&entry.file_name().to_string_lossy()));
    }
    sizes.sort_unstable();
    sizes
}

/// `hugepages-2048kB` is `2MB`. The kernel formats sizes as in mm/hugetlb_cgroup.c: whole
/// gigabytes, else whole megabytes, else kilobytes.
fn huge_page_size(name: &str) -> Option<String> {
    let kilobytes = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    let kilobytes: u64 = kilobytes.parse().ok()?;
    Some(match kilobytes {
        1_048_576.. => format!("{}GB", kilobytes >> 20),
        1024.. => format!("{}MB", kilobytes >> 10),
        _ => format!("{kilobytes}KB"),
    })
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod version_1_tests;
#[cfg(test)]
mod version_2_tests;
