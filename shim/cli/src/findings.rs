//! The report on a node for people: a table with a line for each container and fault.
//!
//! A node may have hundreds of findings with few causes. The table joins the findings of a container
//! that have the same verdict, reason and cure, and prints a command that several findings share
//! once. On a terminal the lines are cut to its width. In detail, each finding has its own line, with
//! its origin and command below.

use std::collections::BTreeSet;
use std::fs;
use std::io::stdout;
use std::path::Path;

use anstyle::Style;
use bindguard_core::judge::Verdict;
use bindguard_core::kubelet::{Plugin, Writer};
use bindguard_core::report::{Outcome, RefreshedMount};
use bindguard_core::text::one_line;
use bindguard_operator::node_report::{NodeBind, NodeReport, Note};
use bindguard_operator::old_binds::{BindKind, OldBinds};
use bindguard_operator::pods::PodContainer;

use crate::show::{DIMMED, FAULTY, HEALTHY, Lines, UNCHECKED, counted, style_of};

/// Limit of places that a line names, and of commands with the same effect.
const MAX_NAMED: usize = 3;

const HEADER: [&str; 7] = [
    "STATE",
    "AGE",
    "CURE",
    "POD",
    "CONTAINER",
    "PLACE",
    "REASON",
];
const AGE: usize = 1;
const CURE: usize = 2;
const PLACE: usize = 5;

/// Findings of a container with the same verdict, reason and cure.
struct Row {
    /// Without the place.
    columns: [String; 7],
    style: Style,
    places: Vec<String>,
    /// Lines below the row in detail.
    details: Vec<String>,
    commands: Vec<String>,
}

/// The text of the report on a node. `repair_all` is the command that repairs all its subpaths.
pub fn node_text(report: &NodeReport, in_detail: bool, repair_all: Option<String>) -> Lines {
    let mut lines = Lines::of_problems(&report.problems);
    let mut rows = rows_of(report);
    if !in_detail {
        rows.dedup_by(Row::joins);
    }
    print_rows(&rows, in_detail, &mut lines);
    let (mut found, mut repaired) = (0, 0);
    let mut readers = BTreeSet::new();
    for bind in &report.binds {
        found += usize::from(bind.is_finding());
        repaired += usize::from(bind.bind.is_repaired());
        if bind.notes.contains(&Note::OldContent) {
            readers.extend(bind.container.as_ref().map(|it| &it.id));
        }
    }
    let mut summary = format!("{} checked, {found} with findings", report.checked);
    if repaired > 0 {
        summary += &format!(", {repaired} of them repaired");
    }
    if !in_detail && !rows.is_empty() {
        summary += "; --verbose has the details";
    }
    lines.line(&summary);
    if !readers.is_empty() {
        lines.line(&counted(
            readers.len(),
            "running container keeps the old content until it restarts or is refreshed",
            "running containers keep the old content until they restart or are refreshed",
        ));
    }
    if !in_detail {
        print_commands(&rows, repair_all, &mut lines);
    }
    lines
}

fn rows_of(report: &NodeReport) -> Vec<Row> {
    let mut rows: Vec<Row> = report.binds.iter().map(Row::of_bind).collect();
    for old in &report.old_files {
        // Old files are a fault only if the container opted in.
        let opt_in = match old.opted_in {
            Some(true) => "it opted in to live refresh",
            Some(false) => "it did not opt in to live refresh",
            None => "no CRI reported whether it opted in to live refresh",
        };
        let (container, command) = (&old.container, old.command.as_ref());
        let style = style_of_old(old.is_finding());
        let mut row = Row::new("old files", style, container, opt_in, command);
        row.has_mounts(&old.files);
        rows.push(row);
    }
    for old in &report.old_binds {
        rows.push(Row::of_old_binds(old));
    }
    for pinned in &report.pinned {
        let command = pinned.command.as_ref();
        let mut row = Row::new(
            "pinned",
            FAULTY,
            &pinned.container,
            "unmounted here",
            command,
        );
        for place in &pinned.places {
            row.places.push(place.display().to_string());
        }
        rows.push(row);
    }
    for mount in &report.mounts_below_emptydir {
        let container = PodContainer {
            pod: mount.pod.clone(),
            ..PodContainer::default()
        };
        let (effect, command) = (mount.effect(), Some(&mount.command));
        let mut row = Row::new("emptyDir", FAULTY, &container, effect, command);
        row.places.push(mount.mount_point.display().to_string());
        let detail = format!("a mount of the host is below it ({})", mount.fs_type);
        row.details.push(detail);
        rows.push(row);
    }
    // by pod, with equal rows side by side
    rows.sort_by_cached_key(|row| (row.columns[3..PLACE].to_vec(), row.columns.clone()));
    rows
}

