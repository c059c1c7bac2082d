//! `bindguard doctor`: checks the node, point by point. This module collects the evidence for
//! `bindguard_operator::doctor`.

mod programs;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use bindguard_config::Loaded;
use bindguard_core::error_chain;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_installer::drift::drift;
use bindguard_installer::has_agent_unit;
use bindguard_installer::running::{Daemon, containerds, is_hidden};
use bindguard_operator::container_mounts::container_mounts;
use bindguard_operator::doctor::{
    ContainerdSeen, DoctorReport, LinuxDistribution, Point, PointStatus, RuntimeEntry, os_release,
};
use bindguard_operator::namespaces::Proc;
use bindguard_operator::node::{processes_named, setting, with_open};
use bindguard_operator::pods::Pods;
use bindguard_operator::root_program::{PROGRAM_FOLDERS, RootProgram};
use bindguard_operator::{doctor, kubelets_here, survey_node};
use bindguard_sys::observe::list_volumes;
use bindguard_sys::{kernel_features, read_mount_table, read_mount_table_in_part};
use clap::Args;
use toml::{Table, Value};

use crate::pods::{PodsFrom, running_pods};
use crate::show::{FAULTY, HEALTHY, Lines, UNCHECKED};
use crate::{agent, show};

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print the points as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pods: PodsFrom,
}

impl Doctor {
    /// Runs it.
    pub fn run(self, loaded: &Loaded) -> anyhow::Result<ExitCode> {
        let (policy, places) = (loaded.config.policy(), loaded.config.places());
        let (here, problems) = kubelets_here(places);
        let pods = self.pods.pods_under(&loaded.config);
        let mut points = of_the_kernel(&here);
        points.push(helpers(&here, problems));
        points.push(doctor::fuse_daemons(
            &processes_named("kubelet"),
            &with_open(Path::new("/dev/fuse")),
        ));
        points.push(point(&pods));
        points.push(programs::point(loaded.config.runtime(), &pods));
        points.push(installation());
        points.push(config(loaded));
        points.push(doctor::agent(
            &agent::state(&loaded.config),
            has_agent_unit(),
        ));
        points.push(doctor::subpaths(
            &survey_node(policy, places, &pods, |_| true),
            policy,
        ));
        let scope = policy.host_root_scope;
        points.push(match container_mounts(&pods, places, scope) {
            Ok(found) => doctor::read_only_binds(&found),
            Err(error) => Point::unknown("read-only-binds", error_chain(&error)),
        });
        points.push(match read_mount_table_in_part() {
            Ok(table) => {
                // The table has the kernel's names.
                let places = Places {
                    kubelet_roots: kubelet_roots_by_all_names(places, &Probes::for_create()),
                    ..places.clone()
                };
                doctor::below_emptydirs(&table, &places, policy.below_emptydirs)
            }
            Err(error) => Point::unknown("mounts-below-emptydir", error_chain(&error)),
        });
        points.push(match Proc::default().namespaces() {
            Ok(seen) => {
                let places = pods.with_runtime(places);
                doctor::pinned(&seen.own, &seen.others, &seen.problems, &places)
            }
            Err(error) => Point::unknown("pinned", error_chain(&error)),
        });
        let report = DoctorReport { points };
        show::print_report(&report, self.json, text)?;
        Ok(show::code(
            report.has(PointStatus::Unknown) && !report.has(PointStatus::Failed),
            report.has(PointStatus::Failed),
        ))
    }
}

fn of_the_kernel(kubelet_roots: &[PathBuf]) -> Vec<Point> {
    let table = read_mount_table();
    let kubelet_is_shared = match &table {
        Ok(table) => Ok(is_shared(table, kubelet_roots)),
        Err(error) => Err(error_chain(error)),
    };
    vec![
        doctor::kernel(&kernel_features(), kubelet_is_shared),
        match &table {
            Ok(table) => doctor::host_root(table),
            Err(error) => Point::unknown("host-root", error_chain(&error)),
        },
        doctor::detach_mounts(&setting(Path::new("/proc/sys/fs/may_detach_mounts"))),
    ]
}

