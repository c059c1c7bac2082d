//! The formats of a cgroup's files, see "Interface Files" in the kernel's admin-guide/cgroup-v2:
//! one number, flat keyed, nested keyed. Pure functions over text: a line in an unknown format is
//! skipped, since kernels add lines.

use std::collections::HashMap;

/// A number in the format of these files. `max`, no limit, is the largest number. A negative
/// number, which some kernels show for a counter that ran below zero, is 0.
pub(super) fn number(text: &str) -> Option<u64> {
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
pub(super) struct FlatKeyed(HashMap<String, u64>);

impl FlatKeyed {
    /// Reads the lines.
    pub(super) fn parse(text: &str) -> Self {
        let pair = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            match (words.next(), words.next(), words.next()) {
                (Some(key), Some(value), None) => Some((key.to_owned(), number(value)?)),
                _ => None,
            }
        };
        Self(text.lines().filter_map(pair).collect())
    }

    /// A line's number, if the line exists.
    pub(super) fn get(&self, key: &str) -> Option<u64> {
        self.0.get(key).copied()
    }

    /// A line's number for a message, in which a missing figure is 0 (proto3 cannot express a
    /// missing number).
    pub(super) fn of(&self, key: &str) -> u64 {
        self.get(key).unwrap_or(0)
    }
}

/// `NAME key=value key=value` lines: the name and its pairs.
///
/// A name without pairs is left out. In `io.stat`, some kernels forget the end of the line after a
/// device without pairs (`7:1 7:0 rbytes=0 …`): the pairs belong to the last name.
pub(super) fn nested_keyed(text: &str) -> impl Iterator<Item = (&str, Vec<(&str, &str)>)> {
    text.lines().filter_map(|line| {
        let words = line.split_ascii_whitespace();
        let name = words
            .clone()
            .take_while(|word| !word.contains('='))
            .last()?;
        let pairs: Vec<_> = words.filter_map(|word| word.split_once('=')).collect();
        (!pairs.is_empty()).then_some((name, pairs))
    })
}

/// `major:minor`.
pub(super) fn device(word: &str) -> Option<(u64, u64)> {
    let (major, minor) = word.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// An RDMA device's usage or limit.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rdma<'a> {
    pub(super) device: &'a str,
    pub(super) handles: u32,
    pub(super) objects: u32,
}

/// Lines of `mlx4_0 hca_handle=2 hca_object=max`, equal in cgroup v1 and v2; `max` is the largest
/// number of the message.
pub(super) fn rdma(text: &str) -> Vec<Rdma<'_>> {
    let of = |pairs: &[(&str, &str)], key: &str| {
        let value = pairs
            .iter()
            .find(|(name, _)| *name == key)
            .and_then(|(_, value)| number(value));
        u32::try_from(value.unwrap_or(0)).unwrap_or(u32::MAX)
    };
    nested_keyed(text)
        .map(|(device, pairs)| Rdma {
            device,
            handles: of(&pairs, "hca_handle"),
            objects: of(&pairs, "hca_object"),
        })
        .collect()
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
        let lines: Vec<_> = nested_keyed(text).collect();
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
            let read: Vec<_> = nested_keyed(&text).collect();
            prop_assert_eq!(read.len(), 1);
            let back: Vec<_> = read[0].1.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            prop_assert_eq!(back, pairs);
        }
    }
}
