//! Containers of a pod come and go without a sandbox that keeps their shim: each container's
//! `start` finds the shim just when the shim loses its last container. Every container runs, in
//! this shim or in the next.
//!
//! Meanwhile a process holds flock(2) on the directory of the shims' sockets, as every container
//! with a read-only hostPath of `/run` can do (issue 14).

use bindguard_integration::prelude::*;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;

use nix::fcntl::{Flock, FlockArg};

const SOCKETS: &str = "/run/containerd/s";
const ROUNDS: usize = 10;
const AT_ONCE: usize = 3;

on_newest_and_older!(|generation| Setup::on(generation).story(story));

fn story(node: &Node) -> Result<()> {
    let _held = locked(Path::new(SOCKETS))?;
    let before = Leftovers::of(node)?;
    let mut running: Vec<(usize, Child)> = Vec::new();
    for number in 0..ROUNDS * AT_ONCE {
        if running.len() == AT_ONCE {
            ends_well(running.remove(0))?;
        }
        let (id, script) = (format!("c{number}"), format!("exit {}", number + 1));
        let ctr = node.ctr();
        let container = ctr
            .container(&id)
            .annotation("io.containerd.runc.v2.group", "pod");
        let mut container = container.runs(&["sh", "-c", &script]).command(&["--rm"]);
        running.push((
            number,
            container.spawn().with_context(|| format!("start {id}"))?,
        ));
    }
    running.into_iter().try_for_each(ends_well)?;
    before.are_all(node)
}

fn locked(folder: &Path) -> Result<Flock<File>> {
    fs::create_dir_all(folder)
        .and_then(|()| fs::set_permissions(folder, Permissions::from_mode(0o700)))?;
    let held = Flock::lock(File::open(folder)?, FlockArg::LockExclusive);
    held.map_err(|(_, errno)| errno)
        .context("hold the folder of the sockets")
}

fn ends_well((number, mut container): (usize, Child)) -> Result<()> {
    let code = container.wait()?.code();
    ensure!(
        code == i32::try_from(number + 1).ok(),
        "container {number} ended with {code:?}"
    );
    Ok(())
}
