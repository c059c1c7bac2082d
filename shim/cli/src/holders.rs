//! `bindguard holders`: who keeps the mounts at or below a path alive, and what would free them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use bindguard_core::holders::{Holder, HoldersReport, KeptMount, Wanted};
use bindguard_core::mount_table::MountTable;
use bindguard_core::pods::Pods;
use bindguard_sys::namespaces::{Namespaces, Proc};
use bindguard_sys::{Handle, block_device};
use clap::Args;

use crate::ask::answers;
use crate::pods::PodsFrom;
use crate::show::{self, Lines, print_json, print_text, verdict_style};

/// Arguments of `holders`.
#[derive(Debug, Args)]
pub struct Holders {
    /// A mount point, any folder, or a block device.
    path: PathBuf,
    /// The node's `/proc`, from inside a pod that has it mounted there. PATH is the node's then.
    #[arg(long, value_name = "DIR")]
    proc: Option<PathBuf>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pods: PodsFrom,
}

impl Holders {
    /// Runs it.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let proc = self.proc.clone().map_or_else(Proc::default, Proc::at);
        let path = if self.proc.is_some() { self.path.clone() } else { resolved(&self.path)? };
        let seen = proc.namespaces().map_err(|why| anyhow!(why))?;
        let report = report(&path, &wanted(&path, &seen.own, self.proc.is_some())?, seen, &self.pods.pods());
        if self.json {
            print_json(&report)?
        } else {
            print_text(text(&report).text())?
        }
        Ok(show::code(!report.problems.is_empty(), !report.holders.is_empty()))
    }
}

fn report(path: &Path, wanted: &Wanted, seen: Namespaces, pods: &Pods) -> HoldersReport {
    let mut report = HoldersReport::find(path, wanted, &seen.own, &seen.others, pods);
    report.looked_at = seen.looked;
    report.problems.splice(0..0, seen.problems);
    report
}

/// The path as the kernel prints it.
fn resolved(path: &Path) -> anyhow::Result<PathBuf> {
    // A mount that hangs is held without asking it anything; the way there is not.
    if let Some(folder) = std::path::absolute(path)?.parent() {
        answers(folder)?;
    }
    let handle = Handle::follow(path).map_err(|error| anyhow!(error.in_full()))?;
    handle.resolved_path().with_context(|| format!("resolve {}", path.display()))
}

fn wanted(path: &Path, own: &MountTable, is_afar: bool) -> anyhow::Result<Wanted> {
    if !is_afar && path.starts_with("/dev") {
        let device = block_device(path).with_context(|| format!("look at {}", path.display()))?;
        return Ok(device.map_or_else(|| Wanted::at_or_below(path, own), Wanted::of_device));
    }
    Ok(Wanted::at_or_below(path, own))
}

fn text(report: &HoldersReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.headed("problem", verdict_style("problem"), problem);
    }
    for mount in &report.mounts {
        lines.headed("mounted", verdict_style("current"), &of(mount));
    }
    for holder in &report.holders {
        lines.headed("held", verdict_style("pinning"), &who(holder));
        for mount in &holder.mounts {
            lines.below(&format!("has {}", of(mount)));
        }
        for way in &holder.free {
            lines.below(&format!("{}:", way.what));
            lines.run(&way.run);
        }
    }
    lines.line(&summary(report));
    lines
}

fn who(holder: &Holder) -> String {
    let container = holder.container.as_ref().map(|id| format!(", container {}", &id[..id.len().min(12)]));
    let pod = holder.pod.as_ref().and_then(|pod| pod.for_people()).map(|pod| format!(", pod {pod}"));
    let more = match holder.processes {
        0 | 1 => String::new(),
        many => format!(" and {} more", many - 1),
    };
    let (pid, command) = (holder.pid.unwrap_or_default(), holder.command.as_deref().unwrap_or("?"));
    let by = match holder.kept_by {
        "process" => format!("by {command} ({pid}){more}"),
        "descriptor" => format!("in a mount namespace without processes that {command} ({pid}) has open"),
        "bind-mount" => "in a mount namespace without processes that is bind-mounted here".to_owned(),
        _ => return "elsewhere in this mount namespace".to_owned(),
    };
    format!("{by}{}{}", container.unwrap_or_default(), pod.unwrap_or_default())
}

fn of(mount: &KeptMount) -> String {
    let follows = if mount.follows { ", follows a umount here" } else { "" };
    let KeptMount { mount_point, root, fs_type, device, propagation, .. } = mount;
    format!("{} ({fs_type} {device}, {root}): {propagation}{follows}", mount_point.display())
}

fn summary(report: &HoldersReport) -> String {
    let looked =
        format!("{} processes in {} mount namespaces", report.looked_at.processes, report.looked_at.namespaces);
    match (report.holders.len(), report.mounts.len()) {
        (0, 0) => format!("nobody has anything mounted there; looked at {looked}"),
        (0, _) => format!(
            "only mounted here; looked at {looked}; if its umount says busy, a process has a file open: fuser -vm {}",
            report.path.display()
        ),
        (holders, _) => format!("{holders} hold it; looked at {looked}"),
    }
}