/// True if the mount of the kubelet's folders has peers, or if the node has no kubelet.
fn is_shared(table: &MountTable, kubelet_roots: &[PathBuf]) -> bool {
    kubelet_roots.is_empty()
        || kubelet_roots.iter().any(|root| {
            table
                .mount_over(root)
                .is_some_and(|m| m.propagation.peer_group.is_some())
        })
}

fn helpers(kubelet_roots: &[PathBuf], problems: Vec<String>) -> Point {
    if let Some(problem) = problems.into_iter().next() {
        return Point::unknown("mount-helpers", problem);
    }
    let is_there = |name: &str| {
        PROGRAM_FOLDERS
            .iter()
            .any(|folder| Path::new(folder).join(name).symlink_metadata().is_ok())
    };
    let volumes = kubelet_roots
        .iter()
        .map(|root| list_volumes(root))
        .collect::<Result<Vec<_>, _>>();
    match volumes {
        Ok(volumes) => {
            let in_use: BTreeSet<String> = volumes
                .iter()
                .flat_map(|volumes| &volumes.mounted)
                .map(|volume| volume.plugin.folder.to_owned())
                .collect();
            let distribution = LinuxDistribution::from_os_release(&os_release(Path::new("/")));
            doctor::mount_helpers(&in_use, is_there, &distribution)
        }
        Err(error) => Point::unknown("mount-helpers", format!("{error}: {}", error.source)),
    }
}

/// Reports changes by other tools since the installation.
fn installation() -> Point {
    const NAME: &str = "installation";
    let (drift, problems) = drift();
    let changed = drift.iter().map(|drift| drift.what.as_str());
    let all: Vec<&str> = changed.chain(problems.iter().map(String::as_str)).collect();
    match drift.first() {
        Some(first) => Point::failed(NAME, all.join("; "), first.command.clone()),
        None if all.is_empty() => Point::ok(NAME, "no file has changed since `bindguard install`"),
        None => Point::unknown(NAME, all.join("; ")),
    }
}

fn config(loaded: &Loaded) -> Point {
    match loaded.remarks() {
        remarks if remarks.is_empty() => Point::ok("config", "the config is valid"),
        remarks => Point::failed("config", remarks.join("; "), "bindguard config check"),
    }
}

/// The points as text.
pub(crate) fn text(report: &DoctorReport) -> Lines {
    let mut lines = Lines::default();
    for point in &report.points {
        let (word, style) = match point.status {
            PointStatus::Ok => ("ok", HEALTHY),
            PointStatus::Failed => ("failed", FAULTY),
            PointStatus::Unknown => ("unknown", UNCHECKED),
        };
        lines.headed(word, style, &format!("{}: {}", point.name, point.message));
        if let Some(command) = &point.command {
            lines.run(command);
        }
    }
    let not_ok = report
        .points
        .iter()
        .filter(|point| point.status != PointStatus::Ok)
        .count();
    lines.line(&format!("{} points, {not_ok} not ok", report.points.len()));
    lines
}

// containerd's effective configuration, from `containerd config dump`: imports and defaults are
// included.

/// The CRI plugin's tables: of version 2, and of version 3 of the config.
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The point on containerd. `pods`: those that run.
pub fn point(pods: &Pods) -> Point {
    let found = containerds();
    if found.is_empty() && is_hidden("containerd") {
        return doctor::containerd(Err(
            "a containerd runs, and only root may read its arguments: run this as root",
        ));
    }
    match found
        .first()
        .map(|containerd| seen(containerd, pods))
        .transpose()
    {
        Ok(seen) => doctor::containerd(Ok(seen.as_ref())),
        Err(error) => doctor::containerd(Err(&format!("{error:#}"))),
    }
}

