//! All that differs between two runs of the same programs, and its replacement.

use std::fs;

use anyhow::{Context, Result};
use time::OffsetDateTime;
use time::macros::format_description;

use crate::node::Node;
use crate::process::run;

/// The kernel gives the next number to the next process of the pid namespace.
pub(super) const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";

/// Pids of a recording are in this range.
pub(super) const PIDS: std::ops::Range<u64> = 20_000..26_000;

/// The inodes of namespaces. `PROC_DYNAMIC_FIRST` of fs/proc/generic.c
const NAMESPACES: std::ops::Range<u64> = 0xF000_0000..0xF100_0000;

/// The first pid of each case.
const CASE_PIDS: &str = "21000";

/// After these words follows a number that depends on the time, on the kernel's counters, or on
/// processes that are about to end; or the further characters.
const BEFORE_VALUES: [(&str, &str); 13] = [
    ("\"duration_us\":", ""),
    ("\"duration_us\": ", ""),
    ("\"inspection_us\":", ""),
    ("\"inspection_us\": ", ""),
    ("\"inode\":", ""),
    ("\"minor\":", ""),
    ("\"mounts_before\":", ""),
    ("\"accessed\": [", " ,\n"),
    ("\"accessed\":[", ","),
    ("\"changed\":[", ","),
    ("\n    \"processes\": ", ""),
    ("; checked ", ""),
    // containerd names one of several, in the order of a map of Go.
    ("invalid plugin key URI \"", "abcdefghijklmnopqrstuvwxyz"),
];

/// Lines of an answer by HTTP.
const HEADERS: [&str; 2] = ["date: ", "content-length: "];

/// Lets the processes of a case have the same pids in each run.
pub(super) fn restart_pids() -> Result<()> {
    fs::write(LAST_PID, CASE_PIDS).with_context(|| format!("write {LAST_PID}"))
}

/// The values of a run.
pub(super) struct Volatile {
    node: String,
    revision: String,
    version: String,
    /// The days on which it ran, as in `2026-11-27`.
    days: Vec<String>,
}

impl Volatile {
    pub(super) fn of(node: &Node) -> Result<Self> {
        let mut shim = node.command(node.under_test().join(crate::programs::SHIM))?;
        shim.arg("-v");
        let text = run(shim)?.success()?;
        let value = |key: &str| {
            let (_, rest) = text.split_once(key).unwrap_or_default();
            rest.lines().next().unwrap_or_default().trim().to_owned()
        };
        let mut days = Vec::new();
        for day in [0, 1] {
            let time = OffsetDateTime::now_utc() + time::Duration::days(day);
            let format = format_description!("[year]-[month]-[day]");
            days.push(time.format(format).context("format the time")?);
        }
        Ok(Self {
            node: node.name().to_owned(),
            revision: value("Revision:"),
            version: value("Version:"),
            days,
        })
    }

    /// The text as each run has it.
    pub(super) fn replaced(&self, text: &str) -> String {
        let mut text = text.replace(&self.node, "NODE");
        for (value, name) in [(&self.revision, "REVISION"), (&self.version, "VERSION")] {
            if !value.is_empty() {
                text = text.replace(value, name);
            }
        }
        for day in &self.days {
            text = values_replaced(&text, day, "TIME", "T.:Z");
            text = values_replaced(&text, &day.replace('-', "_"), "TIME", "_.");
        }
        for (start, more) in BEFORE_VALUES {
            text = values_replaced(&text, start, &format!("{start}N"), more);
        }
        let mut lines: Vec<&str> = text.split('\n').collect();
        lines.retain(|line| !HEADERS.iter().any(|header| line.starts_with(header)));
        words(&lines.join("\n"))
    }
}

/// Replaces each `start` with the digits, and the characters `more`, that follow it.
fn values_replaced(text: &str, start: &str, by: &str, more: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(start) {
        out.push_str(before);
        rest = after
            .trim_start_matches(|letter: char| letter.is_ascii_digit() || more.contains(letter));
        out.push_str(if rest.len() < after.len() { by } else { start });
    }
    out + rest
}

/// Replaces numbers and words that are new in each run: pids, ids and hashes of twelve or more
/// hexadecimal digits, device numbers without a device, namespaces, and durations.
fn words(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let length = rest
            .find(|letter: char| !letter.is_alphanumeric())
            .unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        let is_hex = word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_device = out.ends_with("0:") && !out.ends_with("00:");
        let unit = word.trim_start_matches(|letter: char| letter.is_ascii_digit());
        match word.parse::<u64>() {
            Ok(number) if PIDS.contains(&number) => out.push_str("PID"),
            Ok(number) if NAMESPACES.contains(&number) => out.push_str("NAMESPACE"),
            Ok(_) if is_device => out.push('N'),
            _ if unit.len() < word.len() && ["ms", "µs", "s"].contains(&unit) => {
                let whole =
                    out.trim_end_matches(|letter: char| letter.is_ascii_digit() || letter == '.');
                out.truncate(whole.len());
                out.push_str("DURATION");
            }
            _ if is_hex && word.len() >= 12 => out.push_str("HEX"),
            _ => out.push_str(word),
        }
        let mut letters = after.chars();
        out.extend(letters.next());
        rest = letters.as_str();
    }
    out
}
