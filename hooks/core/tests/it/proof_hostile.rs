//! Mount tables that have each expected bind, but not where the container can see the bind, or not
//! often enough.

use std::path::Path;

use bindguard_core::mount_table::MountTable;
use bindguard_core::proof::{Comparison, ExpectedBind, ExpectedBinds, ExpectedPropagation};
use bindguard_core::spec::SpecView;
use serde_json::json;

const HOST: &str = "28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n";
const ROOT: &str = "40 39 0:45 / / rw - overlay overlay rw\n50 40 0:50 / /proc rw - proc proc rw\n";

/// The destinations of a spec's binds that differ from a table, which has the root and `/proc` in
/// addition. A bind is its source, its destination, and its options.
fn different(binds: &[(&str, &str, &str)], table: &str) -> Vec<String> {
    let mut mounts = Vec::new();
    for (source, destination, options) in binds {
        let options: Vec<_> = options.split(',').collect();
        mounts.push(json!({"destination": destination, "source": source, "options": options}));
    }
    let spec = json!({ "mounts": mounts }).to_string();
    let spec = SpecView::from_bytes(spec.as_bytes()).unwrap();
    let host = MountTable::from_mountinfo(HOST.as_bytes()).unwrap();
    let mut expected = ExpectedBinds::default();
    for (bind, (source, ..)) in spec.binds().iter().zip(binds) {
        let propagation = ExpectedPropagation::NoPeer;
        let bind = ExpectedBind::new(bind, &host.entries()[0], Path::new(source), propagation);
        expected.binds.push(bind.unwrap());
    }
    let table = MountTable::from_mountinfo(format!("{ROOT}{table}").as_bytes()).unwrap();
    let mut comparison = Comparison::new(&expected);
    for mount in table.entries() {
        comparison.add(mount);
    }
    let mut different = Vec::new();
    for (bind, _) in comparison.differences() {
        different.push(bind.destination.display().to_string());
    }
    different
}

/// The line of a mount that shows `root` of the host's filesystem.
fn line(id: u32, parent: u32, root: &str, place: &str, options: &str) -> String {
    format!("{id} {parent} 8:1 {root} {place} {options} - ext4 /dev/sda1 rw\n")
}

const BIND: &str = "rbind,rslave";

#[test]
fn a_mount_proves_only_one_bind() {
    let binds = [("/srv", "/a", BIND), ("/srv", "/b", BIND)];
    let one = line(60, 40, "/srv", "/a", "rw");
    assert_eq!(different(&binds, &one), ["/b"]);
    let both = format!("{one}{}", line(61, 60, "/srv", "/a", "rw"));
    assert_eq!(different(&binds, &both), ["/b"]);
    let right = format!("{one}{}", line(61, 40, "/srv", "/b", "rw"));
    assert!(different(&binds, &right).is_empty());
}

#[test]
fn only_the_topmost_mount_of_a_stack_is_compared() {
    let binds = [("/srv", "/a", "rbind,rslave,ro")];
    let right = line(60, 40, "/srv", "/a", "ro");
    assert!(different(&binds, &right).is_empty());
    for above in [
        line(61, 60, "/srv", "/a", "rw"),
        line(61, 60, "/etc", "/a", "ro"),
        "61 60 8:1 /srv /a ro shared:9 - ext4 /dev/sda1 rw\n".to_owned(),
        "61 60 0:60 / /a ro - tmpfs tmpfs rw\n".to_owned(),
    ] {
        let table = format!("{right}{above}");
        assert_eq!(different(&binds, &table), ["/a"], "{above}");
        // The order of the lines is not the order of the stack.
        let table = format!("{above}{right}");
        assert_eq!(different(&binds, &table), ["/a"], "{above}");
    }
}

#[test]
fn the_last_bind_at_a_destination_is_the_topmost_mount() {
    let binds = [("/one", "/a", BIND), ("/two", "/a", BIND)];
    let stack = |lower: &str, upper: &str| {
        let lower = line(60, 40, lower, "/a", "rw");
        format!("{lower}{}", line(61, 60, upper, "/a", "rw"))
    };
    assert!(different(&binds, &stack("/one", "/two")).is_empty());
    assert!(!different(&binds, &stack("/two", "/one")).is_empty());
}

/// The parent of the covering mount is the root, not the bind.
#[test]
fn a_bind_below_a_mount_that_covers_it_is_not_seen() {
    let bind = line(60, 40, "/srv", "/a/b", "rw");
    let tmpfs = "61 40 0:60 / /a rw - tmpfs tmpfs rw\n";
    let binds = [("/srv", "/a/b", BIND)];
    assert_eq!(different(&binds, &format!("{bind}{tmpfs}")), ["/a/b"]);
    // The bind's parent is the tmpfs.
    let inside = line(62, 61, "/srv", "/a/b", "rw");
    assert!(different(&binds, &format!("{tmpfs}{inside}")).is_empty());
    // A later bind of the spec may cover the bind.
    let binds = [("/srv", "/a/b", BIND), ("/etc", "/a", BIND)];
    let outer = line(61, 40, "/etc", "/a", "rw");
    assert!(different(&binds, &format!("{bind}{outer}")).is_empty());
    let binds = [("/etc", "/a", BIND), ("/srv", "/a/b", BIND)];
    assert_eq!(different(&binds, &format!("{bind}{outer}")), ["/a/b"]);
}
