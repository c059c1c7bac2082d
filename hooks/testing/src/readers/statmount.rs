//! Any buffer is a mount or an error. A result of statmount(2) can be written as a line of
//! mountinfo, and then says the same: the two are read into the same fields.

use bindguard_core::mount_table::{MountAttributes, MountEntry, StatmountEntry};

/// Panics if a buffer breaks these properties.
pub fn check(buffer: &[u8]) {
    let Ok(StatmountEntry { entry, .. }) = StatmountEntry::from_buffer(buffer, None) else {
        return;
    };
    // mountinfo's words end at spaces; no filesystem's type contains a space, and an empty option
    // is no word.
    let is_word = |text: &str| {
        !text.is_empty() && !text.contains(|c: char| c.is_ascii_whitespace() || c == '\\')
    };
    if is_word(&entry.fs_type.0) {
        let attributes = MountAttributes::from_options("rw".as_ref());
        let entry = MountEntry {
            options: "rw".into(),
            attributes,
            super_options: "rw".into(),
            ..entry
        };
        let line = entry.to_line();
        assert_eq!(
            MountEntry::from_line(line.strip_suffix(b"\n").unwrap_or(&line)),
            Ok(entry)
        );
    }
}
