//! When each pod was first absent: a small file that lasts as long as a boot.
//!
//! Times are seconds of CLOCK_BOOTTIME, which counts a suspended machine and never steps back. A
//! pod that is back in a list loses its entry.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use bindguard_sys::{make_folders, read_file, write_new_file};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A pod that is absent for this long, in seconds, has ended.
pub const CONFIRMATION_INTERVAL: u64 = 600;

/// Of a node with more pods than any has.
const MAX_BYTES: u64 = 1 << 20;

/// A pod that the lists lack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbsentPod {
    /// Its uid.
    pub uid: String,
    /// The time since it was first absent, in seconds.
    pub absent_s: u64,
}

impl AbsentPod {
    /// True if it has ended.
    pub fn is_confirmed(&self) -> bool {
        self.absent_s >= CONFIRMATION_INTERVAL
    }
}

/// The file of the observations.
#[derive(Debug, Clone)]
pub struct Observations {
    path: PathBuf,
    boot_id: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Recorded {
    boot_id: String,
    /// Uids and times of the first observation.
    first_absent: BTreeMap<String, i64>,
}

impl Default for Observations {
    fn default() -> Self {
        Self::at(Path::new("/run/bindguard/absent-pods.json"), boot_id())
    }
}

impl Observations {
    /// The observations in the file `path` since the boot `boot_id`.
    pub fn at(path: &Path, boot_id: String) -> Self {
        Self {
            path: path.to_owned(),
            boot_id,
        }
    }

    /// The id of this boot.
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Records exactly these pods as absent now. Without the record each pod is absent
    /// for the first time.
    ///
    /// # Errors
    /// If the file cannot be written. Only root can.
    pub fn record(&self, absent: &BTreeSet<String>) -> io::Result<Vec<AbsentPod>> {
        let now = boot_time();
        let earlier = self.read();
        let first_absent: BTreeMap<String, i64> = absent
            .iter()
            .map(|uid| {
                let first = earlier.first_absent.get(uid).copied();
                // A time that is yet to come was not written in this boot.
                (
                    uid.clone(),
                    first.filter(|first| *first <= now).unwrap_or(now),
                )
            })
            .collect();
        let pods = first_absent.iter().map(|(uid, first)| AbsentPod {
            uid: uid.clone(),
            absent_s: now.abs_diff(*first),
        });
        let pods = pods.collect();
        if first_absent != earlier.first_absent {
            self.write(first_absent)?;
        }
        Ok(pods)
    }

    /// A file that is missing, damaged, or of another boot has no observations.
    fn read(&self) -> Recorded {
        let recorded = read_file(&self.path, MAX_BYTES)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Recorded>(&bytes).ok());
        recorded
            .filter(|recorded| recorded.boot_id == self.boot_id)
            .unwrap_or_default()
    }

    fn write(&self, first_absent: BTreeMap<String, i64>) -> io::Result<()> {
        let recorded = Recorded {
            boot_id: self.boot_id.clone(),
            first_absent,
        };
        let Some(directory) = self.path.parent() else {
            return Err(ErrorKind::InvalidInput.into());
        };
        make_folders(directory, 0o755)?;
        // Renamed: a reader never sees half a file.
        let new = self.path.with_extension("new");
        write_new_file(&new, &serde_json::to_vec(&recorded)?, 0o600)?;
        fs::rename(&new, &self.path)
    }
}

/// Without a boot id, every file counts as a file of an earlier boot.
fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

fn boot_time() -> i64 {
    clock_gettime(ClockId::Boottime).tv_sec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(uids: &[&str]) -> BTreeSet<String> {
        uids.iter().map(|uid| (*uid).to_owned()).collect()
    }

    /// Sets the time of every first observation.
    fn make_older(path: &Path, seconds: i64) {
        let mut recorded: Recorded = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        recorded
            .first_absent
            .values_mut()
            .for_each(|first| *first -= seconds);
        fs::write(path, serde_json::to_vec(&recorded).unwrap()).unwrap();
    }

    #[test]
    fn a_pod_has_ended_when_it_is_absent_twice_ten_minutes_apart_in_one_boot() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/absent.json");
        let of_boot = |id: &str| Observations::at(&path, id.to_owned());
        let confirmed = |seen: Vec<AbsentPod>| -> Vec<String> {
            let ended = seen.into_iter().filter(AbsentPod::is_confirmed);
            ended.map(|pod| pod.uid).collect()
        };
        let boot = of_boot("one");
        assert!(confirmed(boot.record(&pods(&["a", "b"])).unwrap()).is_empty());
        make_older(&path, 590);
        assert!(confirmed(boot.record(&pods(&["a", "b"])).unwrap()).is_empty());
        // b is back for a moment
        assert!(confirmed(boot.record(&pods(&["a"])).unwrap()).is_empty());
        make_older(&path, 10);
        assert_eq!(confirmed(boot.record(&pods(&["a", "b"])).unwrap()), ["a"]);
        assert!(confirmed(of_boot("two").record(&pods(&["a"])).unwrap()).is_empty());
    }

    #[test]
    fn a_damaged_file_and_a_time_to_come_confirm_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent.json");
        let boot = Observations::at(&path, "one".to_owned());
        fs::write(&path, "{\"boot_id\":\"one\",\"first_").unwrap();
        assert_eq!(boot.record(&pods(&["a"])).unwrap()[0].absent_s, 0);
        make_older(&path, -100_000);
        assert_eq!(boot.record(&pods(&["a"])).unwrap()[0].absent_s, 0);
    }
}
