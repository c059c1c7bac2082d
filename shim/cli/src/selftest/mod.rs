//! `bindguard selftest`: whether this node's kernel and OCI runtimes do what bindguard relies on.
//!
//! The scenes run in a child with a pid namespace and a mount namespace of its own, on a tmpfs. The
//! kernel kills the child with its parent, and everything in both namespaces with the child: no
//! mount, process or file is left on the node, also if the self-test is killed.

mod reader;
mod scenes;

use std::path::{PathBuf, absolute};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, ensure};
use bindguard_operator::doctor::PointStatus;
use bindguard_operator::node::is_root;
use bindguard_operator::root_program::status_within;
use clap::Args;
use nix::sched::{CloneFlags, unshare};

use crate::{doctor, show};

/// A time limit against a kernel that hangs. All scenes take about a second, in an emulated machine a minute.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Arguments of `selftest`.
#[derive(Debug, Args)]
pub struct Selftest {
    /// Check this OCI runtime, beside the runc and crun on PATH.
    #[arg(long, value_name = "FILE")]
    runtime: Vec<PathBuf>,
    /// Print the points as JSON, for a bug report.
    #[arg(long)]
    json: bool,
    /// The part of a process that the self-test starts.
    #[arg(hide = true, trailing_var_arg = true)]
    part: Vec<String>,
}

impl Selftest {
    /// Runs it.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.part.first().map(String::as_str) {
            None => self.run_scenes(),
            Some("scenes") => {
                let report = scenes::run(&self.runtime)?;
                show::print_report(&report, self.json, doctor::text)?;
                let [is_unknown, has_failed] =
                    [PointStatus::Unknown, PointStatus::Failed].map(|status| report.has(status));
                Ok(show::code(is_unknown && !has_failed, has_failed))
            }
            Some(part) => reader::run(part, &self.part[1..]).map(|()| ExitCode::SUCCESS),
        }
    }

    fn run_scenes(&self) -> anyhow::Result<ExitCode> {
        ensure!(is_root(), "run the self-test: this needs root");
        let mut command = Command::new("/proc/self/exe");
        command.arg("selftest").args(self.json.then_some("--json"));
        for runtime in &self.runtime {
            let path = absolute(runtime)?;
            let found = path.symlink_metadata();
            found.with_context(|| format!("run {}", path.display()))?;
            command.arg("--runtime").arg(path);
        }
        command.arg("scenes");
        // The child is the first process of the pid namespace.
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID)
            .context("create namespaces for the self-test")?;
        let status = status_within(TIMEOUT, command).context("run the scenes")?;
        let code = status
            .code()
            .with_context(|| format!("the scenes ended: {status}"))?;
        Ok(ExitCode::from(u8::try_from(code)?))
    }
}
