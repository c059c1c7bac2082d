//! Reads a file that the operator names. The file may be a device, which has no end.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The size limit of such a file. A journal is rotated long before, and a node with 100,000 mounts
/// has a mount table of 20 MiB.
const MAX_SIZE: u64 = 256 << 20;

/// Reads a whole file.
///
/// # Errors
/// The kernel's, and `FileTooLarge` above 256 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_SIZE + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SIZE {
        let why = format!("it is larger than {} MiB", MAX_SIZE >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}
