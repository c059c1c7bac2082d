//! The mistakes in the node's config, which are reported once per version of the file: not with each
//! of thousands of creates.

use std::fs::{self, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use bindguard_config::Loaded;

/// The hash of the file whose mistakes were reported last. It goes with a reboot.
const REPORTED: &str = "/run/bindguard/config-mistakes";

/// The mistakes, and the hash of the file that has them.
#[derive(Debug)]
pub struct Mistakes {
    /// Empty if they were reported before.
    pub new: Vec<String>,
    hash: String,
}

impl Mistakes {
    /// Those that were not reported.
    pub fn of(loaded: &Loaded) -> Self {
        let mut new = loaded.remarks();
        let mut hasher = DefaultHasher::new();
        (&new, &loaded.text).hash(&mut hasher);
        let hash = format!("{:x}", hasher.finish());
        if !new.is_empty() && fs::read_to_string(REPORTED).is_ok_and(|old| old == hash) {
            new.clear();
        }
        Self { new, hash }
    }

    /// Remembers that they were reported. If this fails, the next create reports them again.
    pub fn are_reported(&self) {
        if self.new.is_empty() {
            return;
        }
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(REPORTED);
        if let Ok(mut file) = file {
            let _ = file.write_all(self.hash.as_bytes());
        }
    }
}
