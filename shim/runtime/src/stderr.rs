//! Lines on stderr, which may be the container's own.
//!
//! Under a shim the pipe has no reader before the container exists. A guard that waited for space
//! would be killed at its deadline. A guard that left no space would make the runtime wait for ever
//! when it reports an error. So a line is written only if it fits at once, and only a few KiB of
//! them.

use std::io::stderr;
use std::sync::atomic::{AtomicUsize, Ordering};

use bindguard_core::text::{cut, one_line};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// With its prefix less than 4096 bytes, `PIPE_BUF`: a writable pipe takes that much at once
/// (pipe(7)).
const MAX_LINE: usize = 2048;
/// The limit of all lines together: an eighth of a pipe.
const MAX_OUTPUT: usize = 8192;

static WRITTEN: AtomicUsize = AtomicUsize::new(0);

/// Writes a line, cut if it is long. A line that would have to wait is lost. The pod chooses paths
/// and annotations.
pub fn write_line(text: &str) {
    let line = format!(
        "bindguard: {}\n",
        cut(&one_line(&cut(text, MAX_LINE)), MAX_LINE)
    );
    let written = WRITTEN.load(Ordering::Relaxed) + line.len();
    if written <= MAX_OUTPUT
        && takes_a_line()
        && rustix::io::write(stderr(), line.as_bytes()).is_ok()
    {
        WRITTEN.store(written, Ordering::Relaxed);
    }
}

fn takes_a_line() -> bool {
    let stderr = stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
        && fds[0].revents().contains(PollFlags::OUT)
}
