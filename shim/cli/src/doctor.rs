//! `bindguard doctor`: checks the node, point by point. This module collects the evidence for
//! `bindguard_operator::doctor`.

use std::collections::BTreeSet;
use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bindguard_config::Loaded;
use bindguard_core::error_chain;
use bindguard_core::handover::{SELF_TEST, SHIM, WRAPPER};
use bindguard_core::places::Places;
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_installer::drift::drift;
use bindguard_installer::record::Record;
use bindguard_installer::running::{CONTAINERD, containerds, guarded_runtimes, unseen};
use bindguard_installer::{Owner, has_agent_unit, recorded};
use bindguard_operator::agent_status::agent as check_agent;
use bindguard_operator::doctor::{
    Check, ContainerdSeen, DoctorReport, GuardedRuntimes, LinuxDistribution, Point, PointStatus,
    ProgramSeen, RuntimeEntry, os_release,
};
use bindguard_operator::namespaces::Proc;
use bindguard_operator::node::{processes_named, setting, with_open};
use bindguard_operator::old_binds::container_mounts;
use bindguard_operator::pods::Pods;
use bindguard_operator::root_program::{Failed, PROGRAM_FOLDERS, RootProgram};
use bindguard_operator::{doctor, kubelets_here, survey_node};
use bindguard_sys::observe::list_volumes;
use bindguard_sys::{kernel_features, read_mount_table, read_mount_table_in_part};
use clap::Args;
use toml::{Table, Value};

use crate::pods::{PodsFrom, running_pods};
use crate::show::{self, FAULTY, HEALTHY, Lines, Output, UNCHECKED};
use crate::status::agent_state;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    pods: PodsFrom,
}

impl Doctor {
    pub fn run(self, loaded: &Loaded) -> Result<ExitCode> {
        let (policy, places) = (loaded.config.policy(), loaded.config.places());
        let (here, problems) = kubelets_here(places);
        let pods = self.pods.pods_under(&loaded.config);
        let table = read_mount_table();
        // True if the mount of the kubelet's folders has peers, or if the node has no kubelet.
        let kubelet_is_shared = table.as_ref().map(|table| {
            let mut mounts = here.iter().filter_map(|root| table.mount_over(root));
            here.is_empty() || mounts.any(|mount| mount.propagation.peer_group.is_some())
        });
        let mut points = Vec::new();
        let mut add = |name, check| points.push(Point { name, check });
        let kubelet_is_shared = kubelet_is_shared.map_err(|error| error_chain(error));
        add(
            "kernel",
            doctor::kernel(&kernel_features(), kubelet_is_shared),
        );
        add(
            "host-root",
            or_unknown(table.map(|table| doctor::host_root(&table))),
        );
        let detach = setting(Path::new("/proc/sys/fs/may_detach_mounts"));
        add("detach-mounts", doctor::detach_mounts(&detach));
        add("mount-helpers", helpers(&here, problems));
        let daemons = with_open(Path::new("/dev/fuse"));
        let kubelets = processes_named("kubelet");
        add("fuse-daemons", doctor::fuse_daemons(&kubelets, &daemons));
        // The point `installation` reports why a record cannot be read.
        let record = recorded().unwrap_or_default();
        let daemons = guarded_runtimes();
        let point = containerd(&pods, &record, &daemons);
        add(
            "containerd",
            point.unwrap_or_else(|error| Check::unknown(format!("{error:#}"))),
        );
        add("programs", programs(loaded.config.runtime(), &pods));
        add("installation", installation(&record, &daemons));
        let remarks = loaded.remarks();
        add(
            "config",
            match remarks.is_empty() {
                true => Check::ok("the config is valid"),
                false => Check::failed(remarks.join("; "), "bindguard config check"),
            },
        );
        let agent = agent_state(&loaded.config);
        add("agent", check_agent(&agent, has_agent_unit()));
        let report = survey_node(policy, places, &pods, |_| true);
        add("subpaths", doctor::subpaths(&report, policy));
        let found = container_mounts(&pods, places, policy.host_root_scope);
        let binds = found.map(|found| doctor::read_only_binds(&found));
        add("read-only-binds", or_unknown(binds));
        let below = read_mount_table_in_part().map(|table| {
            // The table has the kernel's names.
            let places = Places {
                kubelet_roots: kubelet_roots_by_all_names(places, &Probes::for_create()),
                ..places.clone()
            };
            doctor::below_emptydirs(&table, &places, policy.below_emptydirs)
        });
        add("mounts-below-emptydir", or_unknown(below));
        let pinned = Proc::default().namespaces().map(|seen| {
            let places = pods.with_runtime(places);
            doctor::pinned(&seen.own, &seen.others, &seen.problems, &places)
        });
        add("pinned", or_unknown(pinned));
        print(&DoctorReport { points }, self.output)
    }
}

