//! An uninstall that waits for pods, as the installer has recorded it on the node.
//!
//! `bindguard uninstall` writes the counts and removes them with the record. A record that cannot
//! be read changes no figure: the installer reports that.

use std::path::Path;

use bindguard_operator::root_program::open_of_root;
use bindguard_sys::read_file;
use serde::Deserialize;

use crate::sinks::metrics::Metrics;

const RECORD: &str = "/var/lib/bindguard/install.json";

/// A record has some kilobytes.
const MAX_SIZE: u64 = 16 << 20;

#[derive(Debug, Default, Deserialize)]
struct Record {
    #[serde(default)]
    removal: Removal,
}

#[derive(Debug, Default, Deserialize)]
struct Removal {
    handler_kept_for_pods: i64,
    programs_kept_for_pods: i64,
}

/// Sets the figures of a removal.
pub fn count(metrics: &Metrics) {
    let record = match open_of_root(Path::new(RECORD)) {
        Ok(Some(_)) => read_file(Path::new(RECORD), MAX_SIZE)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok()),
        Ok(None) => Some(Record::default()),
        Err(_) => None,
    };
    if let Some(Record { removal }) = record {
        metrics.handler_kept.set(removal.handler_kept_for_pods);
        metrics.programs_kept.set(removal.programs_kept_for_pods);
    }
}
