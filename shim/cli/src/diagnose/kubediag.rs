//! Prints the results of kubediag's subpath processors: bindguard can replace the processors.
//!
//! A processor of kubediag answers with a JSON object of strings. kubediag's agent adds the object
//! to the input of the next processor. A diagnosis is for a single mount: the recoverer unmounts
//! only `original_destination_path`. Therefore bindguard prints only one object, for the first
//! stale subpath, with the keys of the collector and the diagnoser. Keys and values have the form
//! of `pkg/processors` of kubediag/kubediag.

use std::path::Path;

use bindguard_core::mount_table::MountTable;
use bindguard_core::source::SourceKind;
use bindguard_operator::node_report::{ISSUE, NodeBind, NodeReport};
use serde_json::{Map, Value};

use crate::show::{print_remark, print_text};

const MOUNTINFO: &str = "collector.system.mountinfo";
const DIAGNOSER: &str = "diagnoser.kubernetes.subpath_remount";
const RECOVERER: &str = "recover.kubernetes.subpath_remount.result";

/// Prints the output of the collector and the diagnoser.
pub fn print_diagnosis(
    report: &NodeReport,
    mountinfo: &[u8],
    table: &MountTable,
) -> anyhow::Result<()> {
    let mut keys = Map::new();
    keys.insert(
        MOUNTINFO.to_owned(),
        String::from_utf8_lossy(mountinfo).into(),
    );
    let mut stale = report.binds.iter().filter(|bind| is_stale_subpath(bind));
    let first = stale.find_map(|bind| Some((bind, as_written(table, bind.bind.source())?)));
    if let Some((bind, (root, mount_point))) = first {
        for (key, value) in [
            ("result", result(bind)),
            ("bug_link", ISSUE.to_owned()),
            ("original_source_path", root),
            ("original_destination_path", mount_point),
        ] {
            keys.insert(format!("{DIAGNOSER}.{key}"), value.into());
        }
    }
    let more = stale.count();
    if more > 0 {
        print_remark(format_args!(
            "{more} more subpaths are stale, and kubediag takes one at a time: run it again afterwards"
        ));
    }
    print_object(keys)
}

/// Prints the output of the recoverer, for all mounts that were detached or repaired.
pub fn print_recovery(report: &NodeReport) -> anyhow::Result<()> {
    let repaired = report
        .binds
        .iter()
        .filter(|bind| bind.bind.is_repaired())
        .map(|bind| {
            let outcome = bind
                .bind
                .outcome
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default();
            format!("{}: {outcome}", bind.bind.source().display())
        });
    let repaired: Vec<String> = repaired.collect();
    let result = (!repaired.is_empty()).then(|| (RECOVERER.to_owned(), repaired.join("; ").into()));
    print_object(result.into_iter().collect())
}

fn is_stale_subpath(bind: &NodeBind) -> bool {
    matches!(bind.bind.finding.kind, SourceKind::Subpath(_)) && bind.is_stale()
}

fn result(bind: &NodeBind) -> String {
    let reason = bind.bind.reason().unwrap_or_default();
    format!(
        "kubernetes#68211: the subpath {} is {}: {reason}",
        bind.bind.source().display(),
        bind.bind.verdict()
    )
}

/// The fourth and fifth field of the mount's line, escapes included: kubediag takes both from
/// there, and unmounts by them. A skipped line may be the mount on top.
fn as_written(table: &MountTable, path: &Path) -> Option<(String, String)> {
    if table.skipped().is_some() {
        return None;
    }
    let line = table.stack_at(path).last()?.to_line();
    let line = String::from_utf8_lossy(&line).into_owned();
    let mut fields = line.split(' ').skip(3);
    Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
}

fn print_object(keys: Map<String, Value>) -> anyhow::Result<()> {
    print_text(&format!("{}\n", Value::Object(keys)))
}
