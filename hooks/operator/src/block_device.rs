//! The device number of a block special file.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use bindguard_core::mount_table::Device;

/// The device of a block special file; `None` for any other file. Follows symlinks, for example in
/// `/dev/disk`.
///
/// # Errors
/// stat(2)'s.
pub fn block_device(path: &Path) -> io::Result<Option<Device>> {
    let metadata = fs::metadata(path)?;
    let number = metadata.rdev();
    let device = Device {
        major: rustix::fs::major(number),
        minor: rustix::fs::minor(number),
    };
    Ok(metadata.file_type().is_block_device().then_some(device))
}
