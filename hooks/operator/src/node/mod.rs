//! Facts about a node, for its check-up.

mod init;
mod mount_users;
mod processes;
mod runtime_mounts;

pub use init::{NotInit, hold_init, inits_of, recorded_init_of};
pub use mount_users::{MountUser, users_of_mount};
pub(crate) use processes::namespace;
pub use processes::{
    Process, arguments_of_processes, may_become_root, pids, pids_named, processes_named,
    root_pids_named, uid_of, with_open,
};
pub use runtime_mounts::{NotOfRuntime, refuse_other_mounts};

use std::fs;
use std::io;
use std::path::Path;

use bindguard_core::evidence::Observed;

/// True if the process is root, and so may read everything.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The text of a small kernel file, such as a sysctl.
pub fn setting(path: &Path) -> Observed<String> {
    match fs::read_to_string(path) {
        Ok(text) => Observed::Seen(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Observed::Absent,
        Err(error) => Observed::Unreadable(format!("read {}: {error}", path.display())),
    }
}
