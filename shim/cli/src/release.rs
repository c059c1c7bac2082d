//! `bindguard release`: a running container gives up its copies of mounts that the host has
//! unmounted. Only copies that the record of the create shows are unmounted.

use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use bindguard_config::Config;
use bindguard_core::identity::Identity;
use bindguard_core::mount_table::{MountEntry, MountIndex};
use bindguard_core::report::{Actor, ReleaseLine, ReleaseResult, ReleasedCopy};
use bindguard_core::text::{serialize_path, shell_word};
use bindguard_guard::record_release;
use bindguard_guard::refresh::{HelperProcess, HostRoots, Release, Released, release_copies};
use bindguard_operator::bundles::bundle_of_container;
use bindguard_operator::holders::MountsToFind;
use bindguard_operator::node::{
    MountUser, NotInit, hold_init, is_root, recorded_init_of, refuse_other_mounts, users_of_mount,
};
use bindguard_operator::pods::{ContainerState, PodContainer};
use bindguard_sys::enter::ProcessError;
use bindguard_sys::read_mount_table;
use clap::Args;
use serde::Serialize;

use crate::holders::{resolved, wanted};
use crate::pods::PodsFrom;
use crate::show::{self, FAULTY, HEALTHY, Lines};

/// Arguments of `release`.
#[derive(Debug, Args)]
pub struct ReleaseVerb {
    /// The former mount point on this node, a folder above, or a block device.
    path: PathBuf,
    /// Print the copies and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Detach copies that are in use, too. A file that is still open keeps the device busy, and no
    /// mount table and no `holders` shows that any more.
    #[arg(long)]
    lazy: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pods: PodsFrom,
}

/// The report of a release.
#[derive(Debug, Serialize)]
struct ReleaseReport {
    /// The path in question.
    #[serde(serialize_with = "serialize_path")]
    path: PathBuf,
    /// The copies that were found.
    copies: Vec<CopyOfContainer>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

/// A container's copy of a host mount.
#[derive(Debug, Serialize)]
struct CopyOfContainer {
    /// The names of the pod and the container, or the container's id.
    container: String,
    #[serde(flatten)]
    copy: ReleasedCopy,
    /// The processes that use the copy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    used_by: Vec<MountUser>,
}

impl ReleaseVerb {
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        ensure!(
            is_root(),
            "release mounts: this needs root, also with --dry-run"
        );
        // Before the threads of the CRI's client.
        let helper = HelperProcess::start().context("start the helper process")?;
        let path = former_mount_point(&self.path)?;
        let own = read_mount_table().context("read this node's mounts")?;
        let wanted = wanted(&path, &own, false)?;
        let mut report = ReleaseReport {
            path,
            copies: Vec::new(),
            problems: Vec::new(),
        };
        for container in &self.pods.pods().containers {
            let is_running = |state| state == ContainerState::Running;
            if container.state.is_none_or(is_running) {
                let released = self.release(&helper, container, &wanted, config, &mut report);
                if let Err(error) = released {
                    report.problems.push(format!("{error:#}"));
                }
            }
        }
        show::print_report(&report, self.json, text)?;
        let is_left = |found: &CopyOfContainer| found.copy.result != ReleaseResult::Released;
        Ok(show::code(
            !report.problems.is_empty(),
            report.copies.iter().any(is_left),
        ))
    }

    fn extent(&self) -> Release {
        match (self.dry_run, self.lazy) {
            (true, _) => Release::Look,
            (false, true) => Release::Detach,
            (false, false) => Release::Unmount,
        }
    }

    fn release(
        &self,
        helper: &HelperProcess,
        container: &PodContainer,
        wanted: &MountsToFind,
        config: &Config,
        report: &mut ReleaseReport,
    ) -> anyhow::Result<()> {
        let name = name_of(container);
        let doing = || format!("release mounts of {name}");
        let pid = recorded_init_of(&container.id).or_else(|| self.pods.init_of(&container.id));
        // Without a process there is no mount namespace.
        let Some(pid) = pid else {
            return Ok(());
        };
        let process = match hold_init(&container.id, pid) {
            Err(NotInit::Process(ProcessError::Ended(_))) => return Ok(()),
            process => process.with_context(doing)?,
        };
        let bundle = bundle_of_container(Path::new("/"), &container.id);
        let bundle = bundle.with_context(|| format!("{}: its bundle is not found", doing()))?;
        let roots = HostRoots::open(&bundle, config.policy(), config.places());
        let roots = roots.with_context(doing)?;
        if roots.is_empty() {
            return Ok(());
        }
        refuse_other_mounts(&process).with_context(doing)?;
        let spec = self.pods.spec_of(&container.id);
        let is_wanted = |mount: &MountEntry, table: &MountIndex<'_>| wanted.is(mount, table);
        let start = Instant::now();
        let released = release_copies(
            helper,
            &process,
            spec.as_ref(),
            &roots,
            is_wanted,
            self.extent(),
        );
        let released = released.with_context(doing)?;
        let identity = Identity {
            container: container.name.clone(),
            pod: container.pod.clone(),
        };
        let mut line = ReleaseLine::new(Actor::Operator, &container.id, identity);
        line.copies = released.iter().map(record_of).collect();
        line.set_duration(start.elapsed());
        let found = released.iter().zip(&line.copies);
        report
            .copies
            .extend(found.map(|(released, copy)| CopyOfContainer {
                container: name.clone(),
                used_by: users_of(released, copy.result, self.lazy),
                copy: copy.clone(),
            }));
        let journal = config.journal().filter(|_| !self.dry_run);
        match journal.filter(|_| !line.copies.is_empty()) {
            Some(journal) => record_release(journal, line).context("journal the release"),
            None => Ok(()),
        }
    }
}

