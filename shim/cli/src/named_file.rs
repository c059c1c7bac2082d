//! Files that the operator names. Such a file may be a device, which has no end, or on a server that
//! does not answer.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use bindguard_sys::probe::{Answer, probe_side_by_side};

/// The size limit of such a file. A journal is rotated long before, and a node with 100,000 mounts
/// has a mount table of 20 MiB.
const MAX_SIZE: u64 = 256 << 20;
const READ_TIMEOUT: Duration = Duration::from_millis(700);

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

/// Checks that the server of a path answers, even with ENOENT: no command may hang on a silent
/// server.
///
/// # Errors
/// If the server is silent; the message has one line.
pub fn check_answers(path: &Path) -> anyhow::Result<()> {
    match probe_side_by_side(&[path.to_owned()], READ_TIMEOUT).as_deref() {
        Ok([Answer::Silent(patience)]) => {
            bail!(
                "{} did not answer within {} ms",
                path.display(),
                patience.as_millis()
            )
        }
        _ => Ok(()),
    }
}
