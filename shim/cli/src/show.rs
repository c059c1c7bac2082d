//! Reports on a terminal, and for programs.
//!
//! Text is coloured on a terminal that supports it (`NO_COLOR` is respected); `--json` is the same
//! report, whole.

use std::fmt::{Display, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use anstyle::{AnsiColor, Style};
use bindguard_core::error_chain;
use bindguard_core::judge::VerdictName;
use bindguard_core::report::{BindRecord, ReleaseResult, ReleasedCopy};
use bindguard_core::text::{one_line, shell_word};
use bindguard_operator::node_report::{NodeBind, NodeReport};
use bindguard_operator::old_binds::{BindKind, OldBinds};
use bindguard_operator::pods::{ContainerState, PodContainer};
use bindguard_sys::Failure;
use serde::Serialize;

pub use bindguard_operator::terminal::{print_bytes, print_json, print_remark, print_text};

/// Prints a report, as text or as one JSON object, and returns the exit code.
pub fn finish(
    report: &impl Serialize,
    json: bool,
    text: Lines,
    is_incomplete: bool,
    has_findings: bool,
) -> anyhow::Result<ExitCode> {
    if json {
        print_json(report)?;
    } else {
        print_text(&text.0)?;
    }
    Ok(code(is_incomplete, has_findings))
}

/// 2 if the check is incomplete, else 1 if there are findings, else 0.
pub fn code(is_incomplete: bool, has_findings: bool) -> ExitCode {
    if is_incomplete {
        return ExitCode::from(COULD_NOT_TELL);
    }
    u8::from(has_findings).into()
}

/// The known names of a container's pod and of the container.
pub fn joined_names(container: &PodContainer, separator: &str) -> String {
    let names = [container.pod.display_name(), container.name.clone()];
    Vec::from_iter(names.into_iter().flatten()).join(separator)
}

/// The problem of a line that the journal did not get.
pub fn unrecorded(what: &str, recorded: Result<(), Failure>) -> Option<String> {
    let error = recorded.err()?;
    Some(format!("journal {what}: {}", error_chain(&error)))
}

/// A number and its noun.
pub fn counted<N: PartialEq + From<u8> + Display>(count: N, one: &str, more: &str) -> String {
    let noun = if count == N::from(1) { one } else { more };
    format!("{count} {noun}")
}

/// The node's root, as the pod sees it in which this program runs.
pub static NODE_ROOT: OnceLock<PathBuf> = OnceLock::new();

/// The exit code of an incomplete check, for scripts.
pub const COULD_NOT_TELL: u8 = 2;

// Lines of two columns: a coloured word, and a text about it.

/// The width of the first column: the longest word of a verdict or a point, and a space.
const WIDTH: usize = 11;

/// Text in the making.
#[derive(Debug, Default)]
pub struct Lines(String);

impl Lines {
    /// Lines about errors of the check itself.
    pub fn of_problems(problems: &[String]) -> Self {
        let mut lines = Self::default();
        lines.problems(problems);
        lines
    }

    /// A line that begins with a word.
    pub fn headed(&mut self, word: &str, style: Style, text: &str) {
        let _ = writeln!(self.0, "{style}{word:<WIDTH$}{style:#}{}", one_line(text));
    }

    /// A line about something healthy or faulty.
    pub fn marked(&mut self, word: &str, is_healthy: bool, text: &str) {
        self.headed(word, if is_healthy { HEALTHY } else { FAULTY }, text);
    }

    /// A line about the result for a mount, and the reason if it stays.
    pub fn result(&mut self, word: &str, is_good: bool, mount: &str, why: Option<&str>) {
        match why {
            Some(why) => self.marked(word, is_good, &format!("{mount}: {why}")),
            None => self.marked(word, is_good, mount),
        }
    }

    /// A line about a copy of an unmounted mount.
    pub fn copy(&mut self, copy: &ReleasedCopy, place: &str) {
        let is_released = copy.result == ReleaseResult::Released;
        let why = copy.error.as_deref();
        self.result(copy.result.into_str(), is_released, place, why);
    }

    pub fn problems(&mut self, problems: &[String]) {
        for problem in problems {
            self.headed("problem", UNCHECKED, problem);
        }
    }

    /// A line below a line that began with a word.
    pub fn below(&mut self, text: &str) {
        let _ = writeln!(self.0, "{:WIDTH$}{}", "", one_line(text));
    }

    /// Lines below a line that began with a word, and a command for the operator.
    fn all_below(
        &mut self,
        texts: impl IntoIterator<Item = impl Display>,
        command: Option<&String>,
    ) {
        for text in texts {
            self.below(&text.to_string());
        }
        if let Some(command) = command {
            self.run(command);
        }
    }

    /// Adds a command for the operator.
    pub fn run(&mut self, command: &str) {
        let style = AnsiColor::Cyan.on_default();
        let (mut run, mut command) = ("run", command.to_owned());
        if let Some(root) = NODE_ROOT.get() {
            if command.starts_with("bindguard ") {
                command.push_str(&format!(" --root {}", shell_word(root)));
            } else if !command.starts_with("kubectl ") {
                // An image with bindguard has no other program.
                run = "run on the node";
            }
        }
        let command = one_line(&command);
        let _ = writeln!(self.0, "{:WIDTH$}{run}: {style}{command}{style:#}", "");
    }

    /// A line of its own.
    pub fn line(&mut self, text: &str) {
        let _ = writeln!(self.0, "{}", one_line(text));
    }

    /// The verdict, the bind, the reason, and the outcome.
    pub fn bind(&mut self, bind: &BindRecord) {
        let style = match bind.verdict {
            VerdictName::Current => HEALTHY,
            VerdictName::Foreign => DIMMED,
            VerdictName::Unknown => UNCHECKED,
            VerdictName::Stale | VerdictName::Orphaned | VerdictName::Unmounted => FAULTY,
            VerdictName::Pinning | VerdictName::Dead | VerdictName::Wrong => FAULTY,
        };
        let mut place = bind.source.clone();
        if let Some(destination) = &bind.destination {
            place += &format!(" at {destination}");
        }
        self.headed(bind.verdict.as_str(), style, &place);
        if let Some(reason) = &bind.reason {
            self.below(reason);
        }
        if let Some(outcome) = &bind.outcome {
            self.below(&outcome.to_string());
        }
    }
}

/// Nothing to do.
pub const HEALTHY: Style = AnsiColor::Green.on_default();
pub const FAULTY: Style = AnsiColor::Red.on_default().bold();
pub const UNCHECKED: Style = AnsiColor::Yellow.on_default().bold();
/// Nothing of bindguard's.
pub const DIMMED: Style = Style::new().dimmed();

// The report on a node.

/// Limit of places that the text names for a container. `--json` names all places.
const MAX_PLACES: usize = 5;

/// Running containers that read old files.
#[derive(Debug, Default, Serialize)]
pub struct OldFilesCount {
    /// All of them.
    pub containers: usize,
    /// The containers that opted in to live refresh.
    pub opted_in: usize,
}

impl OldFilesCount {
    pub fn of(report: &NodeReport) -> Self {
        let opted_in = report.old_files.iter().filter(|old| old.is_finding());
        Self {
            containers: report.old_files.len(),
            opted_in: opted_in.count(),
        }
    }
}

/// The text of the report on a node.
pub fn node_text(report: &NodeReport) -> Lines {
    let mut lines = Lines::of_problems(&report.problems);
    let (mut found, mut repaired) = (0, 0);
    for bind in &report.binds {
        lines.bind(&(&bind.bind).into());
        print_more(bind, &mut lines);
        found += usize::from(bind.is_finding());
        repaired += usize::from(bind.bind.is_repaired());
    }
    for old in &report.old_files {
        // Old files are a fault only if the container opted in.
        let opt_in = match old.opted_in {
            Some(true) => "it opted in to live refresh",
            Some(false) => "it did not opt in to live refresh",
            None => "no CRI reported whether it opted in to live refresh",
        };
        let names = joined_names(&old.container, " container ");
        let text = format!("read by {names}: {opt_in}");
        lines.headed("old files", style_of_old(old.is_finding()), &text);
        lines.all_below(&old.files, old.command.as_ref());
    }
    for old in &report.old_binds {
        print_old_binds(old, &mut lines);
    }
    for pinned in &report.pinned {
        let names = joined_names(&pinned.container, " container ");
        lines.marked("pinned", false, &format!("by {names}, unmounted here"));
        let places = pinned.places.iter().take(MAX_PLACES);
        let places = places.map(|place| place.display());
        lines.all_below(places, pinned.command.as_ref());
    }
    for mount in &report.mounts_below_emptydir {
        let (place, fs_type) = (mount.mount_point.display(), &mount.fs_type);
        let text = format!("a mount of the host is below it: {place} ({fs_type})");
        lines.marked("emptyDir", false, &text);
        if let Some(pod) = mount.pod.display_name() {
            lines.below(&format!("of pod {pod}"));
        }
        lines.all_below([mount.effect()], Some(&mount.command));
    }
    let mut summary = format!("{} checked, {found} with findings", report.checked);
    if repaired > 0 {
        summary += &format!(", {repaired} of them repaired");
    }
    lines.line(&summary);
    let old = OldFilesCount::of(report);
    if old.containers > 0 {
        let readers = counted(
            old.containers,
            "running container reads old files",
            "running containers read old files",
        );
        let opted_in = old.opted_in;
        lines.line(&format!(
            "{readers}, {opted_in} of them opted in to live refresh"
        ));
    }
    lines
}

fn style_of_old(is_finding: bool) -> Style {
    if is_finding { FAULTY } else { UNCHECKED }
}

fn print_old_binds(old: &OldBinds, lines: &mut Lines) {
    let (heading, shown) = match old.what {
        BindKind::Volumes => ("old volume", "the host has another mount or file there"),
        BindKind::HostFiles => ("old file", "the host has another file or none"),
        BindKind::HostRoot => ("private", "it keeps what the host unmounts"),
    };
    let word = old.what;
    let opt_in = match (old.engine, old.opted_in) {
        (Some(_), _) if old.what == BindKind::HostFiles => {
            "followed with the label bindguard.refresh=true".to_owned()
        }
        (Some(_), _) => format!("followed with the label bindguard.refresh-binds={word}"),
        (None, Some(true)) => format!("opted in to {word}"),
        (None, Some(false)) => format!("not opted in (bindguard.io/refresh-binds: {word})"),
        (None, None) => format!("no CRI reported whether it opted in to {word}"),
    };
    let names = match old.engine {
        Some(engine) => format!("{engine} container {}", old.container.id),
        None => joined_names(&old.container, " container "),
    };
    let text = format!("in {names}, {shown}: {opt_in}");
    lines.headed(heading, style_of_old(old.is_finding()), &text);
    lines.all_below(&old.mounts, old.command.as_ref());
}

fn print_more(bind: &NodeBind, lines: &mut Lines) {
    if let Some(pod) = bind.pod.as_ref().and_then(|pod| pod.display_name()) {
        let mut whose = format!("of pod {pod}");
        if let Some(container) = &bind.container
            && let Some(name) = &container.name
        {
            let state = container.state.unwrap_or(ContainerState::Running);
            whose += &format!(", container {name} ({state}");
            if let Some(attempt) = container.attempt.filter(|attempt| *attempt > 0) {
                whose += &format!(", created again {}", counted(attempt, "time", "times"));
            }
            whose += ")";
        }
        lines.below(&whose);
    }
    if let Some(origin) = bind.origin.as_ref().filter(|_| bind.is_finding()) {
        lines.below(&format!("it was bound from {}", origin.original_source));
        lines.below(&format!("see {}", origin.issue));
    }
    lines.all_below(&bind.notes, bind.command.as_ref());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let texts = [0_u32, 1, 2].map(|count| counted(count, "time", "times"));
        assert_eq!(texts, ["0 times", "1 time", "2 times"]);
    }

    #[test]
    fn a_name_cannot_write_lines_of_its_own() {
        let mut lines = Lines::default();
        lines.headed("stale", Style::new(), "/a\ncurrent    /b\u{1b}[2J");
        lines.below("/a\u{202e}fnoc\u{2066}");
        assert_eq!(
            lines.0,
            "stale      /a\\ncurrent    /b\\u{1b}[2J\n           /a\\u{202e}fnoc\\u{2066}\n"
        );
    }
}
