//! New folders and files, with modes that do not depend on the caller's umask.
//!
//! A umask of 0 would let every user write what root made, and a umask of 077 would keep users from
//! programs that they run.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Creates a folder and the missing folders above it, each with this mode. An existing folder keeps
/// its mode.
///
/// # Errors
/// The kernel's, and `NotADirectory` if a file is in the way.
pub fn make_folders(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(mode)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            match fs::metadata(folder)?.is_dir() {
                true => Ok(()),
                false => Err(ErrorKind::NotADirectory.into()),
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            make_folders(folder.parent().ok_or(error)?, mode)?;
            make_folders(folder, mode)
        }
        Err(error) => Err(error),
    }
}

/// Creates a file with this content and this mode, instead of a file that a killed process left.
/// Follows no link.
///
/// # Errors
/// The kernel's.
pub fn write_new_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut create = OpenOptions::new();
    create.write(true).create_new(true).mode(0o600);
    let mut file = match create.open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            create.open(path)?
        }
        opened => opened?,
    };
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn modes_are_exact_and_links_are_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let (outer, inner) = (place.path().join("outer"), place.path().join("outer/inner"));
        // the usual umask takes these bits
        make_folders(&inner, 0o777).unwrap();
        assert_eq!((mode(&outer), mode(&inner)), (0o777, 0o777));
        make_folders(&inner, 0o700).unwrap();
        assert_eq!(mode(&inner), 0o777, "an existing folder keeps its mode");

        let (file, link) = (inner.join("file"), inner.join("link"));
        write_new_file(&file, b"one", 0o666).unwrap();
        assert_eq!(mode(&file), 0o666);
        symlink(&file, &link).unwrap();
        write_new_file(&link, b"two", 0o600).unwrap();
        assert!(link.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read(&file).unwrap(), b"one");
        let below_a_file = make_folders(&file.join("below"), 0o755).unwrap_err();
        assert_eq!(below_a_file.kind(), ErrorKind::NotADirectory);
    }
}
