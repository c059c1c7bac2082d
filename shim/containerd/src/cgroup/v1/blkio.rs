//! Block devices, see admin-guide/cgroup-v1/blkio-controller.
//!
//! The counting scheduler depends on the kernel: up to 4.20 the CFQ scheduler, then BFQ for the
//! devices that it schedules. The throttling layer always counts, for every device, but only bytes
//! and operations. Each list of the message is from the first source with entries. BFQ is read only
//! for figures that CFQ and the throttling layer lack.

use std::collections::HashMap;
use std::path::Path;

use containerd_shim_protos::cgroups::metrics::{BlkIOEntry, BlkIOStat};

use crate::cgroup::directory::{Directory, text_of};
use crate::cgroup::text::{device, number};

type DeviceNames = HashMap<(u64, u64), String>;

/// All lists; `None` without a file of transferred bytes.
pub(super) fn stat(directory: &Directory) -> Option<BlkIOStat> {
    let throttle = |name: &str| {
        [
            name.to_owned(),
            format!("throttle.{name}"),
            format!("throttle.{}", own(name)),
        ]
    };
    let scheduler = |name: &str| [name.to_owned(), format!("bfq.{name}")];
    let bytes = first(directory, &throttle("io_service_bytes_recursive"))?;
    let mut stat = BlkIOStat {
        io_service_bytes_recursive: bytes,
        io_serviced_recursive: first(directory, &throttle("io_serviced_recursive"))
            .unwrap_or_default(),
        io_queued_recursive: first(directory, &scheduler("io_queued_recursive"))
            .unwrap_or_default(),
        io_service_time_recursive: first(directory, &scheduler("io_service_time_recursive"))
            .unwrap_or_default(),
        io_wait_time_recursive: first(directory, &scheduler("io_wait_time_recursive"))
            .unwrap_or_default(),
        io_merged_recursive: first(directory, &scheduler("io_merged_recursive"))
            .unwrap_or_default(),
        io_time_recursive: first(directory, &scheduler("time_recursive")).unwrap_or_default(),
        sectors_recursive: first(directory, &scheduler("sectors_recursive")).unwrap_or_default(),
        ..Default::default()
    };
    name_devices(&mut stat);
    Some(stat)
}

/// Older kernels count per cgroup only, without the cgroups below; containers seldom have any.
fn own(name: &str) -> &str {
    name.trim_end_matches("_recursive")
}

/// The entries of the first file that has any; an empty list if all are empty, none if there is no
/// such file.
fn first(directory: &Directory, names: &[String]) -> Option<Vec<BlkIOEntry>> {
    let mut found = None;
    for name in names {
        let Some(text) = directory.text(&format!("blkio.{name}")) else {
            continue;
        };
        let entries: Vec<_> = text.lines().filter_map(entry).collect();
        if !entries.is_empty() {
            return Some(entries);
        }
        found = Some(entries);
    }
    found
}

/// `254:0 Read 4096`, or `254:0 4096` for time and sectors. The line `Total 8192` names no device
/// and is left out.
fn entry(line: &str) -> Option<BlkIOEntry> {
    let mut words = line.split_ascii_whitespace();
    let (major, minor) = device(words.next()?)?;
    let (op, value) = match (words.next()?, words.next(), words.next()) {
        (value, None, None) => ("", value),
        (op, Some(value), None) => (op, value),
        _ => return None,
    };
    Some(BlkIOEntry {
        op: op.to_owned(),
        major,
        minor,
        value: number(value)?,
        ..Default::default()
    })
}

fn name_devices(stat: &mut BlkIOStat) {
    let lists = [
        &mut stat.io_service_bytes_recursive,
        &mut stat.io_serviced_recursive,
        &mut stat.io_queued_recursive,
        &mut stat.io_service_time_recursive,
        &mut stat.io_wait_time_recursive,
        &mut stat.io_merged_recursive,
        &mut stat.io_time_recursive,
        &mut stat.sectors_recursive,
    ];
    let mut entries = lists.into_iter().flatten().peekable();
    if entries.peek().is_none() {
        return;
    }
    let names = text_of(Path::new("/proc/partitions"))
        .map(|text| device_names(&text))
        .unwrap_or_default();
    for entry in entries {
        entry.device = names
            .get(&(entry.major, entry.minor))
            .cloned()
            .unwrap_or_default();
    }
}

/// The lines of /proc/partitions: `major minor  #blocks  name`, after a heading. The first of two
/// names is used.
fn device_names(partitions: &str) -> DeviceNames {
    let mut names = DeviceNames::new();
    for line in partitions.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(major), Some(minor), Some(name)) = (words.next(), words.next(), words.nth(1))
        else {
            continue;
        };
        if let (Ok(major), Ok(minor)) = (major.parse(), minor.parse()) {
            names
                .entry((major, minor))
                .or_insert_with(|| format!("/dev/{name}"));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cgroup::live::Fixture;

    #[test]
    fn lines_with_and_without_an_operation() {
        let read = entry("254:0 Read 4096").unwrap();
        assert_eq!(
            (read.major, read.minor, read.op.as_str(), read.value),
            (254, 0, "Read", 4096)
        );
        let time = entry("8:16 17").unwrap();
        assert_eq!((time.minor, time.op.as_str(), time.value), (16, "", 17));
        for odd in [
            "Total 4096",
            "",
            "254:0",
            "254:0 Read 1 2",
            "254:x Read 1",
            "254:0 Read x",
        ] {
            assert_eq!(entry(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn the_throttling_layer_counts_where_no_scheduler_does() {
        // From Linux 6.18 with a disk that BFQ does not schedule.
        let stat = stat(
            &Fixture::of(&[
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
        )
        .unwrap();
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
        assert!(stat(&Fixture::of(&[]).directory()).is_none());
        let idle = Fixture::of(&[("blkio.throttle.io_service_bytes_recursive", "Total 0\n")]);
        assert_eq!(stat(&idle.directory()), Some(BlkIOStat::default()));
    }

    #[test]
    fn devices_have_the_first_of_their_names() {
        let text = "major minor  #blocks  name\n\n 254        0   268435456 vda\n 254  0  1 again\n   8  16   1 sdb\n";
        let names = device_names(text);
        assert_eq!(
            (
                names.len(),
                names[&(254, 0)].as_str(),
                names[&(8, 16)].as_str()
            ),
            (2, "/dev/vda", "/dev/sdb")
        );
    }

    proptest! {
        #[test]
        fn any_line_is_read_without_panic(text: String) {
            let _ = (entry(&text), device_names(&text));
        }

        #[test]
        fn entries_survive(major: u32, minor: u32, value: u64, op in "[A-Z][a-z]{0,8}") {
            let entry = entry(&format!("{major}:{minor} {op} {value}")).unwrap();
            prop_assert_eq!((entry.major, entry.minor), (u64::from(major), u64::from(minor)));
            prop_assert_eq!((entry.op, entry.value), (op, value));
        }
    }
}
