//! Whose a path below a kubelet's root is.

use std::path::Path;

/// The uid of the pod that a path belongs to: `<root>/pods/<uid>/...`.
pub fn pod_uid_of<'p, 'a>(path: &'p Path, kubelet_roots: impl IntoIterator<Item = &'a Path>) -> Option<&'p str> {
    kubelet_roots.into_iter().find_map(|root| {
        let mut names = path.strip_prefix(root).ok()?.iter();
        names.next().filter(|name| *name == "pods")?;
        names.next()?.to_str()
    })
}
