//! Controllers of the unified hierarchy: a cgroup has a controller if `cgroup.subtree_control` of
//! every ancestor enables the controller, see cgroups(7).
//!
//! A runtime enables the controllers for the container's limits, or leaves the work to systemd.
//! After each create Go's shim enables all controllers of the root, so that the figures exist. This
//! shim enables only the missing controllers.

use std::fs;
use std::io;
use std::path::Path;

const CONTROLLERS: &str = "cgroup.controllers";
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// Enables the controllers of the topmost cgroup in all cgroups above this cgroup. A failure is
/// harmless: a cgroup with processes of its own enables no controller, and in a user namespace the
/// upper cgroups belong to a different user.
pub(super) fn enable(cgroup: &Path) {
    let mut above: Vec<&Path> = cgroup
        .ancestors()
        .skip(1)
        .take_while(|path| fs::metadata(path.join(SUBTREE_CONTROL)).is_ok())
        .collect();
    above.reverse();
    let Some(all) = above
        .first()
        .and_then(|root| fs::read_to_string(root.join(CONTROLLERS)).ok())
    else {
        return;
    };
    for cgroup in above {
        if let Err(error) = hand_down(cgroup, &all) {
            tracing::debug!(%error, cgroup = %cgroup.display(), "some controllers stay disabled");
        }
    }
}

fn hand_down(cgroup: &Path, all: &str) -> io::Result<()> {
    let file = cgroup.join(SUBTREE_CONTROL);
    let enabled = fs::read_to_string(&file)?;
    let is_missing = |name: &&str| !enabled.split_whitespace().any(|enabled| enabled == *name);
    let mut result = Ok(());
    // A write for each name: the kernel accepts all names of a write, or no name.
    for name in all.split_whitespace().filter(is_missing) {
        result = write(&file, name).and(result);
    }
    result
}

fn write(file: &Path, name: &str) -> io::Result<()> {
    io::Write::write_all(
        &mut fs::OpenOptions::new().append(true).open(file)?,
        format!("+{name}").as_bytes(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests on a plain folder, whose files keep what is written.
    #[test]
    fn missing_controllers_are_enabled_from_the_top_down_to_the_parent() {
        let dir = tempfile::tempdir().unwrap();
        let (root, slice) = (dir.path().join("cgroup"), dir.path().join("cgroup/pods"));
        let container = slice.join("c");
        fs::create_dir_all(&container).unwrap();
        let control = |cgroup: &Path| fs::read_to_string(cgroup.join(SUBTREE_CONTROL)).unwrap();
        for (cgroup, enabled) in [(&root, "cpu memory"), (&slice, "cpu "), (&container, "")] {
            fs::write(cgroup.join(CONTROLLERS), "cpu io memory pids\n").unwrap();
            fs::write(cgroup.join(SUBTREE_CONTROL), enabled).unwrap();
        }
        enable(&container);
        assert_eq!(control(&root), "cpu memory+io+pids");
        assert_eq!(control(&slice), "cpu +io+memory+pids");
        assert_eq!(control(&container), "", "a container decides for itself");
        enable(Path::new("/nowhere/at/all"));
    }
}
