//! Returns memory to the system when the shim is idle.
//!
//! Each pod has a shim, which is nearly always idle. But the allocator keeps the pages of the
//! busiest moment, and the stack keeps the pages of the deepest call. All work that takes memory
//! for a while ends with the end of a child: a run of the runtime, a process of a container. When
//! no child has ended for a moment, unused memory is returned, once. No timer runs before the next
//! child ends.
//!
//! This has little effect as long as each page has some freed piece that glibc keeps for the next
//! request of its size, so a server runs without such lists. Only the environment in which a
//! program starts can disable them, see "Memory Allocation Tunables" in glibc's manual: `start`
//! puts the settings there, and the server removes them.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use nix::libc::SIGCHLD;
use tokio::time::timeout;

use crate::kernel::{self, Signals};

/// A pod's containers start and end within less time, and the next container would use the pages
/// again.
const QUIET_TIME: Duration = Duration::from_secs(1);

const TUNABLES: &str = "GLIBC_TUNABLES";
/// No lists of freed pieces, a single heap for all threads, and no cached stacks of ended threads.
const SETTINGS: &str =
    "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1:glibc.pthread.stack_cache_size=0";

/// The settings for the environment of a new server, after the existing settings.
pub fn settings() -> (&'static str, OsString) {
    (
        TUNABLES,
        add_settings(env::var_os(TUNABLES).unwrap_or_default()),
    )
}

/// Removes the settings from this server's environment: the runtime and its hooks get containerd's
/// own. Call it before the first thread is started.
pub fn remove_settings() {
    let without = env::var_os(TUNABLES)
        .as_deref()
        .and_then(strip_settings)
        .map(OsStr::to_owned);
    if let Some(others) = without {
        kernel::set_environment(TUNABLES, Some(others).filter(|others| !others.is_empty()));
    }
}

fn add_settings(others: OsString) -> OsString {
    let mut both = others.into_vec();
    if !both.is_empty() {
        both.push(b':');
    }
    both.extend_from_slice(SETTINGS.as_bytes());
    OsString::from_vec(both)
}

/// `None` if the shim's settings are missing.
fn strip_settings(both: &OsStr) -> Option<&OsStr> {
    let others = both.as_bytes().strip_suffix(SETTINGS.as_bytes())?;
    Some(OsStr::from_bytes(
        others.strip_suffix(b":").unwrap_or(others),
    ))
}

/// Returns unused memory whenever no child has ended for a moment.
pub async fn trim_when_quiet() {
    let mut ended = match Signals::register(&[SIGCHLD]) {
        Ok(ended) => ended,
        Err(error) => return tracing::error!(%error, "memory of a burst will be kept: no SIGCHLD"),
    };
    while ended.next().await.is_ok() {
        while matches!(timeout(QUIET_TIME, ended.next()).await, Ok(Ok(()))) {}
        bindguard_sys::trim_heap();
        kernel::release_stack();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_settings_stay() {
        for others in ["", "glibc.malloc.check=3", "a=1:b=2"] {
            assert_eq!(
                strip_settings(&add_settings(others.into())),
                Some(OsStr::new(others))
            );
        }
        assert_eq!(strip_settings(OsStr::new("glibc.malloc.check=3")), None);
    }
}