impl Row {
    fn new(
        state: &str,
        style: Style,
        container: &PodContainer,
        reason: &str,
        command: Option<&String>,
    ) -> Self {
        let unknown = || "-".to_owned();
        Self {
            columns: [
                state.to_owned(),
                unknown(),
                command.map_or("-", |command| cure(command)).to_owned(),
                container.pod.display_name().unwrap_or_else(unknown),
                container.name.clone().unwrap_or_else(unknown),
                String::new(),
                reason.to_owned(),
            ],
            style,
            places: Vec::new(),
            details: Vec::new(),
            commands: Vec::from_iter(command.cloned()),
        }
    }

    /// Adds this row to the row before, if the two differ only in their places.
    fn joins(&mut self, before: &mut Self) -> bool {
        let is_alike = self.columns == before.columns;
        if is_alike {
            before.places.append(&mut self.places);
            before.commands.append(&mut self.commands);
        }
        is_alike
    }

    fn has_mounts(&mut self, mounts: &[RefreshedMount]) {
        for mount in mounts {
            self.places.push(mount.to_string());
            self.columns[AGE] = age(Path::new(&mount.source));
        }
    }

    fn of_old_binds(old: &OldBinds) -> Self {
        let (state, shown) = match old.what {
            BindKind::Volumes => ("old volume", "the host has another mount or file there"),
            BindKind::HostFiles => ("old file", "the host has another file or none"),
            BindKind::HostRoot => ("private", "it keeps what the host unmounts"),
        };
        let word = old.what;
        let opt_in = match (old.engine, old.opted_in) {
            (Some(_), _) if word == BindKind::HostFiles => {
                "followed with the label bindguard.refresh=true".to_owned()
            }
            (Some(_), _) => format!("followed with the label bindguard.refresh-binds={word}"),
            (None, Some(true)) => format!("opted in to {word}"),
            (None, Some(false)) => format!("not opted in (bindguard.io/refresh-binds: {word})"),
            (None, None) => format!("no CRI reported whether it opted in to {word}"),
        };
        let mut container = old.container.clone();
        if let Some(engine) = old.engine {
            container.pod.uid = Some(engine.to_owned());
            container.name = Some(container.id.clone());
        }
        let reason = format!("{shown}: {opt_in}");
        let style = style_of_old(old.is_finding());
        let mut row = Self::new(state, style, &container, &reason, old.command.as_ref());
        row.has_mounts(&old.mounts);
        row
    }

