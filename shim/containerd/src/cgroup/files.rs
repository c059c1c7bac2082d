//! The small files in a directory of a cgroup, and their formats: one number, flat keyed, nested
//! keyed, see "Interface Files" in the kernel's admin-guide/cgroup-v2.
//!
//! The kernel generates the files' text at each read. A missing file means that the kernel or the
//! cgroup lacks the figure; callers leave the figure out. A line in an unknown format is skipped,
//! since kernels add lines.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::libc;

/// A directory of a cgroup hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory(PathBuf);

impl Directory {
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A file's text; `None` if the cgroup lacks that file.
    pub fn text(&self, name: &str) -> Option<String> {
        text_of(&self.file(name))
    }

    /// The number in a file with a single number.
    pub fn number(&self, name: &str) -> Option<u64> {
        number(&self.text(name)?)
    }

    /// A file of `key value` lines.
    pub fn flat_keyed(&self, name: &str) -> Option<FlatKeyed> {
        Some(FlatKeyed::parse(&self.text(name)?))
    }

    /// The devices in a file of the RDMA controller, each as an entry of a version's own message.
    pub fn rdma<E>(&self, name: &str, entry: impl Fn(Rdma<'_>) -> E) -> Option<Vec<E>> {
        Some(rdma(&self.text(name)?).into_iter().map(entry).collect())
    }
}

/// As [`Directory::text`], of any path.
pub fn text_of(path: &Path) -> Option<String> {
    match fs::read(path) {
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

/// `NAME key=value key=value` lines: the name and its pairs.
///
/// A name without pairs is left out. In `io.stat`, some kernels forget the end of the line after a
/// device without pairs (`7:1 7:0 rbytes=0 …`): the pairs belong to the last name.
pub fn nested_keyed(text: &str) -> Vec<(&str, Vec<(&str, &str)>)> {
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

/// `major:minor`.
pub fn device(word: &str) -> Option<(u64, u64)> {
    let (major, minor) = word.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// An RDMA device's usage or limit.
#[derive(Debug, PartialEq, Eq)]
pub struct Rdma<'a> {
    pub device: &'a str,
    pub handles: u32,
    pub objects: u32,
}

/// Lines of `mlx4_0 hca_handle=2 hca_object=max`, equal in cgroup v1 and v2; `max` is the largest
/// number of the message.
fn rdma(text: &str) -> Vec<Rdma<'_>> {
    let mut devices = Vec::new();
    for (device, pairs) in nested_keyed(text) {
        let of = |key: &str| {
            let pair = pairs.iter().find(|(name, _)| *name == key);
            let value = pair.and_then(|(_, value)| number(value)).unwrap_or(0);
            u32::try_from(value).unwrap_or(u32::MAX)
        };
        devices.push(Rdma {
            device,
            handles: of("hca_handle"),
            objects: of("hca_object"),
        });
    }
    devices
}

/// The sizes of this kernel's huge pages, as they are written in the names of a cgroup's files
/// (`hugetlb.2MB.current`). They are read each time: usually two names, and a module can add a
/// third.
pub fn huge_page_sizes() -> Vec<String> {
    let mut sizes = Vec::new();
    for entry in fs::read_dir("/sys/kernel/mm/hugepages")
        .into_iter()
        .flatten()
        .flatten()
    {
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
    use proptest::prelude::*;

    use super::*;

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
        let expected = [
            Rdma {
                device: "mlx4_0",
                handles: 2,
                objects: 2000,
            },
            Rdma {
                device: "ocrdma1",
                handles: 3,
                objects: u32::MAX,
            },
        ];
        assert_eq!(rdma(text), expected);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
            let text = String::from_utf8_lossy(&bytes);
            let _ = (number(&text), FlatKeyed::parse(&text), rdma(&text), device(&text));
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
