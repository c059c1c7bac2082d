//! `bindguard doctor`: checks the node, point by point. This module collects the evidence for
//! `bindguard_operator::doctor`.

mod containerd;
mod programs;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bindguard_config::Loaded;
use bindguard_core::error_chain;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_installer::drift::drift;
use bindguard_installer::has_agent_unit;
use bindguard_operator::container_mounts::container_mounts;
use bindguard_operator::doctor::{
    self, DoctorReport, LinuxDistribution, Point, PointStatus, os_release,
};
use bindguard_operator::namespaces::Proc;
use bindguard_operator::node::{processes_named, setting, with_open};
use bindguard_operator::root_program::PROGRAM_FOLDERS;
use bindguard_operator::{kubelets_here, survey_node};
use bindguard_sys::observe::list_volumes;
use bindguard_sys::{kernel_features, read_mount_table, read_mount_table_in_part};
use clap::Args;

use crate::agent;
use crate::pods::PodsFrom;
use crate::show::{self, FAULTY, HEALTHY, Lines, UNCHECKED};

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
        points.push(containerd::point(&pods));
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
                .map(|volume| volume.plugin_folder().to_owned())
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