    fn of_bind(found: &NodeBind) -> Self {
        let finding = &found.bind.finding;
        let verdict = found.bind.verdict();
        let mut container = found.container.clone().unwrap_or_default();
        container.pod = found.pod.clone().unwrap_or_default();
        let source = finding.source.to_string_lossy();
        let uid = container.pod.uid.as_deref().unwrap_or("/");
        let mut place = source.to_string();
        if let Some((_, below_pod)) = source.split_once(&format!("/{uid}/")) {
            place = below_pod.replace("kubernetes.io~", "");
            match place.split('/').collect::<Vec<_>>()[..] {
                ["volume-subpaths", volume, name, index] => {
                    container.name = Some(name.to_owned());
                    place = format!("{volume}/{index}");
                }
                ["volumes", ref volume @ ..] => place = volume.join("/"),
                _ => {}
            }
        }
        let mut reason = finding.verdict.reason().unwrap_or_default();
        let (mut state, mut style) = (verdict.as_str(), style_of(verdict));
        match &found.bind.outcome {
            Some(outcome) if outcome.is_repaired() => {
                (state, style, reason) = ("repaired", HEALTHY, outcome.to_string());
            }
            Some(outcome @ Outcome::Failed { .. }) => reason = outcome.to_string(),
            Some(outcome) => reason += &format!("; {outcome}"),
            None => {}
        }
        if let Some(note) = found.notes.first().filter(|_| reason.is_empty()) {
            reason = note.to_string();
        }
        let mut row = Self::new(state, style, &container, &reason, found.command.as_ref());
        if let Verdict::Stale {
            remedy: Ok(remedy), ..
        } = &finding.verdict
            && remedy.writer == Writer::Kubelet
        {
            row.columns[AGE] = age(&remedy.volume);
        }
        row.places.push(place);
        row.details.push(source.into_owned());
        if let Some(state) = container.state {
            let again = counted(container.attempt.unwrap_or(0), "time", "times");
            let detail = format!("its container is {state}, created again {again}");
            row.details.push(detail);
        }
        if let Some(origin) = found.origin.as_ref().filter(|_| found.is_finding()) {
            row.details.extend([
                format!("it was bound from {}", origin.original_source),
                format!("see {}", origin.issue),
            ]);
        }
        let notes = found.notes.iter().map(ToString::to_string);
        row.details.extend(notes);
        row
    }
}

fn style_of_old(is_finding: bool) -> Style {
    if is_finding { FAULTY } else { UNCHECKED }
}

fn print_rows(rows: &[Row], in_detail: bool, lines: &mut Lines) {
    if rows.is_empty() {
        return;
    }
    let named = if in_detail { usize::MAX } else { MAX_NAMED };
    let mut printed = vec![(DIMMED, HEADER.map(str::to_owned), None)];
    for row in rows {
        let mut columns = row.columns.clone();
        let more = row.places.len().saturating_sub(named);
        columns[PLACE] = row.places[..row.places.len() - more].join(" ");
        if more > 0 {
            columns[PLACE] += &format!(" +{more}");
        }
        let columns = columns.map(|text| one_line(&text).into_owned());
        printed.push((row.style, columns, Some(row)));
    }
    let mut widths = [0; 7];
    for (_, columns, _) in &printed {
        for (width, text) in widths.iter_mut().zip(columns) {
            *width = (*width).max(text.chars().count());
        }
    }
    // A pipe has no width.
    let terminal = terminal_size::terminal_size_of(stdout()).filter(|_| !in_detail);
    let limit = terminal.map_or(usize::MAX, |(width, _)| width.0.into());
    for (style, columns, row) in printed {
        let mut line = String::new();
        for (width, text) in widths.iter().zip(columns) {
            line += &format!("{text:<width$}  ");
        }
        line.truncate(line.trim_end().len());
        if line.chars().count() > limit {
            line = line.chars().take(limit - 1).chain(['…']).collect();
        }
        let (state, rest) = line.split_at_checked(widths[0]).unwrap_or((&line, ""));
        lines.styled(style, state, rest);
        if let Some(row) = row.filter(|_| in_detail) {
            row.details.iter().for_each(|detail| lines.below(detail));
            row.commands.iter().for_each(|command| lines.run(command));
        }
    }
}

