//! `bindguard repair`: runs the guard's re-bind now, for pods that crash-loop under a runtime
//! without bindguard.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::ensure;
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::judge::VerdictName;
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::report::{Actor, RebindLine, Report};
use bindguard_core::source::SourceKind;
use bindguard_guard::record_rebind;
use bindguard_operator::node::is_root;
use bindguard_operator::node_report::{NodeBind, NodeReport};
use bindguard_operator::{RepairAct, named_subpath, repair_node};
use bindguard_sys::Handle;
use clap::Args;

use crate::diagnose::{self, Format};
use crate::pods::{PodsFrom, uids, unknown_pod};
use crate::show::{self, print_remark};

/// Arguments of `repair`.
#[derive(Debug, Args)]
pub struct Repair {
    /// Volume-subpaths to repair: `<kubelet
    /// root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>`.
    paths: Vec<PathBuf>,
    /// Repair the subpaths of this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Repair every stale subpath of this node.
    #[arg(long, conflicts_with_all = ["paths", "pod"])]
    all: bool,
    /// Only remove the stale mounts; the kubelet binds again when it next starts the container.
    #[arg(long)]
    unmount: bool,
    /// Print the planned repairs and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print the report as JSON, with the journal's keys.
    #[arg(long)]
    json: bool,
    /// `kubediag`: the key of kubediag's recoverer, as one JSON object.
    #[arg(long, value_enum, default_value_t = Format::Text, conflicts_with = "json")]
    format: Format,
    #[command(flatten)]
    pods: PodsFrom,
}

impl Repair {
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        ensure!(
            self.all || self.pod.is_some() || !self.paths.is_empty(),
            "nothing is named to repair; name the paths of subpaths, or give --pod POD or --all"
        );
        ensure!(
            self.dry_run || is_root(),
            "repair mounts: this needs root; run it as root, or with --dry-run"
        );
        let (policy, places) = (config.policy(), config.places());
        let mut named = Vec::new();
        for path in &self.paths {
            // Only a subpath may be repaired.
            named.push(named_subpath(path, places)?);
            // Opened, not stat'ed: the path may lead to a server that does not answer.
            Handle::of(path)?;
        }
        let pods = self.pods.pods();
        let uids = match &self.pod {
            Some(pod) => uids(&pods, pod)?,
            None => Vec::new(),
        };
        let wanted = |subpath: &VolumeSubpath| {
            self.all || uids.iter().any(|uid| uid == subpath.pod_uid()) || named.contains(subpath)
        };
        let act = match (self.dry_run, self.unmount) {
            (true, _) => RepairAct::Check,
            (false, true) => RepairAct::Detach,
            (false, false) => RepairAct::Rebind,
        };
        let report = repair_node(policy, places, &pods, act, wanted);
        if report.checked == 0 && report.problems.is_empty() {
            if let Some(pod) = &self.pod
                && let Some(error) = unknown_pod(&pods, pod)
            {
                return Err(error);
            }
            ensure!(
                self.all,
                "nothing to repair: this node has no such volume-subpath; see `bindguard diagnose --all`"
            );
        }
        if let Some(journal) = config.journal().filter(|_| !self.dry_run) {
            record(journal, &report);
        }
        let (is_incomplete, has_findings) = (report.is_incomplete(), report.has_findings());
        let shown = report.clone().without_healthy();
        if self.format == Format::Kubediag {
            diagnose::print_recovery(&shown)?;
        }
        let code = match self.format {
            Format::Kubediag => show::code(is_incomplete, has_findings),
            Format::Text => show::finish(
                &shown,
                self.json,
                show::node_text,
                is_incomplete,
                has_findings,
            )?,
        };
        if !self.paths.is_empty() {
            report_untouched(&report);
        }
        Ok(code)
    }
}

/// A path that the operator named and that is neither stale nor healthy was not touched. The exit
/// status is that of `--all`.
fn report_untouched(report: &NodeReport) {
    for NodeBind { bind, .. } in &report.binds {
        let is_untouched = match bind.verdict() {
            VerdictName::Unmounted
            | VerdictName::Unknown
            | VerdictName::Orphaned
            | VerdictName::Dead => !bind.is_repaired(),
            VerdictName::Current
            | VerdictName::Stale
            | VerdictName::Pinning
            | VerdictName::Wrong
            | VerdictName::Foreign => false,
        };
        if is_untouched {
            print_remark(format_args!(
                "{} is {}, not stale: nothing was done to it",
                bind.source().display(),
                bind.verdict()
            ));
            return;
        }
    }
}

/// Writes the repaired and the failed subpaths into the journal, a line for each volume.
fn record(journal: &Path, report: &NodeReport) {
    let mut volumes = BTreeMap::<(&str, &str), Report>::new();
    for NodeBind { bind, .. } in &report.binds {
        if let SourceKind::Subpath(subpath) = &bind.finding.kind
            && bind.outcome.is_some()
        {
            let of_volume = volumes
                .entry((subpath.pod_uid(), subpath.volume()))
                .or_default();
            of_volume.binds.push(bind.clone());
            of_volume.duration_us = report.duration_us;
        }
    }
    for ((pod_uid, volume), repaired) in &volumes {
        let line = RebindLine::new(Actor::Operator, pod_uid, volume, repaired);
        if let Err(error) = record_rebind(journal, line) {
            print_remark(format_args!(
                "journal the repair of volume {volume}: {}",
                error_chain(&error)
            ));
        }
    }
}
