//! The driver that makes a container's cgroups: the runtime itself, or systemd.
//!
//! The option says it. Where no option reached us (containerd 1.6 loses them for a foreign runtime type), a cgroup path in
//! systemd's form is a hint that the kubelet's driver is systemd. No more than a hint: containerd's CRI before 2.0 writes that
//! form for any parent whose name ends in `.slice`, also on a node without systemd, where the runtime could do nothing with it.

use std::fs;

/// Only a node that systemd has booted has this, see sd_booted(3).
const BOOTED: &str = "/run/systemd/system";

/// Is systemd to make the cgroups?
pub(crate) fn is_systemd(said: Option<bool>, path_is_systemds: bool) -> bool {
    decide(said, path_is_systemds, || fs::symlink_metadata(BOOTED).is_ok_and(|found| found.is_dir()))
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
