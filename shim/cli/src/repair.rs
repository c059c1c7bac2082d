//! `bindguard repair`: the guard's own re-bind, now, for pods that crash-loop under a runtime without bindguard.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, ensure};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::policy::Policy;
use bindguard_guard::{diagnose_node, repair_node};
use clap::Args;

use crate::show;

/// Arguments of `repair`.
#[derive(Debug, Args)]
pub struct Repair {
    /// Volume-subpaths to mend: `<kubelet root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>`.
    #[arg(required_unless_present_any = ["pod", "all"])]
    paths: Vec<PathBuf>,
    /// Mend the subpaths of the pod with this uid.
    #[arg(long, value_name = "UID")]
    pod: Option<String>,
    /// Mend every stale subpath of this node.
    #[arg(long)]
    all: bool,
    /// Say what would be done, and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print the report as JSON, in the journal's words.
    #[arg(long)]
    json: bool,
}

impl Repair {
    /// Runs it.
    pub fn run(self, policy: &Policy) -> anyhow::Result<ExitCode> {
        let named = self.paths.iter().map(|path| subpath(path, policy)).collect::<anyhow::Result<Vec<_>>>()?;
        let wanted = |subpath: &VolumeSubpath| {
            self.all || self.pod.as_deref() == Some(subpath.pod_uid()) || named.contains(subpath)
        };
        let report = if self.dry_run {
            let mut report = diagnose_node(policy);
            report.binds.retain(|bind| subpath(&bind.source, policy).is_ok_and(|subpath| wanted(&subpath)));
            report
        } else {
            repair_node(policy, wanted)
        };
        ensure!(
            !report.binds.is_empty() || self.all || !report.problems.is_empty(),
            "nothing to mend: this node has none of the volume-subpaths that were asked for"
        );
        show::print(&report, self.json)?;
        Ok(show::exit_code_after_repair(&report))
    }
}

/// Anything else than a subpath is not ours to touch.
fn subpath(path: &Path, policy: &Policy) -> anyhow::Result<VolumeSubpath> {
    match VolumeSubpath::from_path(path, policy.kubelet_roots()) {
        Some(subpath) => Ok(subpath),
        None => {
            bail!("{} is not a volume-subpath below a kubelet root: see [kubelet] roots in config.toml", path.display())
        }
    }
}
