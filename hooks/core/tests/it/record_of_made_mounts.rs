//! Which mounts of a container the create or a refresh made.

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::proof::ExpectedBinds;

fn mount(unique_id: Option<u64>) -> MountEntry {
    let line = b"10 1 8:1 / / rw - ext4 /dev/sda rw\n";
    let mut mount = MountTable::from_mountinfo(line).unwrap().entries()[0].clone();
    mount.unique_id = unique_id;
    mount
}

#[test]
fn those_before_the_limit_and_the_newest_of_refreshes() {
    let mut record = ExpectedBinds {
        mounts_before: Some(100),
        ..ExpectedBinds::default()
    };
    assert!(record.has_made(&mount(Some(99))));
    assert!(!record.has_made(&mount(Some(100))));
    assert!(!record.has_made(&mount(None)));
    record.add_refreshed_mounts((1000..2000).collect());
    record.add_refreshed_mounts((2000..2100).collect());
    // 1024 are kept, the newest
    for (id, is_kept) in [
        (1000, false),
        (1075, false),
        (1076, true),
        (2099, true),
        (2100, false),
    ] {
        assert_eq!(record.has_made(&mount(Some(id))), is_kept, "{id}");
    }
    record.mounts_before = None;
    assert!(!record.has_made(&mount(Some(99))));
}
