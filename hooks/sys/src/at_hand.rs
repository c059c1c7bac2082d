//! What can be walked to without waiting for anybody.
//!
//! Nearly always the kernel has the whole way in its cache, and says so in a few microseconds: openat2(2), `RESOLVE_CACHED`.
//! What the cache lacks need not be a server's either. tmpfs, and so most of /run, keeps nothing of what is not there, and
//! a file that nobody read since the node was started is on a disk. So the way is followed for as far as it is known, and
//! one step more where that ends on a local filesystem. Another step could be through a link, and lead anywhere.

use std::io::{self, ErrorKind};
use std::path::Path;

use crate::handle::Handle;

/// Holds what an absolute path leads to, a final symlink followed, when nobody has to be asked for the way. It may lie on a
/// server all the same.
///
/// # Errors
/// `WouldBlock` where somebody may have to be asked, `InvalidInput` where nobody can tell, before Linux 5.12; else what is
/// known for certain.
pub fn hold_known(path: &Path, is_local: impl Fn(&Handle) -> bool) -> io::Result<Handle> {
    match Handle::try_cached(path) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => one_step_more(path, is_local).unwrap_or(Err(error)),
        known => known,
    }
}

/// Whether nobody has to be waited for on the way to a path and at its end. So it is taken to be where nobody can tell.
pub(crate) fn is_at_hand(path: &Path, is_local: impl Fn(&Handle) -> bool) -> bool {
    match hold_known(path, &is_local) {
        Ok(handle) => is_local(&handle),
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Looks for the first name that the cache lacks. `None` when that does not tell where the path leads.
fn one_step_more(path: &Path, is_local: impl Fn(&Handle) -> bool) -> Option<io::Result<Handle>> {
    let in_known_folder = |next: &&Path| next.parent().and_then(Handle::cached).is_some_and(|folder| is_local(&folder));
    let next = path.ancestors().find(in_known_folder)?;
    match Handle::of(next) {
        Ok(found) => (next == path && found.is_symlink().is_ok_and(|is_link| !is_link)).then_some(Ok(found)),
        Err(error) => error.is_not_found().then(|| Err(ErrorKind::NotFound.into())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use super::*;

    #[test]
    fn what_the_cache_lacks_is_looked_for_in_local_folders_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        // The kernel's own folders: nothing that is not there is kept.
        for missing in ["missing", "deep/er/missing"].map(|name| Path::new("/proc/self").join(name)) {
            let kind = |is_local: bool| hold_known(&missing, |_| is_local).unwrap_err().kind();
            assert_eq!(kind(true), ErrorKind::NotFound);
            assert!(is_at_hand(&missing, |_| true));
            if Handle::try_cached(&missing).unwrap_err().kind() == ErrorKind::WouldBlock {
                assert_eq!(kind(false), ErrorKind::WouldBlock);
                assert!(!is_at_hand(&missing, |_| false));
            }
        }
        let file = folder.path().join("file");
        assert!(hold_known(&file, |_| false).is_ok(), "its name is known, wherever it lies");
        assert!(is_at_hand(&file, |_| true) && !is_at_hand(&file, |_| false));
    }
}
