//! The installation of this node, by the installer's record and the running containerd: is the node
//! guarded, and what is left to do?
//!
//! `bindguard install` and `uninstall` write the record and remove it. A record that cannot be read,
//! and a runtime that does not answer, change no figure. The installer counts the changes of files by
//! other tools, which it evaluates with containerd's program.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::process_stat::{START_TIME, number};
use bindguard_operator::cri::of_node::query;
use bindguard_operator::drift_count::{self, DRIFT_COUNT};
use bindguard_operator::guarded_runtimes::GuardedRuntimes;
use bindguard_operator::root_program::open_of_root;
use bindguard_sys::process_files::{ProcessFile, contents};
use bindguard_sys::read_file;
use serde::Deserialize;

use crate::sinks::metrics::Metrics;

const RECORD: &str = "/var/lib/bindguard/install.json";
/// The end of the link to the installed version.
const CURRENT: &str = "lib/bindguard/current";

/// A record has some kilobytes.
const MAX_SIZE: u64 = 16 << 20;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Record {
    files: Vec<File>,
    owed: Vec<OwedRestart>,
    removal: Removal,
}

#[derive(Debug, Deserialize)]
struct File {
    path: PathBuf,
}

#[derive(Debug, Deserialize)]
struct OwedRestart {
    daemon: Option<Daemon>,
}

/// The process that has to be restarted.
#[derive(Debug, Deserialize)]
struct Daemon {
    pid: u32,
    started: u64,
    boot: String,
}

#[derive(Debug, Default, Deserialize)]
struct Removal {
    handler_kept_for_pods: i64,
    programs_kept_for_pods: i64,
}

impl Daemon {
    fn runs(&self) -> bool {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let stat = contents(&[ProcessFile::of(self.pid, "stat")]).pop();
        let started = stat.and_then(|stat| {
            let stat = stat.ok()?;
            number(&String::from_utf8_lossy(&stat), START_TIME)
        });
        boot.trim_end() == self.boot && started == Some(self.started)
    }
}

/// Sets the figures of the installation. It blocks.
pub fn count(metrics: &Metrics, cri: &Path) {
    let record = match open_of_root(Path::new(RECORD)) {
        Ok(Some(_)) => read_file(Path::new(RECORD), MAX_SIZE)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok()),
        Ok(None) => Some(Record::default()),
        Err(_) => None,
    };
    if let Some(record) = record {
        count_record(metrics, &record);
    }
    metrics.drift.clear();
    if let Some(count) = drift_count::recent(Path::new(DRIFT_COUNT)) {
        metrics.drift.get_or_create(&[]).set(count.into());
    }
    let mistakes = bindguard_config::load().remarks().len();
    metrics.config_mistakes.set(mistakes as i64);
    let active = query(cri, async |cri| cri.active_config().await);
    if let Some(active) = active
        .ok()
        .and_then(|config| serde_json::from_str(&config).ok())
    {
        let guarded = GuardedRuntimes::of_containerd(&active).runtimes.len();
        metrics.guarded_runtimes.set(guarded as i64);
    }
}

fn count_record(metrics: &Metrics, record: &Record) {
    let Removal {
        handler_kept_for_pods,
        programs_kept_for_pods,
    } = record.removal;
    metrics.handler_kept.set(handler_kept_for_pods);
    metrics.programs_kept.set(programs_kept_for_pods);
    let owed = record.owed.iter().filter_map(|owed| owed.daemon.as_ref());
    let owed = owed.filter(|daemon| daemon.runs()).count();
    metrics.restarts_owed.set(owed as i64);
    let is_missing = |file: &&File| fs::metadata(&file.path).is_err();
    let missing = record.files.iter().filter(is_missing).count();
    metrics.missing_files.set(missing as i64);
    metrics.installed.clear();
    let current = record
        .files
        .iter()
        .find(|file| file.path.ends_with(CURRENT));
    let target = current.and_then(|current| fs::read_link(&current.path).ok());
    let version = target.as_deref().and_then(Path::file_name);
    if let Some(version) = version {
        let label = [("version", version.to_string_lossy().into_owned())];
        metrics.installed.get_or_create(&label).set(1);
    }
}