fn or_unknown<E: Error + 'static>(check: Result<Check, E>) -> Check {
    check.unwrap_or_else(|error| Check::unknown(error_chain(&error)))
}

/// Prints the points, and returns 1 if one failed, else 2 if one could not be checked.
pub fn print(report: &DoctorReport, output: Output) -> Result<ExitCode> {
    let mut lines = Lines::default();
    let mut not_ok = 0;
    for Point { name, check } in &report.points {
        let (word, style) = match check.status {
            PointStatus::Ok => ("ok", HEALTHY),
            PointStatus::Failed => ("failed", FAULTY),
            PointStatus::Unknown => ("unknown", UNCHECKED),
        };
        not_ok += usize::from(check.status != PointStatus::Ok);
        lines.headed(word, style, &format!("{name}: {}", check.message));
        if let Some(command) = &check.command {
            lines.run(command);
        }
    }
    lines.line(&format!("{} points, {not_ok} not ok", report.points.len()));
    let has_failed = report.has(PointStatus::Failed);
    let is_incomplete = report.has(PointStatus::Unknown) && !has_failed;
    show::finish(report, output, lines, is_incomplete, has_failed)
}

fn helpers(kubelet_roots: &[PathBuf], problems: Vec<String>) -> Check {
    if let Some(problem) = problems.into_iter().next() {
        return Check::unknown(problem);
    }
    let mut in_use = BTreeSet::new();
    for root in kubelet_roots {
        match list_volumes(root) {
            Ok(volumes) => {
                for volume in volumes.mounted {
                    in_use.insert(volume.plugin.folder.to_owned());
                }
            }
            Err(error) => return Check::unknown(format!("{error}: {}", error.source)),
        }
    }
    let is_there = |name: &str| {
        let mut paths = PROGRAM_FOLDERS.iter().map(|it| Path::new(it).join(name));
        paths.any(|path| path.symlink_metadata().is_ok())
    };
    let distribution = LinuxDistribution::from_os_release(&os_release(Path::new("/")));
    doctor::mount_helpers(&in_use, is_there, &distribution)
}