/// Prints the commands, grouped by cure.
fn print_commands(rows: &[Row], repair_all: Option<String>, lines: &mut Lines) {
    let mut cures: Vec<(&str, Vec<&str>)> = Vec::new();
    for row in rows {
        for command in &row.commands {
            let cure = &row.columns[CURE];
            match cures.iter_mut().find(|(known, _)| known == cure) {
                Some((_, commands)) if commands.contains(&command.as_str()) => {}
                Some((_, commands)) => commands.push(command),
                None => cures.push((cure, vec![command])),
            }
        }
    }
    for (cure, mut commands) in cures {
        let more = commands.len().saturating_sub(MAX_NAMED);
        commands.truncate(MAX_NAMED);
        if more > 0
            && cure == REPAIR
            && let Some(all) = &repair_all
        {
            lines.run(all);
            continue;
        }
        commands.iter().for_each(|command| lines.run(command));
        if more > 0 {
            lines.below(&format!("--verbose has {more} more commands to {cure}"));
        }
    }
}

const REPAIR: &str = "repair";

/// The verb of a command.
fn cure(command: &str) -> &str {
    if command.starts_with("bindguard repair --unmount ") {
        return "unmount";
    }
    let verbs = [
        REPAIR, "refresh", "holders", "delete", "describe", "get", "umount",
    ];
    let mut words = command.split(' ');
    words.find(|word| verbs.contains(word)).unwrap_or("run")
}

/// The time since the kubelet wrote a volume, which made older mounts of its files stale. `path` is
/// the volume or a file of the volume. Other volumes may be on a server that does not answer.
fn age(path: &Path) -> String {
    let mut plugins = path.iter().filter_map(Plugin::from_folder);
    let is_kubelets = plugins.any(|plugin| plugin.writer == Writer::Kubelet);
    let mut folders = path.ancestors().filter(|_| is_kubelets);
    let link = folders.find_map(|folder| fs::symlink_metadata(folder.join("..data")).ok());
    let age = link.and_then(|link| link.modified().ok()?.elapsed().ok());
    match age.map(|age| age.as_secs()) {
        None => "-".to_owned(),
        Some(seconds @ ..120) => format!("{seconds}s"),
        Some(seconds @ ..7_200) => format!("{}m", seconds / 60),
        Some(seconds @ ..172_800) => format!("{}h", seconds / 3_600),
        Some(seconds) => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_of_a_command_is_the_cure() {
        for (command, verb) in [
            ("bindguard repair /var/lib/kubelet/pods/u", "repair"),
            (
                "bindguard repair --unmount /var/lib/kubelet/pods/u",
                "unmount",
            ),
            (
                "bindguard refresh --pod default/web --what volumes",
                "refresh",
            ),
            ("kubectl -n shop delete pod web", "delete"),
            (
                "kubectl get pods -A -o custom-columns=UID:.metadata.uid",
                "get",
            ),
            ("umount /mnt/disk", "umount"),
        ] {
            assert_eq!(cure(command), verb);
        }
    }

    #[test]
    fn findings_with_one_cause_share_a_line_and_many_commands_one_command() {
        let (container, mut rows) = (PodContainer::default(), Vec::new());
        for index in 0..5 {
            let command = format!("bindguard repair /{index}");
            let mut row = Row::new("stale", FAULTY, &container, "deleted\n", Some(&command));
            row.places.push(format!("conf/{index}"));
            rows.push(row);
        }
        rows.push(Row::new("dead", FAULTY, &container, "no answer", None));
        rows.dedup_by(Row::joins);
        let mut lines = Lines::default();
        print_rows(&rows, false, &mut lines);
        print_commands(&rows, Some("bindguard repair --all".to_owned()), &mut lines);
        let text = anstream::adapter::strip_str(lines.as_str()).to_string();
        assert_eq!(
            text,
            "STATE  AGE  CURE    POD  CONTAINER  PLACE                    REASON\n\
             stale  -    repair  -    -          conf/0 conf/1 conf/2 +2  deleted\\n\n\
             dead   -    -       -    -                                   no answer\n           \
             run: bindguard repair --all\n"
        );
    }
}
