//! Reports on a terminal, and for programs.
//!
//! Text is coloured on a terminal that supports it (`NO_COLOR` is respected); `--json` is the same
//! report, whole.

use std::borrow::Cow;
use std::fmt::{Display, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use anstyle::{AnsiColor, Style};
use bindguard_core::identity::PodName;
use bindguard_core::judge::VerdictName;
use bindguard_core::report::{BindRecord, BindReport, Report};
use bindguard_core::text::{one_line, shell_word};
use bindguard_operator::container_mounts::PinnedMounts;
use bindguard_operator::node_report::{NodeBind, NodeReport};
use bindguard_operator::old_binds::{BindKind, OldBinds};
use bindguard_operator::old_files::OldFiles;
use bindguard_operator::pods::{ContainerState, PodContainer};
use serde::Serialize;

pub use bindguard_operator::terminal::{print_bytes, print_json, print_remark, print_text};

/// Prints a report, as text or as one JSON object.
pub fn print_report<R: Serialize>(
    report: &R,
    json: bool,
    text: impl FnOnce(&R) -> Lines,
) -> anyhow::Result<()> {
    if json {
        print_json(report)
    } else {
        print_text(text(report).text())
    }
}

/// The known names of a container's pod and of the container.
pub fn joined_names(pod: &PodName, container: &PodContainer, separator: &str) -> String {
    let names = [pod.display_name(), container.name.clone()];
    let names: Vec<String> = names.into_iter().flatten().collect();
    names.join(separator)
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

/// 2 if the check is incomplete, else 1 if there are findings, else 0.
pub fn code(is_incomplete: bool, has_findings: bool) -> ExitCode {
    match (is_incomplete, has_findings) {
        (true, _) => ExitCode::from(COULD_NOT_TELL),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    }
}

// Lines of two columns: a coloured word, and a text about it.

/// The width of the first column: the longest word of a verdict or a point, and a space.
const WIDTH: usize = 11;

/// Text in the making.
#[derive(Debug, Default)]
pub struct Lines(String);

impl Lines {
    /// A line that begins with a word.
    pub fn headed(&mut self, word: &str, style: Style, text: &str) {
        let _ = writeln!(self.0, "{style}{word:<WIDTH$}{style:#}{}", one_line(text));
    }

    /// A line about an error of the check itself.
    pub fn problem(&mut self, text: &str) {
        self.headed("problem", UNCHECKED, text);
    }

    /// A line below a line that began with a word.
    pub fn below(&mut self, text: &str) {
        let _ = writeln!(self.0, "{:WIDTH$}{}", "", one_line(text));
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

    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Nothing to do.
pub const HEALTHY: Style = AnsiColor::Green.on_default();
pub const FAULTY: Style = AnsiColor::Red.on_default().bold();
pub const UNCHECKED: Style = AnsiColor::Yellow.on_default().bold();
/// Nothing of bindguard's.
pub const DIMMED: Style = Style::new().dimmed();

/// The style of a verdict's name.
pub fn verdict_style(verdict: VerdictName) -> Style {
    match verdict {
        VerdictName::Current => HEALTHY,
        VerdictName::Foreign => DIMMED,
        VerdictName::Unknown => UNCHECKED,
        VerdictName::Stale | VerdictName::Orphaned | VerdictName::Unmounted => FAULTY,
        VerdictName::Pinning | VerdictName::Dead | VerdictName::Wrong => FAULTY,
    }
}

// The report on a bundle.

/// Prints a report, as text or as one JSON object.
pub fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    print_report(report, json, text)
}

/// 2 if there is a problem or an unknown verdict, else 1 if there are findings, else 0.
pub fn exit_code(report: &Report) -> ExitCode {
    let unknown = report
        .binds
        .iter()
        .any(|bind| bind.verdict() == VerdictName::Unknown);
    code(
        !report.problems.is_empty() || unknown,
        report.binds.iter().any(is_finding),
    )
}

fn text(report: &Report) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for bind in &report.binds {
        print_bind(&bind.into(), &mut lines);
    }
    let found = report.binds.iter().filter(|bind| is_finding(bind)).count();
    lines.line(&format!(
        "{} checked, {found} with findings, {} foreign",
        report.binds.len(),
        report.foreign
    ));
    lines
}

fn is_finding(bind: &BindReport) -> bool {
    bind.finding.verdict.is_finding()
}

/// The verdict, the bind, the reason, and the outcome.
pub fn print_bind(bind: &BindRecord, lines: &mut Lines) {
    let destination = bind
        .destination
        .as_ref()
        .map(|path| format!(" at {path}"))
        .unwrap_or_default();
    lines.headed(
        bind.verdict.as_str(),
        verdict_style(bind.verdict),
        &format!("{}{destination}", bind.source),
    );
    let outcome = bind
        .outcome
        .as_ref()
        .map(|outcome| Cow::Owned(outcome.to_string()));
    for line in [bind.reason.as_deref().map(Cow::Borrowed), outcome]
        .into_iter()
        .flatten()
    {
        lines.below(&line);
    }
}

// The report on a node.

/// Limit of places that the node_text names for a container. `--json` names all places.
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
    /// Counts them.
    pub fn of(report: &NodeReport) -> Self {
        let opted_in = report.old_files.iter().filter(|old| old.is_finding());
        Self {
            containers: report.old_files.len(),
            opted_in: opted_in.count(),
        }
    }
}

/// Prints a report, as node_text or as one JSON object.
pub fn print_node(report: &NodeReport, json: bool) -> anyhow::Result<()> {
    print_report(report, json, node_text)
}

/// 2 if the check is incomplete, 1 if a problem remains, else 0.
pub fn node_exit_code(report: &NodeReport) -> ExitCode {
    code(report.is_incomplete(), report.has_findings())
}

fn node_text(report: &NodeReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for bind in &report.binds {
        print_bind(&(&bind.bind).into(), &mut lines);
        print_more(bind, &mut lines);
    }
    report
        .old_files
        .iter()
        .for_each(|old| print_old_files(old, &mut lines));
    report
        .old_binds
        .iter()
        .for_each(|old| print_old_binds(old, &mut lines));
    report
        .pinned
        .iter()
        .for_each(|pinned| print_pinned(pinned, &mut lines));
    for mount in &report.mounts_below_emptydir {
        let place = mount.mount_point.display();
        let place = format!(
            "a mount of the host is below it: {place} ({})",
            mount.fs_type
        );
        lines.headed("emptyDir", FAULTY, &place);
        if let Some(pod) = mount.pod.display_name() {
            lines.below(&format!("of pod {pod}"));
        }
        lines.below(mount.effect());
        lines.run(&mount.command);
    }
    let found = report.binds.iter().filter(|bind| bind.is_finding()).count();
    let repaired = report
        .binds
        .iter()
        .filter(|bind| bind.bind.is_repaired())
        .count();
    let repaired = if repaired > 0 {
        format!(", {repaired} of them repaired")
    } else {
        String::new()
    };
    lines.line(&format!(
        "{} checked, {found} with findings{repaired}",
        report.checked
    ));
    let OldFilesCount {
        containers,
        opted_in,
    } = OldFilesCount::of(report);
    if containers > 0 {
        lines.line(&format!(
            "{}, {opted_in} of them opted in to live refresh",
            counted(
                containers,
                "running container reads old files",
                "running containers read old files"
            )
        ));
    }
    lines
}

/// Old files are a fault only if the container opted in.
fn print_old_files(old: &OldFiles, lines: &mut Lines) {
    let (style, opt_in) = match old.opted_in {
        Some(true) => (FAULTY, "it opted in to live refresh"),
        Some(false) => (UNCHECKED, "it did not opt in to live refresh"),
        None => (
            UNCHECKED,
            "no CRI reported whether it opted in to live refresh",
        ),
    };
    let names = joined_names(&old.pod, &old.container, " container ");
    lines.headed("old files", style, &format!("read by {names}: {opt_in}"));
    old.files
        .iter()
        .for_each(|file| lines.below(&file.to_string()));
    if let Some(command) = &old.command {
        lines.run(command);
    }
}

fn print_old_binds(old: &OldBinds, lines: &mut Lines) {
    let heading = match old.what {
        BindKind::Volumes => "old volume",
        BindKind::HostFiles => "old file",
        BindKind::HostRoot => "private",
    };
    let shown = match old.what {
        BindKind::Volumes => "the host has another mount or file there",
        BindKind::HostFiles => "the host has another file or none",
        BindKind::HostRoot => "it keeps what the host unmounts",
    };
    let word = old.what.word();
    let opt_in = match old.opted_in {
        _ if old.engine.is_some() => match old.what {
            BindKind::HostFiles => "followed with the label bindguard.refresh=true".to_owned(),
            BindKind::Volumes | BindKind::HostRoot => {
                format!("followed with the label bindguard.refresh-binds={word}")
            }
        },
        Some(true) => format!("opted in to {word}"),
        Some(false) => format!("not opted in (bindguard.io/refresh-binds: {word})"),
        None => format!("no CRI reported whether it opted in to {word}"),
    };
    let style = if old.is_finding() { FAULTY } else { UNCHECKED };
    let names = match old.engine {
        Some(engine) => format!("{engine} container {}", old.container.id),
        None => joined_names(&old.pod, &old.container, " container "),
    };
    let node_text = format!("in {names}, {shown}: {opt_in}");
    lines.headed(heading, style, &node_text);
    old.mounts
        .iter()
        .for_each(|mount| lines.below(&mount.to_string()));
    if let Some(command) = &old.command {
        lines.run(command);
    }
}

fn print_pinned(pinned: &PinnedMounts, lines: &mut Lines) {
    let names = joined_names(&pinned.pod, &pinned.container, " container ");
    let by = format!("by {names}, unmounted here");
    lines.headed("pinned", FAULTY, &by);
    for place in pinned.places.iter().take(MAX_PLACES) {
        lines.below(&place.display().to_string());
    }
    if let Some(command) = &pinned.command {
        lines.run(command);
    }
}

fn print_more(bind: &NodeBind, lines: &mut Lines) {
    if let Some(whose) = whose(bind) {
        lines.below(&whose);
    }
    if let Some(origin) = bind.origin.as_ref().filter(|_| bind.is_finding()) {
        lines.below(&format!("it was bound from {}", origin.original_source));
        lines.below(&format!("see {}", origin.issue));
    }
    for note in &bind.notes {
        lines.below(&note.to_string());
    }
    if let Some(command) = &bind.command {
        lines.run(command);
    }
}

fn whose(bind: &NodeBind) -> Option<String> {
    let pod = bind.pod.as_ref()?.display_name()?;
    let container = bind.container.as_ref().and_then(|container| {
        let attempt = container.attempt.filter(|attempt| *attempt > 0);
        let again = attempt
            .map(|attempt| format!(", created again {}", counted(attempt, "time", "times")))
            .unwrap_or_default();
        Some(format!(
            ", container {} ({}{again})",
            container.name.as_ref()?,
            container.state.unwrap_or(ContainerState::Running)
        ))
    });
    Some(format!("of pod {pod}{}", container.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let texts = [0_u32, 1, 2].map(|count| counted(count, "time", "times"));
        assert_eq!(texts, ["0 times", "1 time", "2 times"]);
    }
}

#[cfg(test)]
mod style_tests {
    use super::*;

    #[test]
    fn a_name_cannot_write_lines_of_its_own() {
        let mut lines = Lines::default();
        lines.headed("stale", Style::new(), "/a\ncurrent    /b\u{1b}[2J");
        lines.below("/a\u{202e}fnoc\u{2066}");
        assert_eq!(
            lines.text(),
            "stale      /a\\ncurrent    /b\\u{1b}[2J\n           /a\\u{202e}fnoc\\u{2066}\n"
        );
    }
}
