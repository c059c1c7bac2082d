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
                tracing::debug!(path = %path.display(), %error, "a figure cannot be read");
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
mod tests {
    use containerd_shim_protos::cgroups::metrics::RdmaStat;
    use proptest::prelude::*;
    use protobuf::Message;

    use super::*;
    use crate::cgroup::live::Fixture;

    #[test]
    fn numbers() {
        assert_eq!(number("12\n"), Some(12));
        assert_eq!(number("max\n"), Some(u64::MAX));
        assert_eq!(number("18446744073709551615"), Some(u64::MAX));
        assert_eq!(number("-4096\n"), Some(0));
        for odd in ["", "\n", "--1", "-", "1 2", "0x1", "18446744073709551616"] {
            assert_eq!(number(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn flat_keyed_lines() {
        let flat = FlatKeyed::parse("anon 4096\nodd\nthree words 1\nfile max\nanon_thp -2\n");
        assert_eq!(
            (flat.of("anon"), flat.of("file"), flat.of("anon_thp")),
            (4096, u64::MAX, 0)
        );
        assert_eq!(
            (flat.get("odd"), flat.get("three"), flat.of("nothing")),
            (None, None, 0)
        );
    }

    #[test]
    fn a_device_without_figures_does_not_take_its_neighbours() {
        let text = "7:1 7:0 rbytes=1 wbytes=2\n8:0\n254:0 rbytes=3\n";
        let lines: Vec<_> = nested_keyed(text);
        assert_eq!(
            lines,
            [
                ("7:0", vec![("rbytes", "1"), ("wbytes", "2")]),
                ("254:0", vec![("rbytes", "3")])
            ]
        );
    }

    #[test]
    fn rdma_devices() {
        let text = "mlx4_0 hca_handle=2 hca_object=2000\nocrdma1 hca_handle=3 hca_object=max\n";
        let fixture = Fixture::of(&[("rdma.current", text), ("rdma.max", "")]);
        let stat = rdma(fixture.directory()).unwrap();
        let stat = RdmaStat::parse_from_bytes(&stat.0).unwrap();
        let devices: Vec<_> = stat
            .current
            .iter()
            .map(|entry| (&*entry.device, entry.hca_handles, entry.hca_objects))
            .collect();
        assert_eq!(devices, [("mlx4_0", 2, 2000), ("ocrdma1", 3, u32::MAX)]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
            let text = String::from_utf8_lossy(&bytes);
            let _ = (number(&text), FlatKeyed::parse(&text), device(&text));
            for (name, pairs) in nested_keyed(&text) {
                prop_assert!(!name.contains('=') && !pairs.is_empty());
            }
        }

        #[test]
        fn written_lines_are_read_back(lines in proptest::collection::hash_map("[a-z_]{1,12}", any::<u64>(), 0..20)) {
            let text: String = lines.iter().map(|(key, value)| format!("{key} {value}\n")).collect();
            prop_assert_eq!(FlatKeyed::parse(&text), FlatKeyed(lines));
        }

        #[test]
        fn pairs_come_back_in_order(values in proptest::collection::vec(any::<u64>(), 1..6)) {
            let pairs: Vec<(String, String)> =
                values.iter().enumerate().map(|(n, value)| (format!("k{n}"), value.to_string())).collect();
            let line: String = pairs.iter().map(|(key, value)| format!(" {key}={value}")).collect();
            let text = format!("254:0{line}\n");
            let read: Vec<_> = nested_keyed(&text);
            prop_assert_eq!(read.len(), 1);
            let back: Vec<_> = read[0].1.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            prop_assert_eq!(back, pairs);
        }
    }

    #[test]
    fn names_are_the_kernels() {
        assert_eq!(
            huge_page_size("hugepages-1048576kB").as_deref(),
            Some("1GB")
        );
        assert_eq!(huge_page_size("hugepages-2048kB").as_deref(), Some("2MB"));
        assert_eq!(huge_page_size("hugepages-64kB").as_deref(), Some("64KB"));
        assert_eq!(
            (
                huge_page_size("hugepages-kB"),
                huge_page_size("hugepages-2048MB"),
                huge_page_size("2048kB")
            ),
            (None, None, None)
        );
    }

    proptest! {
        #[test]
        fn any_name_is_read_without_panic(name: String) {
            let _ = huge_page_size(&name);
        }
    }
}

#[cfg(test)]
mod version_1_tests {
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
}

#[cfg(test)]
mod version_2_tests {
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
}
