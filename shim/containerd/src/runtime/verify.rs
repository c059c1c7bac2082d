//! A look at a container that was just made, when the guard asks for one: is a host-root bind that it made rslave a slave?
//!
//! `bindguard-runtime` looks, in its own process: this one knows nothing of binds, and the walk to a destination may hang.
//! Nobody waits for it; what it finds it writes to the log and the journal itself.

use std::{ffi::OsString, time::Duration};

use super::{
    Runtime,
    guard_door::guard_program,
    invoke::{Call, Ends},
};

const VERB: &str = "bindguard-verify";

impl Runtime {
    /// Has the container with this init looked at, for at most `patience`.
    pub(crate) fn verify_apart(&self, id: &str, pid: u32, patience: Duration) {
        let Some(guard) = guard_program() else { return };
        let args: Vec<OsString> = vec!["--bundle".into(), self.bundle.path().into(), id.into(), pid.to_string().into()];
        let mut look = Call::new(self, guard, VERB, args);
        look.lead_group();
        let running = match look.spawn(Ends::Caught) {
            Ok(running) => running,
            Err(error) => return tracing::warn!(id, %error, "the container's mounts are not looked at"),
        };
        tokio::spawn(async move {
            if tokio::time::timeout(patience, running.ended()).await.is_err() {
                running.kill_group();
                running.ended().await;
            }
            running.forward_log();
        });
    }
}