/// The running daemons, and the runtimes that they have loaded.
type Daemons = [(&'static str, Result<GuardedRuntimes>)];

/// Reports changes by other tools since the installation, and daemons that have not read their
/// files or do not answer.
fn installation(record: &Record, daemons: &Daemons) -> Check {
    let (drift, problems) = drift();
    let command = drift.first().map(|drift| drift.command.clone());
    let mut all: Vec<String> = drift.into_iter().map(|drift| drift.what).collect();
    all.extend(problems);
    // The point `containerd` reports containerd.
    for owner in [Owner::Docker, Owner::Crio] {
        all.extend(unseen(owner, record.verified(owner).is_some()));
    }
    for (name, daemon) in daemons {
        if *name != CONTAINERD
            && let Err(error) = daemon
        {
            all.push(format!("{error:#}"));
        }
    }
    let mut owed = record.owed().into_iter();
    let owed = owed.find(|owed| owed.owner != Owner::Containerd);
    if owed.is_some() {
        all.push("a daemon has not read its changed file".to_owned());
    }
    match command.or(owed.map(|owed| owed.command)) {
        Some(command) => Check::failed(all.join("; "), command),
        None if all.is_empty() && record.installed.is_empty() => {
            Check::ok("no `bindguard install` is recorded on this node")
        }
        None if all.is_empty() => Check::ok("no file has changed since `bindguard install`"),
        None => Check::unknown(all.join("; ")),
    }
}

// containerd's configuration: of its files, from `containerd config dump`, with imports and
// defaults; and of the running process, which read the files at its start.

/// The CRI plugin's tables: of version 2, and of version 3 of the config.
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The point on the running containerd, if there is one. `pods`: those that run.
fn containerd(pods: &Pods, record: &Record, daemons: &Daemons) -> Result<Check> {
    let found = containerds();
    let Some(containerd) = found.first() else {
        if let Some(why) = unseen(
            Owner::Containerd,
            record.verified(Owner::Containerd).is_some(),
        ) {
            bail!("{why}");
        }
        return Ok(Check::ok("none runs here"));
    };
    let loaded = match daemons.iter().find(|(name, _)| *name == CONTAINERD) {
        Some((_, Ok(runtimes))) => Some(runtimes.clone()),
        Some((_, Err(error))) => bail!("{error:#}"),
        None => None,
    };
    let mut owed = record.owed().into_iter();
    let restart = match owed.find(|owed| owed.owner == Owner::Containerd) {
        Some(owed) => owed.command,
        None => {
            let service = containerd.service();
            let service = service.as_deref().unwrap_or("containerd");
            format!("systemctl restart {service}")
        }
    };
    let program = containerd.program();
    let program = program.context("read which program containerd is")?;
    let program = RootProgram::open(&program)?
        .with_context(|| format!("run {}: no such file", program.display()))?;
    let version = program.output(&["--version"])?;
    let path = containerd.config().map(|path| path.display().to_string());
    let dump = match &path {
        Some(path) => program.output(&["--config", path, "config", "dump"])?,
        None => program.output(&["config", "dump"])?,
    };
    let table = dump.parse();
    let table = table.context("parse the output of `containerd config dump`")?;
    let (runtimes, default_runtime) = runtimes(&table);
    let mut unusable = Vec::new();
    let mut has_default = runtimes.is_empty();
    for entry in &runtimes {
        let is_default = entry.name == default_runtime;
        has_default |= is_default;
        if is_default || entry.calls_guard() {
            unusable.extend(why_unusable(&entry.runtime_path));
            unusable.extend(why_unusable(&entry.binary_name));
        }
    }
    if !has_default {
        unusable.push(format!(
            "its default runtime {default_runtime:?} is not configured"
        ));
    }
    Ok(doctor::containerd(&ContainerdSeen {
        version: number(&version),
        runtimes,
        default_runtime,
        loaded,
        restart,
        pods: running_pods(pods),
        unusable,
    }))
}

/// Why a program cannot be run. The kernel refuses this access also on a file system that is
/// mounted noexec.
fn why_unusable(path: &str) -> Option<String> {
    if !path.starts_with('/') {
        return None;
    }
    let error = rustix::fs::access(path, rustix::fs::Access::EXEC_OK).err()?;
    Some(format!("{path}: {}", std::io::Error::from(error)))
}

/// `containerd github.com/containerd/containerd 1.7.24 ...`: the word that begins with a digit,
/// without a `v`.
fn number(version: &str) -> String {
    for word in version.split_whitespace() {
        let word = word.trim_start_matches('v');
        if word.starts_with(|first: char| first.is_ascii_digit()) {
            let end = word.find(['~', '+']).unwrap_or(word.len());
            return word[..end].to_owned();
        }
    }
    "of unknown version".to_owned()
}

/// The runtimes, and the name of the default runtime.
fn runtimes(table: &Table) -> (Vec<RuntimeEntry>, String) {
    let plugins = table.get("plugins");
    let containerd = |plugin| plugins?.get(plugin)?.get("containerd");
    let Some(containerd) = PLUGINS.into_iter().find_map(containerd) else {
        return (Vec::new(), String::new());
    };
    let word = |table: Option<&Value>, key: &str| {
        let word = table.and_then(|table| table.get(key)?.as_str());
        word.unwrap_or_default().to_owned()
    };
    let mut runtimes = Vec::new();
    let entries = containerd.get("runtimes").and_then(Value::as_table);
    for (name, entry) in entries.into_iter().flatten() {
        let options = entry.get("options");
        let systemd_cgroup = options.and_then(|options| options.get("SystemdCgroup")?.as_bool());
        runtimes.push(RuntimeEntry {
            name: name.clone(),
            runtime_type: word(Some(entry), "runtime_type"),
            runtime_path: word(Some(entry), "runtime_path"),
            binary_name: word(options, "BinaryName"),
            systemd_cgroup: systemd_cgroup.unwrap_or(false),
        });
    }
    (runtimes, word(Some(containerd), "default_runtime_name"))
}

/// The point on bindguard's programs, and the OCI runtime that the config names.
fn programs(runtime: &Path, pods: &Pods) -> Check {
    let [shim, wrapper, runtime] = match programs_seen(runtime) {
        Ok(seen) => seen,
        Err(error) => return Check::failed(format!("{error:#}"), "bindguard config show"),
    };
    doctor::programs(
        env!("CARGO_PKG_VERSION"),
        &[shim, wrapper],
        &runtime,
        &kernel_features().release,
        &pods.by_shim_version(),
    )
}

/// The shim, the wrapper and the OCI runtime.
fn programs_seen(runtime: &Path) -> Result<[ProgramSeen; 3]> {
    // The shim searches its own folder for the wrapper; so does this check.
    // In a pod that folder is the image's.
    let own = env::current_exe().ok();
    let own = own.filter(|_| show::NODE_ROOT.get().is_none());
    let beside = own.as_deref().and_then(Path::parent);
    let shim = seen(Path::new(SHIM), beside, |shim| shim.output(&["-v"]))?;
    // It passes a version request to the runtime, so that version is the runtime's. An older wrapper
    // also passes the self-test to the runtime, which refuses the argument.
    let wrapper = seen(Path::new(WRAPPER), beside, |wrapper| {
        match wrapper.output(&[SELF_TEST]) {
            Err(error) if error.is::<Failed>() => Ok("of a version without a self-test".to_owned()),
            said => said,
        }
    })?;
    let first_line = |runtime: &RootProgram| {
        let said = runtime.output(&["--version"])?;
        Ok(said.trim().lines().next().unwrap_or_default().to_owned())
    };
    // As containerd's shims find the runtime. On k3s, RKE2, k0s and MicroK8s, the `PATH` of containerd
    // has folders that the `PATH` of a shell lacks.
    for containerd in containerds().iter().filter(|_| runtime.is_relative()) {
        let path = containerd.search_path().unwrap_or_default();
        for folder in env::split_paths(&path).filter(|folder| folder.is_absolute()) {
            let found = seen(&folder.join(runtime), None, first_line)?;
            if found.found.is_some() {
                return Ok([shim, wrapper, found]);
            }
        }
    }
    Ok([shim, wrapper, seen(runtime, None, first_line)?])
}

fn seen(
    name: &Path,
    beside: Option<&Path>,
    version: impl FnOnce(&RootProgram) -> Result<String>,
) -> Result<ProgramSeen> {
    let found = RootProgram::find(name, beside)?.map(|found| {
        let said = version(&found).unwrap_or_else(|error| format!("{error:#}"));
        // The version may be on a line of its own.
        let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
        (found.path().display().to_string(), words)
    });
    let name = name.display().to_string();
    Ok(ProgramSeen { name, found })
}

#[cfg(test)]
mod tests {
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
