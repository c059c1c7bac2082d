//! `bindguard release`: a running container gives up its copies of mounts that the host has
//! unmounted. Only copies that the record of the create shows are unmounted.

use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::mount_table::{MountEntry, MountIndex};
use bindguard_core::report::{Actor, ReleaseLine, ReleaseResult, ReleasedCopy};
use bindguard_core::text::{serialize_path, shell_word};
use bindguard_guard::record_release;
use bindguard_guard::refresh::{HelperProcess, HostRoots, Release, Released, release_copies};
use bindguard_operator::containers::{NotInit, bundle_of_container, hold_init};
use bindguard_operator::holders::MountsToFind;
use bindguard_operator::node::{MountUser, is_root, refuse_other_mounts, users_of_mount};
use bindguard_operator::pods::{ContainerState, PodContainer};
use bindguard_sys::enter::ProcessError;
use bindguard_sys::read_mount_table;
use clap::Args;
use serde::Serialize;

use crate::holders::{resolved, wanted};
use crate::pods::PodsFrom;
use crate::show::{self, Lines};

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
    pub fn run(self, config: &Config) -> Result<ExitCode> {
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
            if !matches!(container.state, None | Some(ContainerState::Running)) {
                continue;
            }
            let mut name = show::joined_names(container, "/");
            if name.is_empty() {
                name.clone_from(&container.id);
            }
            let released = self
                .release(&helper, container, &name, &wanted, config, &mut report)
                .with_context(|| format!("release mounts of {name}"));
            if let Err(error) = released {
                report.problems.push(format!("{error:#}"));
            }
        }
        let mut copies = report.copies.iter().map(|found| &found.copy);
        let is_left = copies.any(|copy| copy.result != ReleaseResult::Released);
        let is_incomplete = !report.problems.is_empty();
        show::finish(&report, self.json, text, is_incomplete, is_left)
    }

    fn release(
        &self,
        helper: &HelperProcess,
        container: &PodContainer,
        name: &str,
        wanted: &MountsToFind,
        config: &Config,
        report: &mut ReleaseReport,
    ) -> Result<()> {
        // Without a process there is no mount namespace.
        let Some(pid) = self.pods.init_of(&container.id) else {
            return Ok(());
        };
        let process = match hold_init(&container.id, pid) {
            Err(NotInit::Process(ProcessError::Ended(_))) => return Ok(()),
            process => process?,
        };
        let bundle = bundle_of_container(Path::new("/"), &container.id);
        let bundle = bundle.context("its bundle is not found")?;
        let roots = HostRoots::open(&bundle, config.policy(), config.places())?;
        if roots.is_empty() {
            return Ok(());
        }
        refuse_other_mounts(&process)?;
        let extent = match (self.dry_run, self.lazy) {
            (true, _) => Release::Look,
            (false, true) => Release::Detach,
            (false, false) => Release::Unmount,
        };
        let spec = self.pods.spec_of(&container.id);
        let is_wanted = |mount: &MountEntry, table: &MountIndex<'_>| wanted.is(mount, table);
        let start = Instant::now();
        let released = release_copies(helper, &process, spec.as_ref(), &roots, is_wanted, extent)?;
        let identity = Identity {
            container: container.name.clone(),
            pod: container.pod.clone(),
        };
        let mut line = ReleaseLine::new(Actor::Operator, &container.id, identity);
        line.set_duration(start.elapsed());
        for Released {
            namespace,
            mount,
            result,
            error,
            ..
        } in released
        {
            // A detached mount lives on, with its id, while a file on the mount is open.
            let may_be_used = match result {
                ReleaseResult::Busy => true,
                ReleaseResult::Released => self.lazy,
                ReleaseResult::Kept | ReleaseResult::Refused => false,
            };
            let mut used_by = Vec::new();
            if may_be_used {
                used_by = users_of_mount(mount.id, &mount.mount_point, namespace);
            }
            let copy = ReleasedCopy {
                mount_point: mount.mount_point.to_string_lossy().into_owned(),
                fs_type: mount.fs_type.0,
                device: mount.device.to_string(),
                result,
                error,
            };
            line.copies.push(copy.clone());
            report.copies.push(CopyOfContainer {
                container: name.to_owned(),
                copy,
                used_by,
            });
        }
        if let Some(journal) = config.journal()
            && !self.dry_run
            && !line.copies.is_empty()
            && let Err(error) = record_release(journal, line)
        {
            let why = error_chain(&error);
            report.problems.push(format!("journal the release: {why}"));
        }
        Ok(())
    }
}

/// The path as the kernel prints it. The folder of a former mount point may be gone as well.
fn former_mount_point(path: &Path) -> Result<PathBuf> {
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

fn text(report: &ReleaseReport) -> Lines {
    let mut lines = Lines::of_problems(&report.problems);
    for CopyOfContainer {
        container,
        copy,
        used_by,
    } in &report.copies
    {
        let is_released = copy.result == ReleaseResult::Released;
        let place = format!("{copy} of {container}");
        lines.result(
            copy.result.into_str(),
            is_released,
            &place,
            copy.error.as_deref(),
        );
        for user in used_by {
            lines.below(&format!("by {} ({})", user.name, user.pid));
        }
        if is_released && !used_by.is_empty() {
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
