//! `bindguard diagnose` and `bindguard repair`.
//!
//! `diagnose` judges every volume-subpath and volume of a node as an admission would, and compares
//! the binds of running containers with the host. The node is this node, or a node of which a debug
//! pod sees the mount table and the root directory. `repair` runs the guard's re-bind now, for pods
//! that crash-loop under a runtime without bindguard.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bindguard_config::Config;
use bindguard_core::judge::VerdictName;
use bindguard_core::kubelet::{PodPath, VolumeSubpath};
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::report::{Actor, RebindLine, Report};
use bindguard_guard::record_rebind;
use bindguard_operator::containers::{engine_containers, state_folders};
use bindguard_operator::node::is_root;
use bindguard_operator::node_report::{ISSUE, NodeBind, NodeReport};
use bindguard_operator::old_binds::{container_mounts, old_binds, old_binds_of_engines};
use bindguard_operator::pods::Pods;
use bindguard_operator::{
    RepairAct, kubelets_here, named_subpath, repair_node, survey_node, survey_recorded,
};
use bindguard_sys::Handle;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use crate::findings::node_text;
use crate::named_file;
use crate::pods::{PodsFrom, Selection, bundled_containers, pod_argument};
use crate::show::{Output, code, print_remark, print_text, unrecorded};

const WATCH_INTERVAL: Duration = Duration::from_secs(5);

/// Arguments of `diagnose`.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// Report only this pod.
    #[arg(value_name = "pod/NAME", value_parser = pod_argument, conflicts_with = "pod")]
    named: Option<String>,
    #[command(flatten)]
    selection: Selection,
    /// Report healthy subpaths and volumes as well, and private binds of the host's root.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    output: Output,
    /// `kubediag`: print one JSON object with the keys of the kubediag processors that bindguard
    /// replaces.
    #[arg(long, value_enum, default_value_t = Format::Text, conflicts_with_all = ["json", "output", "quiet"])]
    format: Format,
    /// Report every finding in detail.
    #[arg(short, long)]
    verbose: bool,
    /// Report again every five seconds, until interrupted.
    #[arg(long, conflicts_with_all = ["format", "quiet", "mountinfo"])]
    watch: bool,
    /// Read this mountinfo, and the node's files below --root, without entering the node's namespaces.
    #[arg(long, value_name = "FILE", requires = "root")]
    pub mountinfo: Option<PathBuf>,
    /// The node's root directory as this pod sees it. Every other path is a path of the node, but
    /// for --mountinfo. Without --mountinfo the pod is privileged and has the node's processes.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    #[command(flatten)]
    pods: PodsFrom,
}

/// The reader of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// For kubediag.
    Kubediag,
}

impl Diagnose {
    pub fn run(mut self, config: &Config) -> Result<ExitCode> {
        self.selection = self.selection.with(self.named.take());
        loop {
            let (mountinfo, table) = self.read_table()?;
            let mut report = self.report(config, &table)?;
            // kubediag gets the verdicts on healthy binds.
            if !self.all && self.format == Format::Text {
                report = report.without_healthy();
            }
            let is_read = match self.format {
                Format::Kubediag => print_diagnosis(&report, &mountinfo, &table).map(|()| false),
                Format::Text => {
                    let repair_all = Some(self.selection.repair_command());
                    let text = node_text(&report, self.verbose, repair_all);
                    self.output.print(&report, text.as_str())
                }
            };
            if !is_read? || !self.watch {
                return Ok(code(report.is_incomplete(), report.has_findings()));
            }
            thread::sleep(WATCH_INTERVAL);
        }
    }

    fn read_table(&self) -> Result<(Vec<u8>, MountTable)> {
        let (path, act) = match &self.mountinfo {
            Some(path) => {
                let again = "take it again, whole, with `cat /proc/1/mountinfo`";
                (path.as_path(), format!("parse {}: {again}", path.display()))
            }
            None => (
                Path::new("/proc/thread-self/mountinfo"),
                "parse this node's mountinfo".to_owned(),
            ),
        };
        let mountinfo =
            named_file::read(path).with_context(|| format!("read {}", path.display()))?;
        let table = MountTable::from_mountinfo_in_part(&mountinfo);
        if let Some(skipped) = table.skipped().filter(|_| table.entries().is_empty()) {
            return Err(skipped.clone()).context(act);
        }
        // The kernel ends every line. A copy that was cut off does not, and its cut last field
        // would look complete.
        ensure!(
            mountinfo.ends_with(b"\n"),
            "{act}: it ends in the middle of a line"
        );
        Ok((mountinfo, table))
    }