/// The path as the kernel prints it. The folder of a former mount point may be gone as well.
fn former_mount_point(path: &Path) -> anyhow::Result<PathBuf> {
    let is_plain = path.is_absolute() && !path.components().any(|it| it == Component::ParentDir);
    match resolved(path) {
        Ok(path) => Ok(path),
        Err(_) if is_plain => Ok(path.to_owned()),
        Err(error) => bail!(
            "release {}: {error:#}; name the mount point as this node did, by an absolute path without ..",
            path.display()
        ),
    }
}

fn name_of(container: &PodContainer) -> String {
    let names = show::joined_names(&container.pod, container, "/");
    if names.is_empty() {
        container.id.clone()
    } else {
        names
    }
}

/// The copy as the journal and the report have it.
fn record_of(copy: &Released) -> ReleasedCopy {
    ReleasedCopy {
        mount_point: copy.mount.mount_point.to_string_lossy().into_owned(),
        fs_type: copy.mount.fs_type.0.clone(),
        device: copy.mount.device.to_string(),
        result: copy.result,
        error: copy.error.clone(),
    }
}

/// The processes that use the copy.
fn users_of(copy: &Released, result: ReleaseResult, is_lazy: bool) -> Vec<MountUser> {
    // A detached mount lives on, with its id, while a file on the mount is open.
    let may_be_used = match result {
        ReleaseResult::Busy => true,
        ReleaseResult::Released => is_lazy,
        ReleaseResult::Kept | ReleaseResult::Refused => false,
    };
    let mount = &copy.mount;
    match may_be_used {
        true => users_of_mount(mount.id, &mount.mount_point, copy.namespace),
        false => Vec::new(),
    }
}

fn text(report: &ReleaseReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for CopyOfContainer {
        container,
        copy,
        used_by,
    } in &report.copies
    {
        let style = match copy.result {
            ReleaseResult::Released => HEALTHY,
            ReleaseResult::Kept | ReleaseResult::Busy | ReleaseResult::Refused => FAULTY,
        };
        let error = copy.error.as_ref();
        let error = error.map(|error| format!(": {error}")).unwrap_or_default();
        let word = copy.result.into_str();
        lines.headed(word, style, &format!("{copy} of {container}{error}"));
        for user in used_by {
            lines.below(&format!("by {} ({})", user.name, user.pid));
        }
        if copy.result == ReleaseResult::Released && !used_by.is_empty() {
            lines.below("the device stays busy until they end, and no mount table shows that");
        }
    }
    if report.copies.is_empty() && report.problems.is_empty() {
        lines.line(&format!(
            "no private bind of the host's root in a container of containerd or of a pod has a copy of \
             a mount that this node has unmounted there; bindguard holders {} lists every mount namespace",
            shell_word(&report.path)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_testing::documented;

    #[test]
    fn json_matches_the_document() {
        let report = ReleaseReport {
            path: "/mnt/disk".into(),
            copies: vec![CopyOfContainer {
                container: "monitoring/exporter-x7k2p/exporter".to_owned(),
                copy: ReleasedCopy {
                    mount_point: "/host/mnt/disk".into(),
                    fs_type: "ext4".to_owned(),
                    device: "8:16".to_owned(),
                    result: ReleaseResult::Busy,
                    error: Some("it is in use".to_owned()),
                },
                used_by: vec![MountUser {
                    pid: 4242,
                    name: "node_exporter".to_owned(),
                }],
            }],
            problems: Vec::new(),
        };
        let shown = documented("`release`");
        assert_eq!(
            serde_json::to_string_pretty(&report).unwrap(),
            shown.trim_end()
        );
    }
}
