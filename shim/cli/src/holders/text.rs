//! The holders report for people: a paragraph for each pod and for each mount namespace outside
//! pods.
//!
//! A paragraph names a few mounts. `--json` names all of them, and lists the namespaces of a pod
//! separately.

use bindguard_core::text::shell_word;
use bindguard_operator::holders::{HeldMount, Holder, HolderKind, HoldersReport, ReleaseCommand};

use crate::show::{DIMMED, FAULTY, HEALTHY, Lines};

/// The number of mounts that a paragraph names.
const NAMED: usize = 5;

/// The report as text.
pub fn of(report: &HoldersReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for mount in report.mounts.iter().take(NAMED) {
        lines.headed("mounted", HEALTHY, &of_mount(mount));
    }
    say_how_many_more(report.mounts.len(), NAMED, &mut lines);
    // Without a command to advise, only the pods matter.
    let named = if report.note.is_some() { 0 } else { NAMED };
    for group in by_pod(&report.holders) {
        describe(&group, named, &mut lines);
    }
    if let Some(note) = &report.note {
        lines.headed("note", DIMMED, note);
    }
    lines.line(&summary(report));
    lines
}

/// The namespaces grouped by pod, in the order of the report.
fn by_pod(holders: &[Holder]) -> Vec<Vec<&Holder>> {
    let mut groups: Vec<Vec<&Holder>> = Vec::new();
    for holder in holders {
        let is_of_it =
            |group: &&mut Vec<&Holder>| holder.pod.is_some() && group[0].pod == holder.pod;
        match groups.iter_mut().find(is_of_it) {
            Some(group) => group.push(holder),
            None => groups.push(vec![holder]),
        }
    }
    groups
}

fn describe(group: &[&Holder], named: usize, lines: &mut Lines) {
    let heading = match group {
        [holder] => who(holder),
        _ => processes_of_pod(group),
    };
    lines.headed("held", FAULTY, &heading);
    let mounts: Vec<&HeldMount> = group.iter().flat_map(|holder| &holder.mounts).collect();
    for mount in mounts.iter().take(named) {
        lines.below(&format!("has {}", of_mount(mount)));
    }
    say_how_many_more(mounts.len(), named, lines);
    for release in releases(group) {
        lines.below(&format!("{}:", release.effect));
        lines.run(&release.command);
    }
}

fn say_how_many_more(all: usize, named: usize, lines: &mut Lines) {
    if let Some(more) = all.checked_sub(named).filter(|more| *more > 0) {
        let (word, mounts) = (
            if named == 0 { "" } else { " more" },
            if more == 1 { "mount" } else { "mounts" },
        );
        lines.below(&format!(
            "has {more}{word} {mounts} there: --json names all"
        ));
    }
}

/// The commands that free the mounts of a group: mildest first, each once.
fn releases<'r>(group: &[&'r Holder]) -> Vec<&'r ReleaseCommand> {
    let most = group
        .iter()
        .map(|holder| holder.release.len())
        .max()
        .unwrap_or_default();
    let all = (0..most).flat_map(|rank| {
        group
            .iter()
            .filter_map(move |holder| holder.release.get(rank))
    });
    let mut releases: Vec<&ReleaseCommand> = Vec::new();
    for release in all {
        if !releases.contains(&release) {
            releases.push(release);
        }
    }
    releases
}

fn processes_of_pod(group: &[&Holder]) -> String {
    let name = group[0]
        .pod
        .as_ref()
        .and_then(|pod| pod.display_name())
        .unwrap_or_default();
    let process = |holder: &&Holder| {
        Some(format!(
            "{} ({})",
            holder.process_name.as_deref().unwrap_or("?"),
            holder.pid?
        ))
    };
    let processes: Vec<String> = group.iter().filter_map(process).take(NAMED).collect();
    format!(
        "by pod {name} in {} mount namespaces: {}",
        group.len(),
        processes.join(", ")
    )
}

fn who(holder: &Holder) -> String {
    let container = holder
        .container
        .as_ref()
        .map(|id| format!(", container {}", &id[..id.len().min(12)]));
    let pod = holder
        .pod
        .as_ref()
        .and_then(|pod| pod.display_name())
        .map(|pod| format!(", pod {pod}"));
    let more = match holder.processes {
        0 | 1 => String::new(),
        many => format!(" and {} more", many - 1),
    };
    let (pid, command) = (
        holder.pid.unwrap_or_default(),
        holder.process_name.as_deref().unwrap_or("?"),
    );
    let by = match holder.held_by {
        HolderKind::Process => format!("by {command} ({pid}){more}"),
        HolderKind::Descriptor => {
            format!("in a mount namespace without processes that {command} ({pid}) has open")
        }
        HolderKind::BindMount => {
            "in a mount namespace without processes that is bind-mounted here".to_owned()
        }
        HolderKind::OwnNamespace => return "elsewhere in this mount namespace".to_owned(),
    };
    format!(
        "{by}{}{}",
        container.unwrap_or_default(),
        pod.unwrap_or_default()
    )
}

fn of_mount(mount: &HeldMount) -> String {
    let propagates = if mount.unmount_propagates {
        ", an unmount here reaches it"
    } else {
        ""
    };
    let HeldMount {
        mount_point,
        root,
        fs_type,
        device,
        propagation,
        ..
    } = mount;
    format!(
        "{} ({fs_type} {device}, {root}): {propagation}{propagates}",
        mount_point.display()
    )
}

fn summary(report: &HoldersReport) -> String {
    let checked = format!(
        "checked {} processes in {} mount namespaces",
        report.checked.processes, report.checked.namespaces
    );
    match (report.holders.len(), report.mounts.len()) {
        (0, 0) => format!("no mount namespace has anything mounted there; {checked}"),
        (0, _) => format!(
            "only this mount namespace has it mounted; {checked}; if umount reports busy, a process has a file open: \
             fuser -vm {}",
            shell_word(&report.path)
        ),
        (1, _) => format!("1 mount namespace holds it; {checked}"),
        (holders, _) => format!("{holders} mount namespaces hold it; {checked}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_command_is_quoted() {
        let mount = HeldMount {
            mount_point: "/mnt/my disk".into(),
            root: "/".to_owned(),
            fs_type: "ext4".to_owned(),
            device: "8:16".to_owned(),
            propagation: "shared",
            unmount_propagates: true,
        };
        let report = HoldersReport {
            path: "/mnt/my disk".into(),
            mounts: vec![mount],
            ..HoldersReport::default()
        };
        assert!(summary(&report).contains("fuser -vm '/mnt/my disk'"));
    }
}