    fn report(&self, config: &Config, table: &MountTable) -> Result<NodeReport> {
        let (policy, places) = (config.policy(), config.places());
        let recorded = self.root.as_ref().filter(|_| self.mountinfo.is_some());
        let pods = if let Some(root) = recorded {
            let found = fs::metadata(root);
            let found = found.with_context(|| format!("read {}", root.display()))?;
            ensure!(
                found.is_dir(),
                "{} is no folder: --root takes the root directory of a node",
                root.display()
            );
            Pods {
                containers: bundled_containers(root),
                ..Pods::default()
            }
        } else {
            has_a_kubelet(places)?;
            self.pods.pods_under(config)
        };
        let uids = self.selection.uids(&pods)?;
        let wanted = |path: &Path| {
            let path = PodPath::from_path(path, places.kubelet_roots());
            self.selection.is_all() || path.is_some_and(|path| uids.contains(path.pod_uid))
        };
        let report = if let Some(root) = recorded {
            survey_recorded(policy, places, &pods, table, root, wanted)
        } else {
            let mut report = survey_node(policy, places, &pods, wanted);
            self.add_running(&mut report, pods.clone(), config)?;
            report
        };
        // An unknown pod is an error. A known pod may have nothing to check.
        if report.checked == 0 && !report.is_incomplete() && !report.has_findings() {
            self.selection.check_known(&pods)?;
        }
        Ok(report)
    }

    /// Adds the running containers that keep mounts of the host, or show old mounts.
    fn add_running(&self, report: &mut NodeReport, mut pods: Pods, config: &Config) -> Result<()> {
        let (policy, places) = (config.policy(), config.places());
        pods.containers
            .retain(|it| self.selection.includes(&it.pod));
        let found = container_mounts(&pods, places, policy.host_root_scope)
            .context("find the mounts that running containers keep")?;
        for keeper in found.keepers {
            report.pinned.push(keeper.advised(policy, places));
        }
        // kubediag has no processor for these.
        if self.format == Format::Text {
            let mut surveys = vec![old_binds(&pods, policy, places)];
            // Only root can read the state of Docker and Podman.
            if self.selection.is_all() && is_root() {
                surveys.push(old_binds_of_engines(policy, places));
            }
            for (found, unchecked) in surveys {
                report.old_binds.extend(found);
                report.problems.extend(unchecked);
            }
        }
        if !is_root() {
            let unread =
                "not read: the mounts of running containers, and the state of Docker and Podman";
            report.problems.push(unread.to_owned());
        }
        Ok(())
    }
}

/// A node without a kubelet's folders is an error: an empty report would mislead.
fn has_a_kubelet(places: &Places) -> Result<()> {
    let (here, problems) = kubelets_here(places);
    // A folder that is unreadable or does not answer exists.
    if here.is_empty()
        && problems.is_empty()
        && engine_containers(&state_folders(Path::new("/"))).is_empty()
    {
        let roots = places.kubelet_roots();
        let roots: Vec<String> = roots.map(|root| root.display().to_string()).collect();
        bail!(
            "no kubelet has its folders at {}: name it in [kubelet] roots of config.toml",
            roots.join(" or ")
        );
    }
    Ok(())
}

// The repair of subpaths on the host.

/// Arguments of `repair`.
#[derive(Debug, Args)]
pub struct Repair {
    /// A pod, or volume-subpaths to repair: `<kubelet
    /// root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>`.
    #[arg(value_name = "pod/NAME or PATH")]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    selection: Selection,
    /// Repair every stale subpath of this node.
    #[arg(long, conflicts_with_all = ["paths", "pod", "namespace"])]
    all: bool,
    /// Report every finding in detail.
    #[arg(short, long)]
    verbose: bool,
    /// Only remove the stale mounts; the kubelet binds again when it next starts the container.
    #[arg(long)]
    unmount: bool,
    /// Print the planned repairs and do nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: Output,
    /// `kubediag`: the key of kubediag's recoverer, as one JSON object.
    #[arg(long, value_enum, default_value_t = Format::Text, conflicts_with_all = ["json", "output", "quiet"])]
    format: Format,
    #[command(flatten)]
    pods: PodsFrom,
}

