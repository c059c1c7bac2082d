//! The small files in a directory of a cgroup, and the protobuf messages that they fill.
//!
//! The files have three formats: one number, flat keyed, nested keyed, see "Interface Files" in the
//! kernel's admin-guide/cgroup-v2. The kernel generates the files' text at each read. A missing file
//! means that the kernel or the cgroup lacks the figure; callers leave the figure out. A line in an
//! unknown format is skipped, since kernels add lines.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;

use nix::libc;

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
#[derive(Debug, PartialEq, Eq)]
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
/// The fields are written by number. A table of a file's keys, in the order of the message's fields,
/// is then all that a controller needs. It can name a field that the generated types lack.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Metrics(pub Vec<u8>);

impl Metrics {
    /// Adds numbers to consecutive fields. As every field of proto3, 0 is not sent.
    pub fn numbers(&mut self, first: u64, numbers: &[u64]) {
        for (field, number) in (first..).zip(numbers) {
            if *number != 0 {
                self.varint(field << 3);
                self.varint(*number);
            }
        }
    }

    pub fn percent(&mut self, field: u64, percent: f64) {
        if percent != 0.0 {
            self.varint(field << 3 | 1);
            self.0.extend(percent.to_le_bytes());
        }
    }

    /// Adds a text, or packed numbers.
    pub fn bytes(&mut self, field: u64, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.delimited(field, bytes);
        }
    }

    /// Adds a message, even if it is empty: its presence is a fact.
    pub fn part(&mut self, field: u64, part: Option<Self>) {
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
    pub fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
}

/// The `PidsStat` of either version. `unlimited` is the limit that means no limit.
pub fn pids(directory: &Path, unlimited: u64) -> Option<Metrics> {
    let mut limit = figure(directory, "pids.max").unwrap_or(0);
    if limit == u64::MAX {
        limit = unlimited;
    }
    let mut stat = Metrics::default();
    stat.numbers(1, &[figure(directory, "pids.current")?, limit]);
    Some(stat)
}

/// The `RdmaStat` of either version, from lines of `mlx4_0 hca_handle=2 hca_object=max`; `max` is
/// the largest number of the message.
pub fn rdma(directory: &Path) -> Option<Metrics> {
    let mut stat = Metrics::default();
    for (field, file) in [(1, "rdma.current"), (2, "rdma.max")] {
        for (device, pairs) in nested_keyed(&text(directory, file)?) {
            let mut entry = Metrics::default();
            entry.bytes(1, device.as_bytes());
            let numbers = ["hca_handle", "hca_object"]
                .map(|key| number_of(&pairs, key).min(u64::from(u32::MAX)));
            entry.numbers(2, &numbers);
            stat.part(field, Some(entry));
        }
    }
    Some(stat)
}

/// The sizes of this kernel's huge pages, as they are written in the names of a cgroup's files
/// (`hugetlb.2MB.current`). They are read each time: usually two names, and a module can add a
/// third.
pub fn huge_page_sizes() -> Vec<String> {
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
