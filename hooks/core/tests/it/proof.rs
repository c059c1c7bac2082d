//! The comparison of a new container's mounts with the binds that its spec has.

use std::collections::HashMap;
use std::path::Path;

use bindguard_core::mount_table::MountTable;
use bindguard_core::proof::{
    AdmittedEntry, Comparison, Difference, ExpectedBind, ExpectedBinds, ExpectedPropagation,
};
use bindguard_core::spec::SpecView;

const HOST: &str = "28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n";
const PROC: &str = "50 40 0:50 / /proc rw,nosuid - proc proc rw\n";

/// The expectation for a bind of `/srv/data` at `/data` with these options.
fn expected(options: &str, propagation: ExpectedPropagation) -> ExpectedBinds {
    let options = serde_json::to_string(&options.split(',').collect::<Vec<_>>()).unwrap();
    let spec = format!(
        r#"{{"mounts":[{{"destination":"/data","type":"bind","source":"/srv/data","options":{options}}}]}}"#
    );
    let spec = SpecView::from_bytes(spec.as_bytes()).unwrap();
    let host = MountTable::from_mountinfo(HOST.as_bytes()).unwrap();
    let (bind, mount) = (&spec.binds()[0], &host.entries()[0]);
    let bind = ExpectedBind::new(bind, mount, Path::new("/srv/data"), propagation).unwrap();
    ExpectedBinds {
        binds: vec![bind],
        ..ExpectedBinds::default()
    }
}

fn compared(expected: &ExpectedBinds, table: &str) -> Option<Vec<Difference>> {
    let table = MountTable::from_mountinfo(table.as_bytes()).unwrap();
    let mut comparison = Comparison::new(expected);
    table
        .entries()
        .iter()
        .for_each(|mount| comparison.add(mount));
    let is_of_container = comparison.is_of_container;
    let found = comparison.differences();
    if !is_of_container {
        return None;
    }
    Some(
        found
            .into_iter()
            .map(|(_, difference)| difference)
            .collect(),
    )
}

fn with(options: &str, propagation: ExpectedPropagation, line: &str) -> String {
    let found = compared(&expected(options, propagation), &format!("{PROC}{line}\n")).unwrap();
    found.first().map(Difference::to_string).unwrap_or_default()
}

#[test]
fn flags_and_propagation_may_be_stricter_but_not_wider() {
    use ExpectedPropagation::{Any, NoPeer, Private, Slave};
    let mount = |options: &str, peers: &str| {
        format!("51 40 8:1 /srv/data /data {options},relatime {peers}- ext4 /dev/sda1 rw")
    };
    for (options, propagation, line, words) in [
        ("rbind", Any, mount("rw", "shared:1 "), ""),
        ("rbind,ro", Any, mount("ro,nosuid", ""), ""),
        ("rbind,ro,noexec", Any, mount("ro", ""), "is not noexec"),
        ("rbind,noexec", Any, mount("rw,nosuid,noexec", ""), ""),
        ("rro", Any, mount("rw", ""), "is not ro"),
        ("rbind", NoPeer, mount("rw", "master:1 "), ""),
        ("rbind", NoPeer, mount("rw", "shared:7 "), "propagates"),
        ("rbind", Private, mount("rw", ""), ""),
        ("rbind", Private, mount("rw", "master:1 "), "propagates"),
        ("rbind", Slave, mount("rw", "master:1 "), ""),
        ("rbind", Slave, mount("rw", ""), "no master"),
        (
            "rbind",
            Slave,
            mount("rw", "shared:7 master:1 "),
            "propagates",
        ),
    ] {
        let found = with(options, propagation, &line);
        assert!(
            found.contains(words) && found.is_empty() == words.is_empty(),
            "{options} {propagation:?} {line}: {found}"
        );
    }
}

#[test]
fn another_source_at_the_destination_is_a_difference() {
    let any = ExpectedPropagation::Any;
    for line in [
        "51 40 8:1 /srv/other /data rw - ext4 /dev/sda1 rw",
        "51 40 8:2 /srv/data /data rw - ext4 /dev/sdb1 rw",
        "51 40 8:1 /srv/data /data rw - xfs /dev/sda1 rw",
    ] {
        assert!(with("rbind", any, line).contains("shows /srv/"), "{line}");
    }
    let elsewhere = "52 40 8:1 /srv/data /other rw - ext4 /dev/sda1 rw";
    let wrong = "51 40 8:1 /srv/other /data rw - ext4 /dev/sda1 rw";
    assert!(with("rbind", any, &format!("{elsewhere}\n{wrong}")).contains("shows"));
    assert!(with("rbind", any, "51 40 0:9 / /tmp rw - tmpfs t rw").contains("nothing is"));
}

