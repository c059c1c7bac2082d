//! Returns memory to the kernel after work: a survey or a burst of events frees more than the idle
//! agent uses.
//!
//! glibc keeps freed memory for the next request, which may come five minutes later
//! (docs/decisions/0014).

use std::sync::Arc;
use std::time::Duration;

use bindguard_sys::trim_heap;
use tokio::sync::Notify;
use tokio::time::sleep;

/// The pause after work: the rest of a burst is trimmed with its beginning.
const PAUSE: Duration = Duration::from_secs(2);

/// Takes notice of work, from any thread.
#[derive(Debug, Clone, Default)]
pub struct IdleMemory(Arc<Notify>);

impl IdleMemory {
    /// Work may have freed memory.
    pub fn worked(&self) {
        self.0.notify_one();
    }

    /// Trims the heap a moment after work, for ever. Without work it does not wake up.
    pub async fn run(self) {
        loop {
            self.0.notified().await;
            // Work during the pause causes a second trim: the work may free memory after the first
            // trim.
            sleep(PAUSE).await;
            trim_heap();
        }
    }
}