fn seen(containerd: &Daemon, pods: &Pods) -> anyhow::Result<ContainerdSeen> {
    let program = containerd
        .program()
        .context("read which program containerd is")?;
    let program = RootProgram::open(&program)?
        .with_context(|| format!("run {}: no such file", program.display()))?;
    let version = program.output(&["--version"])?;
    let mut words = vec!["config", "dump"];
    let path = containerd.config().map(|path| path.display().to_string());
    if let Some(path) = &path {
        words.splice(0..0, ["--config", path.as_str()]);
    }
    let dump = program.output(&words)?;
    let table: Table = dump
        .parse()
        .context("parse the output of `containerd config dump`")?;
    let (runtimes, default_runtime) = runtimes(&table);
    let mut reasons = Vec::new();
    for entry in &runtimes {
        if entry.name == default_runtime || entry.calls_guard() {
            reasons.extend(unusable(&entry.runtime_path));
            reasons.extend(unusable(&entry.binary_name));
        }
    }
    let is_default = |entry: &RuntimeEntry| entry.name == default_runtime;
    if !runtimes.is_empty() && !runtimes.iter().any(is_default) {
        reasons.push(format!(
            "its default runtime {default_runtime:?} is not configured"
        ));
    }
    Ok(ContainerdSeen {
        version: number(&version),
        runtimes,
        default_runtime,
        pods: running_pods(pods),
        unusable: reasons,
    })
}

/// Why a program cannot be run. The kernel refuses this access also on a file system that is
/// mounted noexec.
fn unusable(path: &str) -> Option<String> {
    if !path.starts_with('/') {
        return None;
    }
    let error = rustix::fs::access(path, rustix::fs::Access::EXEC_OK).err()?;
    Some(format!("{path}: {}", std::io::Error::from(error)))
}

/// `containerd github.com/containerd/containerd 1.7.24 ...`: the word that begins with a digit,
/// without a `v`.
fn number(version: &str) -> String {
    let words = version
        .split_whitespace()
        .map(|word| word.trim_start_matches('v'));
    let number = words
        .into_iter()
        .find(|word| word.starts_with(|first: char| first.is_ascii_digit()));
    number
        .unwrap_or("of unknown version")
        .split(['~', '+'])
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn runtimes(table: &Table) -> (Vec<RuntimeEntry>, String) {
    let plugins = table.get("plugins");
    let containerd = PLUGINS
        .iter()
        .find_map(|plugin| plugins?.get(plugin)?.get("containerd"));
    let Some(containerd) = containerd else {
        return (Vec::new(), String::new());
    };
    let word = |value: &Value, key: &str| {
        value
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let entries = containerd
        .get("runtimes")
        .and_then(Value::as_table)
        .into_iter()
        .flatten();
    let entries = entries.map(|(name, entry)| RuntimeEntry {
        name: name.clone(),
        runtime_type: word(entry, "runtime_type"),
        runtime_path: word(entry, "runtime_path"),
        binary_name: entry
            .get("options")
            .map(|options| word(options, "BinaryName"))
            .unwrap_or_default(),
        systemd_cgroup: entry
            .get("options")
            .and_then(|options| options.get("SystemdCgroup")?.as_bool())
            .unwrap_or(false),
    });
    (entries.collect(), word(containerd, "default_runtime_name"))
}

#[cfg(test)]
mod containerd_tests {
    use super::*;

    #[test]
    fn both_versions_of_the_config_are_read() {
        for plugin in PLUGINS {
            let text = format!(
                "[plugins.\"{plugin}\".containerd]\ndefault_runtime_name = \"runc\"\n\
                 [plugins.\"{plugin}\".containerd.runtimes.x]\nruntime_type = \"t\"\n\
                 [plugins.\"{plugin}\".containerd.runtimes.x.options]\nBinaryName = \"b\"\n"
            );
            let (entries, default) = runtimes(&text.parse().unwrap());
            assert_eq!(
                (
                    entries[0].name.as_str(),
                    entries[0].binary_name.as_str(),
                    default.as_str()
                ),
                ("x", "b", "runc")
            );
        }
    }

    #[test]
    fn versions_are_found() {
        assert_eq!(
            number("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1"),
            "1.6.20"
        );
        assert_eq!(
            number("containerd github.com/containerd/containerd/v2 v2.1.9 abc"),
            "2.1.9"
        );
    }
}