/// An update deletes a file that is mounted, and an image has links on the way to a destination.
#[test]
fn deleted_files_and_links_are_no_difference() {
    let any = ExpectedPropagation::Any;
    let deleted = "51 40 8:1 /srv/data//deleted /data rw - ext4 /dev/sda1 rw";
    assert_eq!(with("rbind", any, deleted), "");
    let beside = "51 40 8:1 /srv/data /var/data rw - ext4 /dev/sda1 rw";
    assert!(with("rbind", any, beside).contains("nothing is mounted"));
    let expected = expected("rbind", any);
    let table = MountTable::from_mountinfo(format!("{PROC}{beside}\n").as_bytes()).unwrap();
    let places = HashMap::from([(0, "/var/data".into())]);
    let mut comparison = Comparison::at_places(&expected, &places);
    for mount in table.entries() {
        comparison.add(mount);
    }
    assert!(comparison.differences().is_empty());
}

/// The init process that Kata and gVisor report has mounts of the sandbox.
#[test]
fn a_table_without_the_containers_mounts_proves_nothing() {
    let expected = expected("rbind", ExpectedPropagation::Any);
    assert_eq!(compared(&expected, "51 40 0:9 / / rw - tmpfs t rw\n"), None);
    assert_eq!(compared(&expected, ""), None);
}

#[test]
fn a_root_that_is_its_own_parent_and_a_place_with_a_longer_name_hide_no_bind() {
    let root = "40 40 0:9 / / rw - rootfs r rw";
    let bind = "51 40 8:1 /srv/data /data rw - ext4 /dev/sda1 rw";
    let beside = "52 40 0:10 / /dat rw - tmpfs t rw";
    let lines = [root, bind, beside].join("\n");
    assert_eq!(with("rbind", ExpectedPropagation::Any, &lines), "");
}

/// A sandbox can have a mount of its own at the place of a tmpfs of the spec.
#[test]
fn only_a_mount_at_the_place_of_a_bind_or_proc_is_of_the_container() {
    let mut expected = expected("rbind", ExpectedPropagation::Any);
    expected.entries = ["/data", "/tmp"].map(entry).into();
    assert_eq!(
        compared(&expected, "51 40 0:9 / /tmp rw - tmpfs t rw\n"),
        None
    );
    assert!(compared(&expected, "51 40 0:9 / /data rw - tmpfs t rw\n").is_some());
}

/// A symlink of the image leads a masked path to the place of the bind.
#[test]
fn a_bind_below_the_place_of_a_masked_path_is_not_compared() {
    let mut expected = expected("rbind", ExpectedPropagation::Any);
    expected.entries = vec![entry("/data")];
    expected.masked = vec!["/first".into(), "/link".into()];
    for (index, is_masked) in [(1, true), (2, true), (3, false)] {
        let places = HashMap::from([(index, "/data".into())]);
        let differences = Comparison::at_places(&expected, &places).differences();
        assert_eq!(differences.is_empty(), is_masked, "{index}");
    }
}

fn entry(destination: &str) -> AdmittedEntry {
    AdmittedEntry {
        destination: destination.into(),
        source: None,
    }
}

#[test]
fn a_source_without_a_path_in_its_filesystem_is_not_expected() {
    let spec = br#"{"mounts":[{"destination":"/data","type":"bind","source":"/srv/data"}]}"#;
    let spec = SpecView::from_bytes(spec).unwrap();
    let expected = |line: &str, path: &str| {
        let host = MountTable::from_mountinfo(line.as_bytes()).unwrap();
        let (bind, any) = (&spec.binds()[0], ExpectedPropagation::Any);
        ExpectedBind::new(bind, &host.entries()[0], Path::new(path), any)
    };
    assert!(expected(HOST, "/srv/data").is_some());
    let export = "30 28 0:40 / /srv rw - nfs4 server:/export rw\n";
    assert_eq!(expected(export, "/srv/data"), None);
    let elsewhere = "30 28 8:2 / /mnt rw - ext4 /dev/sdb rw\n";
    assert_eq!(expected(elsewhere, "/srv/data"), None);
}

#[test]
fn the_record_is_read_as_it_was_written() {
    let expected = expected("ro,nodev", ExpectedPropagation::Slave);
    let json = serde_json::to_string(&expected).unwrap();
    assert_eq!(
        serde_json::from_str::<ExpectedBinds>(&json).unwrap(),
        expected
    );
}

/// Before Linux 6.13 statmount(2) has no subtype: `fuse` in place of `fuse.sshfs`.
#[test]
fn a_table_without_subtypes_shows_the_same_source() {
    let mut expected = expected("rbind", ExpectedPropagation::Any);
    expected.binds[0].fs_type = "fuse.sshfs".to_owned();
    let table = |kind: &str| format!("51 40 8:1 /srv/data /data rw - {kind} x rw\n");
    for kind in ["fuse", "fuse.sshfs"] {
        assert_eq!(
            compared(&expected, &table(kind)),
            Some(Vec::new()),
            "{kind}"
        );
    }
    let other = compared(&expected, &table("fuse.other")).unwrap();
    assert_eq!(other.len(), 1);
}
