//! Signals that a task can wait for.
//!
//! tokio also has signals, but the first signal allocates for all of the kernel's sixty-four
//! signals: 25 KiB, a third of an idle shim's heap. signal-hook-tokio takes 20 KiB for the three
//! waiters (docs/decisions/0014). Here a signal with a waiter sends a byte through its socket. A
//! pipe would also work, but containerd's tests, and people with lsof(8), take a shim's pipes for
//! leaked streams of a container.

use std::ffi::c_int;
use std::io;
use std::os::unix::net::UnixStream as Socket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use crate::kernel;

/// The signals of a waiter, for as long as the process lives.
#[derive(Debug)]
pub struct Signals {
    bytes: UnixStream,
    arrived: Vec<(c_int, Arc<AtomicBool>)>,
}

impl Signals {
    /// From now on these signals arrive here, instead of their former actions.
    pub fn register(signals: &[c_int]) -> io::Result<Self> {
        let (here, there) = Socket::pair()?;
        here.set_nonblocking(true)?;
        // A single socket for all signals: people who search for leaks count a shim's descriptors.
        let there = Arc::new(there);
        let arrived: Vec<_> = signals
            .iter()
            .map(|signal| (*signal, Arc::default()))
            .collect();
        for (signal, arrived) in &arrived {
            kernel::forward_signal(*signal, Arc::clone(arrived), Arc::clone(&there))?;
        }
        Ok(Self {
            bytes: UnixStream::from_std(here)?,
            arrived,
        })
    }

    /// Waits until a signal has arrived since the last call. Dropping the future loses no signal.
    pub async fn next(&mut self) -> io::Result<()> {
        // Signals that arrived meanwhile are merged, as the kernel does.
        let mut bytes = [0; 64];
        match self.bytes.read(&mut bytes).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// True if the signal has arrived since the last call of `take`.
    pub fn take(&self, signal: c_int) -> bool {
        let mut flags = self.arrived.iter().filter(|(number, _)| *number == signal);
        flags.any(|(_, arrived)| arrived.swap(false, Ordering::AcqRel))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::libc;
    use nix::sys::signal::{Signal, raise};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn signals_that_arrive_together_are_reported_once() {
        let mut signals = Signals::register(&[libc::SIGUSR1, libc::SIGUSR2]).unwrap();
        assert!(
            timeout(Duration::from_millis(20), signals.next())
                .await
                .is_err()
        );
        for signal in [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGUSR1] {
            raise(signal).unwrap();
        }
        signals.next().await.unwrap();
        assert!(
            timeout(Duration::from_millis(20), signals.next())
                .await
                .is_err()
        );
        assert!(signals.take(libc::SIGUSR1) && signals.take(libc::SIGUSR2));
        raise(Signal::SIGUSR2).unwrap();
        signals.next().await.unwrap();
        assert!(!signals.take(libc::SIGUSR1) && signals.take(libc::SIGUSR2));
    }
}
