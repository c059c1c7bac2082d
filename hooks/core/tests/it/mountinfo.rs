//! The mountinfo parser: writing a table and reading it yields an equal table, and errors name the
//! line. The fuzz target `mountinfo` covers other input.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use bindguard_core::mount_table::{
    Device, FsType, MountAttributes, MountEntry, MountId, MountRoot, MountTable, Propagation,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(
        any::<u8>().prop_filter("a path holds no NUL", |b| *b != 0),
        0..24,
    )
}

fn path() -> impl Strategy<Value = PathBuf> {
    vec("[a-z \\\\\t\n#.]{1,8}", 0..5)
        .prop_map(|names| PathBuf::from(format!("/{}", names.join("/"))))
}

fn word() -> impl Strategy<Value = OsString> {
    "[a-z0-9=,:/\\\\]{0,20}".prop_map(OsString::from)
}

prop_compose! {
    fn propagation()(peer_group: Option<u32>, master: Option<u32>, propagate_from: Option<u32>, unbindable: bool,
                     unknown in vec("new_[a-z]{1,5}:[0-9]", 0..2)) -> Propagation {
        Propagation { peer_group, master, propagate_from, unbindable, unknown }
    }
}

prop_compose! {
    fn entry()(id: u32, parent: u32, major: u32, minor: u32, root in path(), deleted: bool, mount_point in bytes(),
               options in word(), propagation in propagation(), fs_type in "[a-z.]{1,8}", source in bytes(),
               super_options in word()) -> MountEntry {
        MountEntry {
            id: MountId(id), unique_id: None, parent: MountId(parent), device: Device { major, minor }, root: MountRoot { path: root, deleted },
            mount_point: OsString::from_vec(mount_point).into(), attributes: MountAttributes::from_options(&options), options, propagation, fs_type: FsType(fs_type),
            source: OsString::from_vec(source), super_options,
        }
    }
}

/// An NFS mount, whose source contains the path that the mount shows.
fn share() -> impl Strategy<Value = MountEntry> {
    (entry(), path()).prop_map(|(entry, path)| MountEntry {
        fs_type: FsType("nfs4".to_owned()),
        source: format!("server:{}", path.display()).into(),
        root: MountRoot { path, ..entry.root },
        ..entry
    })
}

proptest! {
    #[test]
    fn rendering_then_parsing_is_identity(entries in vec(prop_oneof![entry(), share()], 0..6)) {
        let table = MountTable::from_entries(entries);
        prop_assert_eq!(MountTable::from_mountinfo(&table.to_mountinfo()), Ok(table));
    }
}

#[test]
fn a_bad_line_is_named_and_the_rest_is_read() {
    let text = "22 27 0:21 / /proc rw,relatime - proc proc rw\n22 27 zero / /proc rw - proc proc rw\n\n23 27 0:22 / /sys rw - sysfs sysfs rw\n";
    let table = MountTable::from_mountinfo_in_part(text.as_bytes());
    assert_eq!(table.entries().len(), 2);
    let error = MountTable::from_mountinfo(text.as_bytes()).unwrap_err();
    assert_eq!(table.skipped(), Some(&error));
    assert_eq!(
        error.to_string(),
        "read line 2 of mountinfo, `22 27 zero / /proc rw - proc proc rw`: major:minor is not a number (and 1 more)"
    );
}

/// From WSL2 with Docker Desktop.
#[test]
fn spaces_in_the_options_of_a_filesystem_are_options() {
    let text = "\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
1146 21 0:149 / /Docker/host rw,noatime - 9p drvfs rw,aname=drvfs;path=C:\\Program Files\\App\\resources;symlinkroot=/mnt/,trans=virtio
";
    let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
    let options = table.entries()[1].super_options.to_str().unwrap();
    assert!(
        options.starts_with("rw,aname=")
            && options.ends_with("Files\\App\\resources;symlinkroot=/mnt/,trans=virtio"),
        "{options}"
    );
    assert_eq!(table.to_mountinfo(), text.as_bytes());
    let read_only = "1 0 0:3 / /c ro - cifs //s/My Files ro,unc=//s/My Files,ro\n";
    assert!(MountTable::from_mountinfo(read_only.as_bytes()).is_ok());
}

#[test]
fn an_empty_source_is_an_empty_source() {
    let entry = MountEntry::from_line(b"1 2 0:3 / /x rw shared:4 - tmpfs  rw").unwrap();
    assert_eq!(entry.source, "");
    assert_eq!(entry.propagation.peer_group, Some(4));
}

#[test]
fn a_deleted_root_is_separated_from_its_path() {
    let entry =
        MountEntry::from_line(b"1 2 8:1 /a\\040b/..x/app.conf//deleted /m rw - ext4 /dev/sda1 rw")
            .unwrap();
    assert_eq!(
        entry.root,
        MountRoot {
            path: "/a b/..x/app.conf".into(),
            deleted: true
        }
    );
}
