#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::path::Path;

use super::*;

const HOST: &str = "\
1 0 8:1 / / rw shared:1 - ext4 a rw
2 1 0:40 / /mnt/p rw shared:2 - tmpfs p rw
3 2 0:41 / /mnt/p/c rw shared:3 - tmpfs c rw
4 1 0:42 / /mnt/q rw - tmpfs q rw
5 4 0:43 / /mnt/q/c rw shared:5 - tmpfs d rw
";

/// The umount on the host that also unmounts the mount with this id in another namespace.
fn reaching(elsewhere: &str, id: u32) -> Option<String> {
    let [host, other] =
        [HOST, elsewhere].map(|text| MountTable::from_mountinfo(text.as_bytes()).unwrap());
    let mounts: Vec<_> = host
        .entries()
        .iter()
        .filter(|it| it.mount_point.starts_with("/mnt"))
        .collect();
    let spread = Spread::of(&mounts, &MountIndex::of(&host), [&host, &other].into_iter());
    let entry = other
        .entries()
        .iter()
        .find(|entry| entry.id.0 == id)
        .unwrap();
    let found = spread
        .reaching(entry, &MountIndex::of(&other))
        .map(|mount| mount.mount_point.as_path());
    found.map(|point: &Path| point.display().to_string())
}

#[test]
fn the_mount_below_decides_and_not_the_mount_itself() {
    let slave_of = |p: &str, c: &str| {
        format!(
            "11 0 8:1 / / rw master:1 - ext4 a rw\n12 11 0:40 / /mnt/p rw{p} - tmpfs p rw\n13 12 0:41 / /mnt/p/c rw{c} - tmpfs c rw\n"
        )
    };
    assert_eq!(
        reaching(&slave_of(" master:2", " master:3"), 13).as_deref(),
        Some("/mnt/p/c")
    );
    assert_eq!(
        reaching(&slave_of("", " master:3"), 13),
        None,
        "its parent is private"
    );
    assert_eq!(
        reaching(&slave_of(" master:2", ""), 13).as_deref(),
        Some("/mnt/p/c"),
        "it is private itself"
    );
    assert_eq!(reaching(&slave_of("", ""), 12).as_deref(), Some("/mnt/p"));
    let below_private = "11 0 0:42 / / rw - tmpfs q rw\n12 11 0:43 / /c rw master:5 - tmpfs d rw\n";
    assert_eq!(
        reaching(below_private, 12),
        None,
        "the host's own parent is private"
    );
}

#[test]
fn a_umount_goes_on_through_slaves_that_are_shared_and_to_other_names() {
    let through = "11 0 8:1 / / rw shared:9 master:1 - ext4 a rw\n20 0 8:1 /mnt /host rw master:9 - ext4 a rw\n21 20 0:40 / /host/p rw - tmpfs p rw\n";
    assert_eq!(reaching(through, 21).as_deref(), Some("/mnt/p"));
    let elsewhere = "20 0 8:1 /srv /host rw master:1 - ext4 a rw\n21 20 0:40 / /host/p rw master:2 - tmpfs p rw\n";
    assert_eq!(
        reaching(elsewhere, 21),
        None,
        "it is mounted at another place"
    );
}
