//! A log file (`file://`) before its process exists.
//!
//! The runtime writes its errors to the stderr that the container gets. The copy begins only after
//! the runtime succeeded. So the output of a failed try can be kept out of the log of a container
//! that the next try starts.

use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::IoError;
use super::file_writer::FileWriter;
use super::pipes::unread;
use crate::blocking::spawn_thread;
use crate::step::failed;

/// A pipe to copy into a file.
pub(super) struct PendingLog {
    pipe: OwnedFd,
    file: OwnedFd,
    path: PathBuf,
    /// The output of the last failed try.
    failure: Mutex<Vec<u8>>,
}

impl PendingLog {
    /// `pipe` is the read end.
    pub(super) fn new(pipe: OwnedFd, file: OwnedFd, path: &Path) -> Self {
        Self {
            pipe,
            file,
            path: path.to_owned(),
            failure: Mutex::default(),
        }
    }

    /// Removes the output of a failed try from the pipe, before a further try.
    pub(super) fn withhold_output(&self) -> Vec<u8> {
        let text = unread(&self.pipe);
        if !text.is_empty() {
            self.failure().clone_from(&text);
        }
        text
    }

    /// Writes the output of the last failed try, if no try follows. No caller waits for the disk.
    pub(super) fn write_failure(&self) -> io::Result<()> {
        let text = mem::take(&mut *self.failure());
        if text.is_empty() {
            return Ok(());
        }
        let (mut file, path) = (File::from(self.file.try_clone()?), self.path.clone());
        spawn_thread(move || {
            if let Err(error) = file.write_all(&text) {
                tracing::warn!(%error, path = %path.display(), "the runtime's error is not in the log file");
            }
        })
    }

    /// Starts to copy: the process exists now.
    pub(super) fn begin(self) -> Result<FileWriter, IoError> {
        let Self {
            pipe, file, path, ..
        } = self;
        let step = format!("start writing the log file {}", path.display());
        Ok(FileWriter::start(pipe, file).map_err(failed(step))?)
    }

    fn failure(&self) -> MutexGuard<'_, Vec<u8>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::io::progress::DrainLimits;

    struct TestLog {
        pending: PendingLog,
        process: File,
        file: tempfile::NamedTempFile,
    }

    fn log() -> TestLog {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (read, write) = io::pipe().unwrap();
        let pending = PendingLog::new(read.into(), file.reopen().unwrap().into(), file.path());
        TestLog {
            pending,
            process: OwnedFd::from(write).into(),
            file,
        }
    }

    #[tokio::test]
    async fn the_log_of_a_process_has_no_output_of_failed_tries() {
        let TestLog {
            pending,
            mut process,
            file,
        } = log();
        for _ in 0..3 {
            process.write_all(b"runc create failed\n").unwrap();
            pending.withhold_output();
        }
        process.write_all(b"its own\n").unwrap();
        drop(process);
        let long = Duration::from_secs(60);
        pending
            .begin()
            .unwrap()
            .finish_or_stall(DrainLimits {
                idle: long,
                total: long,
            })
            .await;
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "its own\n");
    }

    #[test]
    fn the_last_failure_is_written_once() {
        let TestLog {
            pending,
            mut process,
            file,
        } = log();
        for text in [&b"first\n"[..], b"again\n", b""] {
            process.write_all(text).unwrap();
            pending.withhold_output();
        }
        pending.write_failure().unwrap();
        pending.write_failure().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while std::fs::read_to_string(file.path()).unwrap() != "again\n" {
            assert!(
                std::time::Instant::now() < deadline,
                "{:?}",
                std::fs::read_to_string(file.path())
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
