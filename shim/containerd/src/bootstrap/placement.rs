//! The server's placement among the node's processes: out-of-memory order, cgroup, core scheduling.
//!
//! Failures are logged only: a node without these features must still run containers.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::process::Pid;
use rustix::thread::{CoreSchedulingScope, create_core_scheduling_cookie};

use crate::cgroup::hierarchies_with_controllers;

/// The highest `oom_score_adj` of the kernel.
const HIGHEST_OOM_SCORE: i32 = 1000;

/// Gives this process and the server a separate core scheduling group, if containerd sets
/// `SCHED_CORE`.
pub(super) fn join_core_scheduling_group() {
    if std::env::var_os("SCHED_CORE").is_none_or(|wanted| wanted.is_empty()) {
        return;
    }
    let this = rustix::process::getpid();
    if let Err(error) = create_core_scheduling_cookie(this, CoreSchedulingScope::ProcessGroup) {
        tracing::warn!(%error, "no core scheduling for the shim");
    }
}

/// Lets the kernel kill the shim rather than containerd: the score is the parent's, containerd's,
/// plus 1.
pub(super) fn adjust_oom_score(server: u32) {
    let result = oom_score_of(rustix::process::getppid()).and_then(|score| {
        let score = (score + 1).min(HIGHEST_OOM_SCORE);
        fs::write(format!("/proc/{server}/oom_score_adj"), score.to_string())
    });
    if let Err(error) = result {
        tracing::debug!(%error, "the shim's oom_score_adj stays as it is");
    }
}

fn oom_score_of(parent: Option<Pid>) -> io::Result<i32> {
    let pid = parent.map_or_else(|| "self".to_owned(), |pid| pid.as_raw_nonzero().to_string());
    let text = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Moves the server into the cgroup that the options name: in every v1 hierarchy, or in the v2
/// hierarchy. The unified hierarchy of a hybrid node gets no cgroup.
pub(super) fn join_cgroup(server: u32, cgroup: &str) {
    if cgroup.is_empty() {
        return;
    }
    for hierarchy in hierarchies_with_controllers() {
        let directory = hierarchy.join(cgroup.trim_start_matches('/'));
        let joined = make_cgroup(&hierarchy, cgroup)
            .and_then(|()| fs::write(directory.join("cgroup.procs"), server.to_string()));
        if let Err(error) = joined {
            tracing::warn!(%error, cgroup = %directory.display(), "the shim stays out of a cgroup");
        }
    }
}

/// A cpuset of v1 begins without a CPU and accepts no process until it has some: it gets its
/// parent's. In v2 an empty cpuset uses its parent's, and the topmost has no such file.
fn make_cgroup(hierarchy: &Path, cgroup: &str) -> io::Result<()> {
    let mut directory = hierarchy.to_owned();
    for name in Path::new(cgroup.trim_start_matches('/')).components() {
        let parent = directory.clone();
        directory.push(name);
        match DirBuilder::new().mode(0o755).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if fs::read_to_string(directory.join(file)).is_ok_and(|own| own.trim().is_empty()) {
                let Ok(of_parent) = fs::read_to_string(parent.join(file)) else {
                    continue;
                };
                fs::write(directory.join(file), of_parent)?;
            }
        }
    }
    Ok(())
}
