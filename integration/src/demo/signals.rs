//! Ctrl-C: the demo's node must end as cleanly as after its last line.
//!
//! SIGINT and SIGTERM are blocked in every thread, and a dedicated thread waits for both signals
//! (sigwait(3)). So the clean-up is ordinary code and not a signal handler. Children start with an
//! empty mask; the standard library sees to that.

use std::io;
use std::process::exit;
use std::sync::{Arc, OnceLock};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};

use crate::node::KeeperHandle;

/// The thread that waits for SIGINT and SIGTERM, and what it has to end.
#[derive(Clone, Debug)]
pub struct Signals(Arc<OnceLock<KeeperHandle>>);

impl Signals {
    /// Starts waiting. Must be called before the process starts a thread, because threads inherit
    /// the blocked signals.
    pub fn wait_in_background() -> Result<Self> {
        let wanted: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
        wanted.thread_block().context("block SIGINT and SIGTERM")?;
        let signals = Self(Arc::default());
        let ended = signals.clone();
        thread::spawn(move || {
            if let Ok(signal) = wanted.wait() {
                ended.end(signal);
            }
        });
        Ok(signals)
    }

    /// From now on, a signal ends this node.
    pub fn end_node_on_signal(&self, keeper: KeeperHandle) {
        // a demo has one node; the keeper of a second node would end the node when the process
        // exits
        let _ = self.0.set(keeper);
    }

    fn end(&self, signal: Signal) -> ! {
        println!("\n{signal}: cleaning up");
        // held for good: what the main thread would say while its node is torn down is of no use
        let _quiet = (io::stdout().lock(), io::stderr().lock());
        if let Some(keeper) = self.0.get() {
            keeper.finish();
        }
        exit(128 + signal as i32)
    }
}
