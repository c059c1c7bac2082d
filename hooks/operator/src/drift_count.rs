//! The number of parts of the installation that other tools changed. The installer's pod writes the
//! number once a minute, and the agent reads it: only the installer evaluates a runtime's files.
//!
//! An old number is no number: the installer's pod has ended, or the node was started again.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, SystemTime};

use bindguard_sys::read_file;

use crate::root_program::open_of_root;

/// The file with the number.
pub const DRIFT_COUNT: &str = "/run/bindguard/drift-count";

const MAX_AGE: Duration = Duration::from_secs(10 * 60);
const MAX_SIZE: u64 = 32;

/// The number in a recent file that root alone can write.
pub fn recent(path: &Path) -> Option<u32> {
    let file = File::from(open_of_root(path).ok()??);
    let written = file.metadata().ok()?.modified().ok()?;
    let now = SystemTime::now();
    // a time that is yet to come is from before the clock was set
    now.duration_since(written)
        .ok()
        .filter(|age| *age < MAX_AGE)?;
    let text = read_file(path, MAX_SIZE).ok()?;
    String::from_utf8(text).ok()?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_number_that_is_old_or_of_others_is_unknown() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: not root");
            return;
        }
        let folder = tempfile::tempdir_in("/run").unwrap();
        let path = folder.path().join("drift-count");
        assert_eq!(recent(&path), None);
        for (text, number) in [("3\n", Some(3)), ("", None), ("-1\n", None), ("3 4", None)] {
            fs::write(&path, text).unwrap();
            assert_eq!(recent(&path), number, "{text:?}");
        }
        fs::write(&path, "3\n").unwrap();
        let now = SystemTime::now();
        for (time, number) in [
            (now - Duration::from_secs(300), Some(3)),
            (now - Duration::from_secs(900), None),
            (now + Duration::from_secs(900), None),
            (now, Some(3)),
        ] {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_modified(time).unwrap();
            assert_eq!(recent(&path), number);
        }
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        assert_eq!(recent(&path), None);

        fs::remove_file(&path).unwrap();
        symlink(folder.path(), &path).unwrap();
        assert_eq!(recent(&path), None);
    }
}
