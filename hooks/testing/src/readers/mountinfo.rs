//! Any bytes are a mount table or an error; a table that was read is the same when it is written
//! and read again.

use bindguard_core::mount_table::MountTable;

/// Panics if a table breaks this property.
pub fn check(text: &[u8]) {
    if let Ok(table) = MountTable::from_mountinfo(text) {
        assert_eq!(MountTable::from_mountinfo(&table.to_mountinfo()), Ok(table));
    }
}
