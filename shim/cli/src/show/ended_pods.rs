//! Prints the mounts and directories of ended pods.

use std::process::ExitCode;

use bindguard_operator::ended_pods::{CONFIRMATION_INTERVAL, EndedPod, EndedPods, LeftOutcome};

use super::{FAULTY, Lines, UNCHECKED, code, counted, print_report};

/// The command that removes what is safe to remove.
const REMOVE: &str = "bindguard repair --orphaned-pods";

/// Prints the pods that have ended, as text or as one JSON object.
pub fn print_ended_pods(ended: &EndedPods, json: bool) -> anyhow::Result<()> {
    print_report(ended, json, text)
}

fn text(ended: &EndedPods) -> Lines {
    let mut lines = Lines::default();
    write_ended_pods(ended, &mut lines);
    let left = ended.pods.iter().filter(|pod| pod.is_left()).count();
    let gone = ended.pods.len() - left;
    lines.line(&format!(
        "{}, {gone} of them removed",
        counted(
            ended.pods.len(),
            "ended pod has a folder",
            "ended pods have folders"
        )
    ));
    lines
}

/// 2 if something could not be read or removed, 1 if something is left, else 0.
pub fn ended_pods_exit_code(ended: &EndedPods) -> ExitCode {
    code(
        ended.has_problems() || ended.unchecked.is_some(),
        ended.pods.iter().any(EndedPod::is_left),
    )
}

/// The lines about them.
pub fn write_ended_pods(ended: &EndedPods, lines: &mut Lines) {
    if let Some(why) = &ended.unchecked {
        lines.headed(
            "unchecked",
            UNCHECKED,
            &format!("folders of ended pods: {why}"),
        );
    }
    ended.pods.iter().for_each(|pod| write_pod(pod, lines));
    if ended.has_findings() && ended.pods.iter().all(|pod| !pod.removed) {
        lines.run(REMOVE);
    }
}

fn write_pod(pod: &EndedPod, lines: &mut Lines) {
    let minutes = pod.absent_s / 60;
    let (style, since) = match pod.confirmed {
        true => (FAULTY, format!("for {minutes} min")),
        false => (
            UNCHECKED,
            format!(
                "for {minutes} min; after {} min it counts as ended: run this again then",
                CONFIRMATION_INTERVAL / 60
            ),
        ),
    };
    lines.headed(
        "ended pod",
        style,
        &format!("{}: the kubelet and the CRI lack it {since}", pod.uid),
    );
    for mount in &pod.mounts {
        lines.below(&format!(
            "mount {} ({}): {}",
            mount.mount_point.display(),
            mount.fs_type,
            mount.outcome
        ));
        if mount.outcome == LeftOutcome::Busy {
            lines.run(&format!(
                "bindguard holders {}",
                bindguard_core::text::shell_word(&mount.mount_point)
            ));
        }
    }
    if !pod.empty_directories.is_empty() {
        let count = counted(
            pod.empty_directories.len(),
            "empty directory",
            "empty directories",
        );
        let done = if pod.removed { ": removed" } else { "" };
        lines.below(&format!("{count} in {}{done}", pod.folder.display()));
    }
    if pod.file_count > 0 {
        let count = counted(pod.file_count, "file is", "files are");
        lines.below(&format!("{count} left, which bindguard never removes:"));
        for file in &pod.files {
            lines.below(&format!("  {}", file.display()));
        }
    }
    for problem in &pod.problems {
        lines.problem(problem);
    }
}
