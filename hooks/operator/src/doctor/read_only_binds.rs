//! Containers with a read-only bind of the host's root that can write to later mounts of the host.
//!
//! The default makes such binds rslave, so that the host's umounts arrive. The point is no fault: an
//! operator decides whether each of these pods may do what docs/security.md says.

use std::collections::BTreeSet;

use crate::container_mounts::ContainerMounts;

use super::Point;

const NAME: &str = "read-only-binds";
/// The number of pods that the point names.
const NAMED: usize = 10;

/// The point for them.
pub fn read_only_binds(found: &ContainerMounts) -> Point {
    let open = &found.open_to_later_mounts;
    let pods: BTreeSet<String> = open
        .iter()
        .map(|container| {
            container
                .pod
                .display_name()
                .unwrap_or_else(|| container.id.clone())
        })
        .collect();
    if pods.is_empty() {
        return match found.unread.first() {
            Some(unread) => Point::unknown(NAME, unread.container.problem(&unread.why)),
            None => Point::ok(
                NAME,
                "no read-only bind of the host's root takes in later mounts",
            ),
        };
    }
    let named: Vec<&str> = pods.iter().take(NAMED).map(String::as_str).collect();
    let more = match pods.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Point::ok(
        NAME,
        format!(
            "these pods bind the host's root read-only, and can write to mounts that the host makes later: {}{more}; \
             [host-root] read-only = \"keep\" in config.toml keeps such binds private",
            named.join(", ")
        ),
    )
}
