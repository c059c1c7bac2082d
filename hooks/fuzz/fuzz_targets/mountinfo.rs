//! Any bytes are a mount table or an error; a table that was read is the same when it is written and read again.
#![no_main]

use bindguard_core::mount_table::MountTable;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    if let Ok(table) = MountTable::from_mountinfo(text) {
        assert_eq!(MountTable::from_mountinfo(&table.to_mountinfo()), Ok(table));
    }
});
