//! The caller's privileges: rootless engines call the runtime as any user, most often in a user
//! namespace.

use std::fs;

use rustix::thread::{CapabilitySet, capabilities};

/// True if binds can be repaired. Without that right, and without access to the node's journal, the
/// guard has no work.
pub fn may_mount() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// True if the caller may write the journal. Root of a separate user namespace need not have
/// access.
pub fn is_root_of_node() -> bool {
    rustix::process::geteuid().is_root()
        && !fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| maps_some(&map))
}

/// True for a namespace that maps only some users. The node's namespace has the identity map of all
/// users.
fn maps_some(uid_map: &str) -> bool {
    uid_map.split_whitespace().ne(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_own_namespace_maps_all_users() {
        assert!(!maps_some("         0          0 4294967295\n"));
        assert!(maps_some(
            "         0       1000          1\n         1     100000      65536\n"
        ));
        assert!(maps_some("         0     100000      65536\n"));
    }
}
