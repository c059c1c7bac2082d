//! `bindguard release`: a running container gives up its copies of mounts that the host has
//! unmounted. Only copies that the record of the create shows are unmounted.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::mount_table::{MountEntry, MountIndex};
use bindguard_guard::refresh::{
    HelperProcess, HostRoots, NotReleased, Release, ReleaseOutcome, Released, release_copies,
};
use bindguard_operator::bundles::bundle_of_container;
use bindguard_operator::holders::Wanted;
use bindguard_operator::node::{MountUser, hold_init, recorded_init_of, users_of_mount};
use bindguard_operator::pods::{ContainerState, PodContainer};
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
    path: PathBuf,
    /// The copies that were found.
    copies: Vec<ReleasedCopy>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

/// One copy.
#[derive(Debug, Serialize)]
struct ReleasedCopy {
    /// The names of its pod and container, or the container's id.
    container: String,
    /// Its place in the container.
    mount_point: PathBuf,
    /// Its filesystem's type.
    fs_type: String,
    /// Its device, `major:minor`.
    device: String,
    result: CopyResult,
    /// Why it is not released.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The processes that use it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    used_by: Vec<MountUser>,
}

/// The result for one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CopyResult {
    /// It is unmounted, or detached.
    Released,
    /// It would be released.
    Kept,
    /// It is in use.
    Busy,
    /// It stays for another reason.
    Refused,
}

impl ReleaseVerb {
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        // Before the threads of the CRI's client.
        let helper = HelperProcess::start().context("start the helper process")?;
        // The folder of a former mount point may be gone as well.
        let path = resolved(&self.path).unwrap_or_else(|_| self.path.clone());
        ensure!(
            path.is_absolute(),
            "release {}: no such path",
            path.display()
        );
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
                let released = self.release(&helper, container, &wanted, config);
                match released {
                    Ok(copies) => report.copies.extend(copies),
                    Err(error) => report.problems.push(format!("{error:#}")),
                }
            }
        }
        if self.json {
            show::print_json(&report)?;
        } else {
            show::print_text(text(&report).text())?;
        }
        let is_left = |copy: &ReleasedCopy| copy.result != CopyResult::Released;
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
        wanted: &Wanted,
        config: &Config,
    ) -> anyhow::Result<Vec<ReleasedCopy>> {
        let name = name_of(container);
        let doing = || format!("release mounts of {name}");
        let Some(bundle) = bundle_of_container(Path::new("/"), &container.id) else {
            return Ok(Vec::new());
        };
        let roots = HostRoots::open(&bundle, config.policy(), config.places());
        let Some(roots) = roots.filter(|roots| !roots.is_empty()) else {
            return Ok(Vec::new());
        };
        let pid = recorded_init_of(&container.id).or_else(|| self.pods.init_of(&container.id));
        let Some(pid) = pid else {
            return Ok(Vec::new());
        };
        let process = hold_init(&container.id, pid).with_context(doing)?;
        let spec = self.pods.spec_of(&container.id);
        let is_wanted = |mount: &MountEntry, table: &MountIndex<'_>| wanted.is(mount, table);
        let released = release_copies(
            helper,
            &process,
            spec.as_ref(),
            &roots,
            is_wanted,
            self.extent(),
        );
        let released = released.with_context(doing)?.into_iter();
        Ok(released
            .map(|copy| ReleasedCopy::of(&name, &copy, self.lazy))
            .collect())
    }
}

fn name_of(container: &PodContainer) -> String {
    let names = [container.pod.display_name(), container.name.clone()];
    let names: Vec<String> = names.into_iter().flatten().collect();
    match names.is_empty() {
        true => container.id.clone(),
        false => names.join("/"),
    }
}

impl ReleasedCopy {
    fn of(container: &str, copy: &Released, is_lazy: bool) -> Self {
        let (result, error) = match &copy.outcome {
            ReleaseOutcome::Released => (CopyResult::Released, None),
            ReleaseOutcome::Kept => (CopyResult::Kept, None),
            ReleaseOutcome::NotReleased(why) => {
                let result = match why {
                    NotReleased::Busy => CopyResult::Busy,
                    NotReleased::NoRecord
                    | NotReleased::NotRecorded
                    | NotReleased::ParentIsShared
                    | NotReleased::Enter(_)
                    | NotReleased::Covered => CopyResult::Refused,
                };
                (result, Some(error_chain(why)))
            }
        };
        let mount = &copy.mount;
        // A detached mount lives on, with its id, while a file on the mount is open.
        let may_be_used = match result {
            CopyResult::Busy => true,
            CopyResult::Released => is_lazy,
            CopyResult::Kept | CopyResult::Refused => false,
        };
        let used_by = match may_be_used {
            true => users_of_mount(mount.id, &mount.mount_point, copy.namespace),
            false => Vec::new(),
        };
        Self {
            container: container.to_owned(),
            mount_point: mount.mount_point.clone(),
            fs_type: mount.fs_type.0.clone(),
            device: mount.device.to_string(),
            result,
            error,
            used_by,
        }
    }
}

fn text(report: &ReleaseReport) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for copy in &report.copies {
        let (word, style) = match copy.result {
            CopyResult::Released => ("released", HEALTHY),
            CopyResult::Kept => ("kept", FAULTY),
            CopyResult::Busy => ("busy", FAULTY),
            CopyResult::Refused => ("refused", FAULTY),
        };
        let error = copy.error.as_ref();
        let error = error.map(|error| format!(": {error}")).unwrap_or_default();
        let ReleasedCopy {
            container,
            mount_point,
            fs_type,
            device,
            ..
        } = copy;
        let place = mount_point.display();
        lines.headed(
            word,
            style,
            &format!("{place} ({fs_type} {device}) of {container}{error}"),
        );
        for user in &copy.used_by {
            lines.below(&format!("by {} ({})", user.name, user.pid));
        }
        if copy.result == CopyResult::Released && !copy.used_by.is_empty() {
            lines.below("the device stays busy until they end, and no mount table shows that");
        }
    }
    if report.copies.is_empty() {
        lines.line("no container has a copy of a mount that this node has unmounted there");
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
            copies: vec![ReleasedCopy {
                container: "monitoring/exporter-x7k2p/exporter".to_owned(),
                mount_point: "/host/mnt/disk".into(),
                fs_type: "ext4".to_owned(),
                device: "8:16".to_owned(),
                result: CopyResult::Busy,
                error: Some("it is in use".to_owned()),
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
