//! `bindguard diagnose`: judges every volume-subpath and volume of a node as an admission would,
//! and compares the binds of running containers with the host. The node is this node, or a node of
//! which a debug pod sees the mount table and the root directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use bindguard_config::Config;
use bindguard_core::kubelet::PodPath;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::source::SourceKind;
use bindguard_operator::container_mounts::container_mounts;
use bindguard_operator::engines::{engine_containers, state_folders};
use bindguard_operator::node::is_root;
use bindguard_operator::node_report::{ISSUE, NodeBind, NodeReport};
use bindguard_operator::old_binds::{old_binds, old_binds_of_engines};
use bindguard_operator::pods::{PodSelector, Pods};
use bindguard_operator::{kubelets_here, survey_node, survey_recorded};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use crate::pods::{PodsFrom, recorded, uids, unknown_pod};
use crate::show::{print_remark, print_text};
use crate::{named_file, show};

/// Arguments of `diagnose`.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// Report only this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Report healthy subpaths and volumes as well, and private binds of the host's root.
    #[arg(long)]
    all: bool,
    /// Print the report as JSON, with the journal's keys.
    #[arg(long)]
    json: bool,
    /// `kubediag`: print one JSON object with the keys of the kubediag processors that bindguard
    /// replaces.
    #[arg(long, value_enum, default_value_t = Format::Text, conflicts_with = "json")]
    format: Format,
    /// Read this mountinfo, and the node's files below --root, without entering the node's namespaces.
    #[arg(long, value_name = "FILE", requires = "root")]
    pub mountinfo: Option<PathBuf>,
    /// The root directory of the node, as a pod with the node's processes sees it. Without
    /// --mountinfo the pod must be privileged.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    #[command(flatten)]
    pods: PodsFrom,
}

/// The reader of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For kubediag.
    Kubediag,
}

impl Diagnose {
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let mountinfo = self.mountinfo()?;
        let table = self.table(&mountinfo)?;
        let report = self.report(config, &table)?;
        match (self.format, self.json) {
            (Format::Kubediag, _) => print_diagnosis(&report, &mountinfo, &table)?,
            (Format::Text, json) => show::print_node(&self.trimmed(&report), json)?,
        }
        Ok(show::node_exit_code(&report))
    }

    fn report(&self, config: &Config, table: &MountTable) -> anyhow::Result<NodeReport> {
        let (policy, places) = (config.policy(), config.places());
        let Some(root) = self.root.as_ref().filter(|_| self.mountinfo.is_some()) else {
            has_a_kubelet(places)?;
            let pods = self.pods.pods_under(config);
            let wanted = self.wanted(&pods, places)?;
            let mut report = survey_node(policy, places, &pods, wanted);
            self.add_running(&mut report, &pods, config)?;
            return self.unless_unknown(report, &pods);
        };
        if !fs::metadata(root)
            .with_context(|| format!("read {}", root.display()))?
            .is_dir()
        {
            bail!(
                "{} is no folder: --root takes the root directory of a node",
                root.display()
            );
        }
        let pods = recorded(root);
        let wanted = self.wanted(&pods, places)?;
        self.unless_unknown(
            survey_recorded(policy, places, &pods, table, root, wanted),
            &pods,
        )
    }

    /// Adds the running containers that keep mounts of the host, or show old mounts.
    fn add_running(
        &self,
        report: &mut NodeReport,
        pods: &Pods,
        config: &Config,
    ) -> anyhow::Result<()> {
        let mut pods = pods.clone();
        if let Some(pod) = &self.pod {
            let selector = PodSelector::from_argument(pod);
            pods.containers.retain(|it| selector.is(&it.pod));
        }
        let scope = config.policy().host_root_scope;
        let found = container_mounts(&pods, config.places(), scope);
        let found = found.context("find the mounts that running containers keep")?;
        let keepers = found.keepers.into_iter();
        report.pinned = keepers
            .map(|keeper| keeper.report(config.policy(), config.places()))
            .collect();
        // kubediag has no processor for these.
        if self.format == Format::Text {
            let (old_binds, mut unchecked) = old_binds(&pods, config.policy(), config.places());
            report.old_binds = old_binds;
            report.problems.append(&mut unchecked);
            // Only root can read the state of Docker and Podman.
            if self.pod.is_none() && is_root() {
                let (mut found, mut unchecked) =
                    old_binds_of_engines(config.policy(), config.places());
                report.old_binds.append(&mut found);
                report.problems.append(&mut unchecked);
            }
        }
        Ok(())
    }

    /// An unknown pod is an error. A known pod may have nothing to check.
    fn unless_unknown(&self, report: NodeReport, pods: &Pods) -> anyhow::Result<NodeReport> {
        let is_empty = report.checked == 0
            && report.problems.is_empty()
            && report.pinned.is_empty()
            && report.mounts_below_emptydir.is_empty()
            && report.old_binds.is_empty();
        let pod = self.pod.as_deref().filter(|_| is_empty);
        match pod.and_then(|pod| unknown_pod(pods, pod)) {
            Some(error) => Err(error),
            None => Ok(report),
        }
    }

    fn wanted<'a>(
        &self,
        pods: &Pods,
        places: &'a Places,
    ) -> anyhow::Result<impl Fn(&Path) -> bool + use<'a>> {
        let uids_of_pod = self
            .pod
            .as_deref()
            .map(|pod| uids(pods, &PodSelector::from_argument(pod)))
            .transpose()?;
        Ok(move |path: &Path| match &uids_of_pod {
            None => true,
            Some(uids) => {
                let path = PodPath::from_path(path, places.kubelet_roots());
                path.is_some_and(|path| uids.iter().any(|wanted| wanted == path.pod_uid))
            }
        })
    }

    fn trimmed(&self, report: &NodeReport) -> NodeReport {
        if self.all {
            report.clone()
        } else {
            report.clone().without_healthy()
        }
    }

    fn mountinfo(&self) -> anyhow::Result<Vec<u8>> {
        let path = self
            .mountinfo
            .as_deref()
            .unwrap_or(Path::new("/proc/thread-self/mountinfo"));
        named_file::read(path).with_context(|| format!("read {}", path.display()))
    }

    fn table(&self, mountinfo: &[u8]) -> anyhow::Result<MountTable> {
        let table = MountTable::from_mountinfo_in_part(mountinfo);
        if let Some(skipped) = table.skipped().filter(|_| table.entries().is_empty()) {
            return Err(skipped.clone()).with_context(|| self.parse_context());
        }
        // The kernel ends every line. A copy that was cut off does not, and its cut last field
        // would look complete.
        ensure!(
            mountinfo.ends_with(b"\n"),
            "{}: it ends in the middle of a line",
            self.parse_context()
        );
        Ok(table)
    }

    fn parse_context(&self) -> String {
        match &self.mountinfo {
            Some(path) => format!(
                "parse {}: take it again, whole, with `cat /proc/1/mountinfo`",
                path.display()
            ),
            None => "parse this node's mountinfo".to_owned(),
        }
    }
}

