//! Runs the checks of the fuzz targets on their seeds and on all captures. A finding that became a
//! seed stays fixed, and the targets compile with the current code.

#![allow(clippy::disallowed_methods, reason = "seeds are files")]

use std::fs;
use std::path::Path;

use bindguard_testing::readers::{kubelet_paths, mountinfo, spec, statmount};

/// Checks each file below `folder`, and each prefix of short files, whatever the files were made
/// for.
fn hold(folder: &str, check: impl Fn(&[u8])) {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
                continue;
            }
            files += 1;
            let bytes = fs::read(entry.path()).unwrap();
            check(&bytes);
            if bytes.len() < 1000 {
                (0..bytes.len()).for_each(|end| check(&bytes[..end]));
            }
        }
    }
    assert!(files > 1, "no seeds in {folder}");
}

#[test]
fn of_mount_tables() {
    hold("../core/tests/fixtures", mountinfo::check);
    hold("../fuzz/seeds/mountinfo", mountinfo::check);
}

#[test]
fn of_statmount_buffers() {
    hold("../fuzz/seeds/statmount", statmount::check);
}

#[test]
fn of_specs() {
    hold("../fuzz/seeds/spec", spec::check);
    hold("../core/tests/fixtures/kubelet-1.36", spec::check);
}

#[test]
fn of_kubelet_paths() {
    hold("../fuzz/seeds/kubelet_paths", kubelet_paths::check);
}
