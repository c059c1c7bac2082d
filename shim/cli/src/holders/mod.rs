//! `bindguard holders`: the holders of the mounts at or below a path, and the commands that free
//! the mounts.

mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use bindguard_config::Config;
use bindguard_core::mount_table::MountTable;
use bindguard_operator::block_device;
use bindguard_operator::holders::{HoldersReport, MountsToFind, Trial};
use bindguard_operator::namespaces::{Namespaces, Proc};
use bindguard_operator::pods::PodContainer;
use bindguard_sys::Handle;
use clap::Args;

use crate::pods::PodsFrom;
use crate::show;
use crate::time_limits::check_answers;

/// Arguments of `holders`.
#[derive(Debug, Args)]
pub struct Holders {
    /// A mount point, any folder, or a block device.
    path: PathBuf,
    /// The node's `/proc`, as mounted in this pod. PATH is then a path of the node.
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
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let proc = self.proc.clone().map_or_else(Proc::default, Proc::at);
        let path = if self.proc.is_some() {
            self.path.clone()
        } else {
            resolved(&self.path)?
        };
        let seen = proc.namespaces()?;
        let wanted = wanted(&path, &seen.own, self.proc.is_some())?;
        let report = self.report(&path, &wanted, seen, config);
        show::print_report(&report, self.json, text::of)?;
        Ok(show::code(
            !report.problems.is_empty(),
            !report.holders.is_empty(),
        ))
    }

    fn report(
        &self,
        path: &Path,
        wanted: &MountsToFind,
        seen: Namespaces,
        config: &Config,
    ) -> HoldersReport {
        let places = config.places();
        let trial = |container: &PodContainer| match self.proc {
            None => Trial::of(container, config.policy(), places),
            // the pids of another /proc name no process here
            Some(_) => Trial::default(),
        };
        let pods = self.pods.pods();
        let (own, others) = (&seen.own, &seen.others);
        let mut report = HoldersReport::find(path, wanted, own, others, &pods, places, &trial);
        report.checked = seen.checked;
        report.problems.splice(0..0, seen.problems);
        report
    }
}

/// The path as the kernel prints it.
pub(crate) fn resolved(path: &Path) -> anyhow::Result<PathBuf> {
    // A hung mount is opened without a request to its server. The folders above it are not.
    if let Some(folder) = std::path::absolute(path)?.parent() {
        check_answers(folder)?;
    }
    let handle = Handle::follow(path)?;
    handle
        .resolved_path()
        .with_context(|| format!("resolve {}", path.display()))
}

pub(crate) fn wanted(path: &Path, own: &MountTable, is_afar: bool) -> anyhow::Result<MountsToFind> {
    if !is_afar && path.starts_with("/dev") {
        let device = block_device(path).with_context(|| format!("open {}", path.display()))?;
        return Ok(device.map_or_else(
            || MountsToFind::at_or_below(path, own),
            MountsToFind::of_device,
        ));
    }
    Ok(MountsToFind::at_or_below(path, own))
}
