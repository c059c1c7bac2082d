//! The results of kubediag's subpath processors, so that bindguard can stand in for them.
//!
//! kubediag hands a map of strings from processor to processor. One processor's result is one line here: the mount
//! table's collector, then the diagnoser for each stale subpath; from `repair --unmount`, the recoverer for each that was
//! detached. The keys and the values' forms are those of `pkg/processors` of kubediag/kubediag.

use std::path::Path;

use bindguard_core::mount_table::MountTable;
use bindguard_core::node_report::{ISSUE, NodeBind, NodeReport};
use serde_json::json;

use crate::show::print_text;

/// Prints what the collector and the diagnoser would.
pub fn print_diagnosis(report: &NodeReport, mountinfo: &[u8], table: &MountTable) -> anyhow::Result<()> {
    let mut lines = vec![json!({ "collector.system.mountinfo": String::from_utf8_lossy(mountinfo) })];
    for bind in report.binds.iter().filter(|bind| is_stale_subpath(bind)) {
        let Some((root, mount_point)) = as_written(table, &bind.bind.source) else { continue };
        lines.push(json!({
            "diagnoser.kubernetes.subpath_remount.result": told(bind),
            "diagnoser.kubernetes.subpath_remount.bug_link": ISSUE,
            "diagnoser.kubernetes.subpath_remount.original_source_path": root,
            "diagnoser.kubernetes.subpath_remount.original_destination_path": mount_point,
        }));
    }
    print_lines(&lines)
}

/// Prints what the recoverer would, of those that were detached or mended.
pub fn print_recovery(report: &NodeReport) -> anyhow::Result<()> {
    let mended = report.binds.iter().filter(|bind| bind.is_mended()).map(|bind| {
        let outcome = bind.bind.outcome.as_ref().map(|outcome| outcome.in_words()).unwrap_or_default();
        json!({ "recover.kubernetes.subpath_remount.result": format!("{}: {outcome}", bind.bind.source.display()) })
    });
    print_lines(&mended.collect::<Vec<_>>())
}

fn is_stale_subpath(bind: &NodeBind) -> bool {
    bind.bind.kind == "subpath" && matches!(bind.bind.verdict, "stale" | "orphaned")
}

fn told(bind: &NodeBind) -> String {
    let reason = bind.bind.reason.as_deref().unwrap_or_default();
    format!("kubernetes#68211: the subpath {} is {}: {reason}", bind.bind.source.display(), bind.bind.verdict)
}

/// The fourth and fifth field of the mount's line, which is where kubediag takes both from, escapes and all.
fn as_written(table: &MountTable, path: &Path) -> Option<(String, String)> {
    let line = table.stack_at(path).last()?.to_line();
    let line = String::from_utf8_lossy(&line).into_owned();
    let mut fields = line.split(' ').skip(3);
    Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
}

fn print_lines(lines: &[serde_json::Value]) -> anyhow::Result<()> {
    print_text(&lines.iter().map(|line| format!("{line}\n")).collect::<String>())
}
