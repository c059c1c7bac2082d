//! Work that may block, away from the event loop.
//!
//! Mounting and unmounting can wait for a disk, and the loop serves every container of the pod.
//! Each piece of work gets a separate thread. A pool would keep threads and their memory in a
//! process that is nearly always idle.

use std::io;
use std::thread;

use tokio::sync::oneshot;

use crate::kernel;

/// Enough for a buffer and some calls.
const STACK: usize = 256 * 1024;

/// Starts a thread that no caller waits for.
pub(crate) fn spawn_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .stack_size(STACK)
        .spawn(|| {
            work();
            // glibc keeps the stack for the next thread.
            kernel::release_stack();
        })
        .map(drop)
}

/// Runs `work` on its own thread. An error means that no thread could start, or that the work
/// panicked.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (send, receive) = oneshot::channel();
    spawn_thread(move || drop(send.send(work())))?;
    receive.await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn a_panic_is_an_error() {
        assert_eq!(super::run_blocking(|| 7).await.unwrap(), 7);
        assert!(super::run_blocking(|| panic!("no")).await.is_err());
    }
}