impl Repair {
    pub fn run(mut self, config: &Config) -> Result<ExitCode> {
        if let [path] = &self.paths[..]
            && self.selection.pod.is_none()
            && let Ok(pod) = pod_argument(&path.to_string_lossy())
        {
            self.selection.pod = Some(pod);
            self.paths.clear();
        }
        self.all |= self.selection.all_namespaces;
        ensure!(
            self.all || !self.selection.is_all() || !self.paths.is_empty(),
            "nothing is named to repair; name pod/NAME or the paths of subpaths, or give --namespace or --all"
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
        let uids = self.selection.uids(&pods)?;
        let is_selected = !self.selection.is_all();
        let wanted = |subpath: &VolumeSubpath| {
            self.all || named.contains(subpath) || is_selected && uids.contains(subpath.pod_uid())
        };
        let act = match (self.dry_run, self.unmount) {
            (true, _) => RepairAct::Check,
            (false, true) => RepairAct::Detach,
            (false, false) => RepairAct::Rebind,
        };
        let report = repair_node(policy, places, &pods, act, wanted);
        if report.checked == 0 && report.problems.is_empty() {
            self.selection.check_known(&pods)?;
            ensure!(
                self.all,
                "nothing to repair: this node has no such volume-subpath; see `bindguard diagnose --all`"
            );
        }
        if let Some(journal) = config.journal().filter(|_| !self.dry_run) {
            record(journal, &report);
        }
        if self.format == Format::Kubediag {
            print_recovery(&report)?;
        } else {
            let report = report.clone().without_healthy();
            let repair_all = self.paths.is_empty();
            let repair_all = repair_all.then(|| self.selection.repair_command());
            let text = node_text(&report, self.verbose, repair_all);
            self.output.print(&report, text.as_str())?;
        }
        if !self.paths.is_empty() {
            report_untouched(&report);
        }
        Ok(code(report.is_incomplete(), report.has_findings()))
    }
}

/// A path that the operator named and that is neither stale nor healthy was not touched. The exit
/// status is that of `--all`.
fn report_untouched(report: &NodeReport) {
    for NodeBind { bind, .. } in &report.binds {
        let is_faulty = !matches!(
            bind.verdict(),
            VerdictName::Current | VerdictName::Foreign | VerdictName::Stale
        );
        if is_faulty && !bind.is_repaired() {
            return print_remark(format_args!(
                "{} is {}, not stale: nothing was done to it",
                bind.source().display(),
                bind.verdict()
            ));
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
        let what = format!("the repair of volume {volume}");
        let problem = unrecorded(&what, record_rebind(journal, line));
        problem.iter().for_each(print_remark);
    }
}

// Prints the results of kubediag's subpath processors: bindguard can replace the processors.
//
// A processor of kubediag answers with a JSON object of strings. kubediag's agent adds the object
// to the input of the next processor. A diagnosis is for a single mount: the recoverer unmounts
// only `original_destination_path`. Therefore bindguard prints only one object, for the first
// stale subpath, with the keys of the collector and the diagnoser. Keys and values have the form
// of `pkg/processors` of kubediag/kubediag.

const DIAGNOSER: &str = "diagnoser.kubernetes.subpath_remount";

/// Prints the output of the collector and the diagnoser.
fn print_diagnosis(report: &NodeReport, mountinfo: &[u8], table: &MountTable) -> Result<()> {
    let mut keys = Map::new();
    let mountinfo = String::from_utf8_lossy(mountinfo);
    keys.insert("collector.system.mountinfo".to_owned(), mountinfo.into());
    let mut more = 0;
    for bind in &report.binds {
        if !matches!(bind.bind.finding.kind, SourceKind::Subpath(_)) || !bind.is_stale() {
            continue;
        }
        if keys.len() > 1 {
            more += 1;
        } else if let Some((root, mount_point)) = as_written(table, bind.bind.source()) {
            let result = format!(
                "kubernetes#68211: the subpath {} is {}: {}",
                bind.bind.source().display(),
                bind.bind.verdict(),
                bind.bind.reason().unwrap_or_default()
            );
            for (key, value) in [
                ("result", result),
                ("bug_link", ISSUE.to_owned()),
                ("original_source_path", root),
                ("original_destination_path", mount_point),
            ] {
                keys.insert(format!("{DIAGNOSER}.{key}"), value.into());
            }
        }
    }
    if more > 0 {
        print_remark(format_args!(
            "{more} more subpaths are stale, and kubediag takes one at a time: run it again afterwards"
        ));
    }
    print_object(keys)
}

/// Prints the output of the recoverer, for all mounts that were detached or repaired.
fn print_recovery(report: &NodeReport) -> Result<()> {
    let mut repaired = Vec::new();
    for NodeBind { bind, .. } in &report.binds {
        if let Some(outcome) = &bind.outcome
            && outcome.is_repaired()
        {
            repaired.push(format!("{}: {outcome}", bind.source().display()));
        }
    }
    let mut keys = Map::new();
    if !repaired.is_empty() {
        let key = "recover.kubernetes.subpath_remount.result";
        keys.insert(key.to_owned(), repaired.join("; ").into());
    }
    print_object(keys)
}

/// The fourth and fifth field of the mount's line, escapes included: kubediag takes both from
/// there, and unmounts by them. A skipped line may be the mount on top.
fn as_written(table: &MountTable, path: &Path) -> Option<(String, String)> {
    if table.skipped().is_some() {
        return None;
    }
    let line = table.stack_at(path).last()?.to_line();
    let line = String::from_utf8_lossy(&line);
    let mut fields = line.split(' ').skip(3);
    Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
}

fn print_object(keys: Map<String, Value>) -> Result<()> {
    print_text(&format!("{}\n", Value::Object(keys)))
}
