//! The driver that makes a container's cgroups: the runtime itself, or systemd.
//!
//! The option names the driver. containerd 1.6 loses the options of a foreign runtime type. Without
//! the option, a cgroup path in systemd's form is a hint that the kubelet uses the systemd driver.
//! The form is only a hint: containerd's CRI before 2.0 writes this form for any parent whose name
//! ends in `.slice`. On a node without systemd the runtime could not use such a path.

use std::fs;

/// Only a node that booted with systemd has this directory, see sd_booted(3).
const BOOTED: &str = "/run/systemd/system";

/// True if systemd makes the cgroups.
pub(crate) fn is_systemd(said: Option<bool>, path_is_systemds: bool) -> bool {
    decide(said, path_is_systemds, || {
        fs::symlink_metadata(BOOTED).is_ok_and(|found| found.is_dir())
    })
}

fn decide(said: Option<bool>, path_is_systemds: bool, booted: impl FnOnce() -> bool) -> bool {
    said.unwrap_or_else(|| path_is_systemds && booted())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_goes_before_the_path_and_the_path_needs_a_systemd() {
        for path_is_systemds in [true, false] {
            assert!(decide(Some(true), path_is_systemds, || false));
            assert!(!decide(Some(false), path_is_systemds, || true));
        }
        assert!(decide(None, true, || true));
        assert!(!decide(None, true, || false));
        assert!(!decide(None, false, || true));
    }
}
