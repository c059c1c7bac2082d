//! The containers of a pod for which containerd runs neither `start` nor `delete`.
//!
//! With version 3 of the protocol containerd 2.3 sends a pod's later containers directly to the
//! sandbox's server. When this server dies, containerd runs `delete` only for the sandbox, and just
//! removes the bundles of the pod's containers. The containers' processes would live on, unknown to
//! containerd.

use std::fs;
use std::path::Path;

use crate::bundle::Bundle;

/// containerd writes the sandbox's id into this file, in the bundle of each container that it adds
/// to a sandbox.
const SANDBOX: &str = "sandbox";

/// The containers, by name, that joined the sandbox without a `start`. Their bundles are beside the
/// sandbox's bundle.
pub(super) fn joined(sandbox: &Path, id: &str) -> Vec<(String, Bundle)> {
    let beside = sandbox
        .parent()
        .and_then(|namespace| fs::read_dir(namespace).ok());
    let bundles = beside
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path != sandbox);
    let joined = bundles
        .filter(|path| fs::read_to_string(path.join(SANDBOX)).is_ok_and(|of| of.trim() == id));
    // containerd runs `delete` for a container that had a `start`.
    let joined = joined.filter(|path| {
        matches!(
            path.join(super::address::ADDRESS_FILE).try_exists(),
            Ok(false)
        )
    });
    joined
        .filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), Bundle::at(&path))))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn only_containers_of_this_sandbox_without_a_start() {
        let namespace = tempfile::tempdir().unwrap();
        for (id, sandbox, has_address) in [
            ("pod", "pod", true),
            ("web", "pod", false),
            ("old", "pod", true),
            ("other", "pod2", false),
        ] {
            let bundle = namespace.path().join(id);
            fs::create_dir(&bundle).unwrap();
            fs::write(bundle.join(SANDBOX), sandbox).unwrap();
            if has_address {
                fs::write(bundle.join("address"), "unix:///s/a").unwrap();
            }
        }
        let joined = joined(&namespace.path().join("pod"), "pod");
        assert_eq!(
            joined.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(),
            ["web"]
        );
    }
}