/// A node without a kubelet's folders is an error: an empty report would mislead.
fn has_a_kubelet(places: &Places) -> anyhow::Result<()> {
    let (here, problems) = kubelets_here(places);
    // A folder that is unreadable or does not answer exists.
    let runs_engine = || !engine_containers(&state_folders(Path::new("/"))).is_empty();
    if here.is_empty() && problems.is_empty() && !runs_engine() {
        let roots: Vec<String> = places
            .kubelet_roots()
            .map(|root| root.display().to_string())
            .collect();
        bail!(
            "no kubelet has its folders at {}: name it in [kubelet] roots of config.toml",
            roots.join(" or ")
        );
    }
    Ok(())
}

// Prints the results of kubediag's subpath processors: bindguard can replace the processors.
//
// A processor of kubediag answers with a JSON object of strings. kubediag's agent adds the object
// to the input of the next processor. A diagnosis is for a single mount: the recoverer unmounts
// only `original_destination_path`. Therefore bindguard prints only one object, for the first
// stale subpath, with the keys of the collector and the diagnoser. Keys and values have the form
// of `pkg/processors` of kubediag/kubediag.

const MOUNTINFO: &str = "collector.system.mountinfo";
const DIAGNOSER: &str = "diagnoser.kubernetes.subpath_remount";
const RECOVERER: &str = "recover.kubernetes.subpath_remount.result";

/// Prints the output of the collector and the diagnoser.
pub fn print_diagnosis(
    report: &NodeReport,
    mountinfo: &[u8],
    table: &MountTable,
) -> anyhow::Result<()> {
    let mut keys = Map::new();
    keys.insert(
        MOUNTINFO.to_owned(),
        String::from_utf8_lossy(mountinfo).into(),
    );
    let mut stale = report.binds.iter().filter(|bind| is_stale_subpath(bind));
    let first = stale.find_map(|bind| Some((bind, as_written(table, bind.bind.source())?)));
    if let Some((bind, (root, mount_point))) = first {
        for (key, value) in [
            ("result", result(bind)),
            ("bug_link", ISSUE.to_owned()),
            ("original_source_path", root),
            ("original_destination_path", mount_point),
        ] {
            keys.insert(format!("{DIAGNOSER}.{key}"), value.into());
        }
    }
    let more = stale.count();
    if more > 0 {
        print_remark(format_args!(
            "{more} more subpaths are stale, and kubediag takes one at a time: run it again afterwards"
        ));
    }
    print_object(keys)
}

/// Prints the output of the recoverer, for all mounts that were detached or repaired.
pub fn print_recovery(report: &NodeReport) -> anyhow::Result<()> {
    let repaired = report
        .binds
        .iter()
        .filter(|bind| bind.bind.is_repaired())
        .map(|bind| {
            let outcome = bind
                .bind
                .outcome
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default();
            format!("{}: {outcome}", bind.bind.source().display())
        });
    let repaired: Vec<String> = repaired.collect();
    let result = (!repaired.is_empty()).then(|| (RECOVERER.to_owned(), repaired.join("; ").into()));
    print_object(result.into_iter().collect())
}

fn is_stale_subpath(bind: &NodeBind) -> bool {
    matches!(bind.bind.finding.kind, SourceKind::Subpath(_)) && bind.is_stale()
}

fn result(bind: &NodeBind) -> String {
    let reason = bind.bind.reason().unwrap_or_default();
    format!(
        "kubernetes#68211: the subpath {} is {}: {reason}",
        bind.bind.source().display(),
        bind.bind.verdict()
    )
}

/// The fourth and fifth field of the mount's line, escapes included: kubediag takes both from
/// there, and unmounts by them. A skipped line may be the mount on top.
fn as_written(table: &MountTable, path: &Path) -> Option<(String, String)> {
    if table.skipped().is_some() {
        return None;
    }
    let line = table.stack_at(path).last()?.to_line();
    let line = String::from_utf8_lossy(&line).into_owned();
    let mut fields = line.split(' ').skip(3);
    Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
}

fn print_object(keys: Map<String, Value>) -> anyhow::Result<()> {
    print_text(&format!("{}\n", Value::Object(keys)))
}
