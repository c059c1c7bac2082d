//! The cgroup of a container.

use std::fs;
use std::path::{Path, PathBuf};

use crate::skipped;

/// A cgroup with the id of a container. The cgroup ends with this value.
pub struct Cgroup {
    id: String,
    path: PathBuf,
}

impl Cgroup {
    /// `None`, with a printed reason, without the right to make cgroups.
    pub fn make(test: &str) -> Option<Self> {
        let id = format!("{test}{}", std::process::id());
        let hierarchies =
            ["unified", "pids", ""].map(|name| Path::new("/sys/fs/cgroup").join(name));
        let has_processes = |folder: &&PathBuf| fs::metadata(folder.join("cgroup.procs")).is_ok();
        let path = hierarchies.iter().find(has_processes)?.join(&id);
        Self::at(path, id)
    }

    /// A child cgroup with this id.
    pub fn below(&self, id: &str) -> Option<Self> {
        Self::at(self.path.join(id), id.to_owned())
    }

    fn at(path: PathBuf, id: String) -> Option<Self> {
        if fs::create_dir(&path).is_err() {
            skipped("no right to make a cgroup");
            return None;
        }
        Some(Self { id, path })
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// The file that takes the pid of a new member.
    pub fn members(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    pub fn add(&self, pid: u32) {
        fs::write(self.members(), pid.to_string()).unwrap();
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Processes that were killed are members until they are gone.
        for _ in 0..1000 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        eprintln!("the cgroup {} is left", self.path.display());
    }
}
