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
