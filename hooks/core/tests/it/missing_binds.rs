//! Which binds of a spec are missing in the directory of a volume.

use bindguard_core::judge::Verdict;
use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{SpecBind, SubpathInContainer, missing_binds};
use bindguard_core::spec::SpecView;

const TABLE: &str = "\
10 1 8:1 / / rw - ext4 /dev/sda rw
11 10 8:1 /volumes/conf/..1 /etc/app rw - ext4 /dev/sda rw
12 11 8:1 /volumes/more/..1/y /etc/app/y rw - ext4 /dev/sda rw
13 10 8:1 /volumes/linked/..1 /real/app rw - ext4 /dev/sda rw
";

fn bind(destination: &str) -> SpecBind {
    SpecBind {
        destination: destination.into(),
        source: "/volumes".into(),
    }
}

#[test]
fn below_a_directory_of_the_spec_and_not_mounted() {
    let table = MountTable::from_mountinfo(TABLE.as_bytes()).unwrap();
    let mut subpaths = Vec::new();
    for mount_point in ["/etc/app", "/real/app"] {
        let mount = table
            .entries()
            .iter()
            .find(|it| it.mount_point.as_os_str() == mount_point);
        subpaths.push(SubpathInContainer {
            mount: mount.unwrap().clone(),
            parent: None,
            volume: "/volumes".into(),
            sub_path: "conf".into(),
            verdict: Verdict::Current,
            covers_its_equal: false,
        });
    }
    // /linked/app is a symlink of the image to /real/app, where the table has the mount.
    let binds = [
        "/etc/app",
        "/etc/app/x",
        "/etc/app/y",
        "/etc/apple",
        "/etc/other/z",
        "/linked/app",
        "/real/app/x",
    ]
    .map(bind);
    let missing = missing_binds(&table, &subpaths, &binds);
    assert_eq!(missing, [&bind("/etc/app/x")]);
    // The directory's own destination is in the spec: then its binds are looked for.
    let literal = [bind("/real/app"), bind("/real/app/x")];
    assert_eq!(
        missing_binds(&table, &subpaths, &literal),
        [&bind("/real/app/x")]
    );
    assert!(missing_binds(&table, &[], &binds).is_empty());
}

#[test]
fn the_binds_of_a_spec_have_both_paths() {
    let spec = br#"{"mounts":[{"destination":"/proc","type":"proc","source":"proc"},
        {"destination":"/a","type":"bind","source":"/volumes"}]}"#;
    let spec = SpecView::from_bytes(spec).unwrap();
    assert_eq!(SpecBind::of_spec(&spec), [bind("/a")]);
}
