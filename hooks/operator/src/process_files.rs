//! The open files of all processes, some at a time: a process may have a million of them, and a
//! container decides how many.

use std::time::{Duration, Instant};

use bindguard_sys::process_files::ProcessFile;

/// Limit of files that are in memory at a time.
const MAX_FILES: usize = 64 << 10;

/// Time limit for all files.
const FILES_TIMEOUT: Duration = Duration::from_secs(10);

/// Hands over all files, at most [`MAX_FILES`] at a time, with the time that is left to read them.
pub fn in_parts(
    mut files: impl Iterator<Item = ProcessFile>,
    mut read: impl FnMut(Vec<ProcessFile>, Duration),
) {
    let start = Instant::now();
    loop {
        let part: Vec<ProcessFile> = files.by_ref().take(MAX_FILES).collect();
        if part.is_empty() {
            return;
        }
        read(part, FILES_TIMEOUT.saturating_sub(start.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_many_descriptors_is_read_in_parts() {
        let files = (0..=2 * MAX_FILES).map(|fd| ProcessFile::of(1, &format!("fd/{fd}")));
        let mut parts = Vec::new();
        in_parts(files, |part, left| {
            assert!(left <= FILES_TIMEOUT);
            parts.push(part.len());
        });
        assert_eq!(parts, [MAX_FILES, MAX_FILES, 1]);
    }
}
