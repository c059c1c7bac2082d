//! Writes a log file: `file://`.
//!
//! The process gets a pipe and never the file: with a descriptor of the file a container could
//! truncate its own log. The event loop cannot wait for a disk, so a thread copies from the pipe to
//! the file; it ends with the last writer. If stdout and stderr name the same file they share the
//! pipe, and their lines stay in order.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use super::progress::{CopyProgress, DrainLimits, DrainResult, Mover, progress};
use crate::blocking::spawn_thread;

/// The limit of a step; the buffer exists as long as the stream.
const STEP: usize = 16 * 1024;

/// A thread that writes.
#[derive(Debug)]
pub(super) struct FileWriter {
    progress: CopyProgress,
}

impl FileWriter {
    /// Starts to copy from the pipe to the file. The pipe's end must be blocking.
    pub(super) fn start(pipe: OwnedFd, file: OwnedFd) -> io::Result<Self> {
        let (mover, progress) = progress();
        spawn_thread(move || pass_on(&mut pipe.into(), &mut file.into(), &mover))?;
        Ok(Self { progress })
    }

    /// Waits until all bytes are in the file; gives up when the stream stalls.
    pub(super) async fn finish_or_stall(&self, limits: DrainLimits) {
        if self.progress.drain(limits).await != DrainResult::Passed {
            tracing::warn!(
                "a process left behind still holds a log file's pipe open, or its disk hangs"
            );
        }
    }
}

/// A full disk costs lines of the log and nothing else: a process that had to wait for space would
/// hang with it.
fn pass_on(pipe: &mut File, file: &mut File, mover: &Mover) {
    let mut buffer = [0; STEP];
    let mut losing = false;
    loop {
        let read = match pipe.read(&mut buffer) {
            Ok(0) => return,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return tracing::warn!(%error, "cannot read a container's output any more");
            }
        };
        mover.set_holding(true);
        let written = file.write_all(&buffer[..read]);
        mover.set_holding(false);
        match written {
            Ok(()) => losing = false,
            Err(_) if losing => {}
            Err(error) => {
                losing = true;
                tracing::warn!(%error, "cannot write a container's log file: its output is lost until that works again");
            }
        }
        mover.moved(read);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn all_is_in_the_file_at_the_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (read, write) = io::pipe().unwrap();
        let writer = FileWriter::start(read.into(), file.reopen().unwrap().into()).unwrap();
        let mut write = File::from(OwnedFd::from(write));
        write.write_all(&[7; 200_000]).unwrap();
        drop(write);
        let long = Duration::from_secs(60);
        writer
            .finish_or_stall(DrainLimits {
                idle: long,
                total: long,
            })
            .await;
        assert_eq!(std::fs::read(file.path()).unwrap(), [7; 200_000]);
    }
}
