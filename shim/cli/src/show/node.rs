//! The report on a node.

use std::process::ExitCode;

use bindguard_operator::container_mounts::PinnedMounts;
use bindguard_operator::node_report::{NodeBind, NodeReport};
use bindguard_operator::old_binds::{BindKind, OldBinds};
use bindguard_operator::old_files::OldFiles;
use bindguard_operator::pods::ContainerState;
use serde::Serialize;

use super::bundle::print_bind;
use super::counted;
use super::{FAULTY, Lines, UNCHECKED, code, joined_names, print_report};

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
    /// Counts them.
    pub fn of(report: &NodeReport) -> Self {
        let opted_in = report.old_files.iter().filter(|old| old.is_finding());
        Self {
            containers: report.old_files.len(),
            opted_in: opted_in.count(),
        }
    }
}

/// Prints a report, as text or as one JSON object.
pub fn print_node(report: &NodeReport, json: bool) -> anyhow::Result<()> {
    print_report(report, json, text)
}

/// 2 if the check is incomplete, 1 if a problem remains, else 0.
pub fn node_exit_code(report: &NodeReport) -> ExitCode {
    code(report.is_incomplete(), report.has_findings())
}

fn text(report: &NodeReport) -> Lines {
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
    let text = format!("in {names}, {shown}: {opt_in}");
    lines.headed(heading, style, &text);
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
