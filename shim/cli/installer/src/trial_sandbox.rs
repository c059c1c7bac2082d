//! One sandbox through the handler `bindguard`, after `install` restarted containerd: the files can be
//! right, and no pod starts, as with a program that a security module refuses.
//!
//! A separate process runs the sandbox and removes it, in its own process group: the installer may be
//! killed meanwhile.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use bindguard_core::program_names::RUNTIME;
use bindguard_operator::cri::trial::{self, LIMIT};
use bindguard_operator::root_program::output_within;

use crate::plan::InstallOptions;
use crate::record::Record;
use crate::report::InstallReport;
use crate::running::{Daemon, active_config, containerds, socket_of, wait_until_healthy};
use crate::runtimes::sandbox_image;

/// The hidden option of the process that runs the sandbox.
pub const OPTION: &str = "try-sandbox";

/// No pod starts through the handler.
#[derive(Debug, thiserror::Error)]
#[error("{0}; no pod starts through the handler {RUNTIME}")]
pub struct SandboxFailed(String);

/// Tries a sandbox in each containerd that is not one of `former`.
///
/// # Errors
/// If no pod starts ([`SandboxFailed`]), or containerd does not answer.
pub fn try_restarted(
    former: &[Daemon],
    options: &InstallOptions,
    record: &Record,
    report: &mut InstallReport,
) -> Result<()> {
    wait_until_healthy()?;
    for containerd in containerds() {
        if former.contains(&containerd) {
            continue;
        }
        // a containerd without CRI has no pods
        let Some(config) = active_config(&containerd)? else {
            continue;
        };
        let handler = &config["containerd"]["runtimes"][RUNTIME];
        let untried = if handler.is_null() {
            Some(format!(
                "containerd, process {}, has no such handler",
                containerd.pid
            ))
        } else {
            // runc refuses a cgroup that is in no slice
            let is_systemd = handler["options"]["SystemdCgroup"] == true;
            let parent = if is_systemd { "system.slice" } else { "" };
            match sandbox_image(options, record) {
                Ok(Some(image)) => try_sandbox(&socket_of(&containerd), &image, parent)?,
                Ok(None) => Some("containerd's config names no image of a sandbox".to_owned()),
                Err(error) => Some(format!("{error:#}")),
            }
        };
        if let Some(why) = untried {
            report.note(format!(
                "a sandbox of the handler {RUNTIME} was not tried: {why}"
            ));
        }
    }
    Ok(())
}

fn try_sandbox(socket: &Path, image: &str, parent: &str) -> Result<Option<String>> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["install", &format!("--{OPTION}")]);
    command.arg(socket).args([image, parent]);
    match output_within(LIMIT, command) {
        Ok(said) => Ok(Some(said.trim_end().to_owned()).filter(|said| !said.is_empty())),
        Err(error) => Err(SandboxFailed(format!("{error:#}")).into()),
    }
}

/// Runs the sandbox, and removes it: the separate process.
pub fn run(words: &[String]) -> Result<()> {
    let [socket, image, parent] = words else {
        anyhow::bail!("--{OPTION} needs SOCKET IMAGE CGROUP");
    };
    let untried = trial::try_sandbox(Path::new(socket), RUNTIME, image, parent)
        .with_context(|| format!("try a sandbox by {socket}"))?;
    if let Some(why) = untried {
        println!("{why}");
    }
    Ok(())
}
