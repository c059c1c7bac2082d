//! An exec into a running container: CPU time of the shim, and of the `runc exec` that it calls,
//! above a bare `runc exec`.
//!
//! The client and containerd cost the same with every shim; they are not counted here.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::ground::Ground;
use crate::results::Results;
use crate::turns::in_turns;

const ROUNDS: usize = 30;
const AFTERWARDS: Duration = Duration::from_millis(20);
const CONTAINER: &str = "/run/containerd/runc";

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    let process = ground.node.disk().join("process.json");
    let words =
        json!({"args": ["true"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}});
    fs::write(&process, words.to_string()).context("write the process")?;
    let mut accounts = Vec::new();
    for &shim in &ground.shims {
        let name = container_of(shim);
        let account = ground.account.within(&name)?;
        account.take(ground.start_pod(shim, &name, 1)?)?;
        accounts.push((shim, account));
    }
    in_turns(results, ROUNDS, &ground.shims, 0, |shim| {
        let Some((_, account)) = accounts.iter().find(|(of, _)| *of == shim) else {
            return Ok(Vec::new());
        };
        let bare = bare_exec(ground, shim, &process)?;
        let before = account.spent()?;
        ground
            .node
            .ctr()
            .exec(&container_of(shim), &["true"])?
            .success()?;
        // the client has its answer; what the shim still does belongs to this exec
        sleep(AFTERWARDS);
        Ok(vec![(
            Figure::ExecAboveBare,
            account.spent()? - before - bare,
        )])
    })
}

fn container_of(shim: Candidate) -> String {
    format!("exec-{shim:?}").to_lowercase()
}

/// An exec by runc alone, with the arguments of a shim. The account measures the exec: the new
/// process runs a part of runc before it joins the container's cgroup, and this process does not
/// wait for it.
fn bare_exec(ground: &Ground, shim: Candidate, process: &Path) -> Result<f64> {
    let before = ground.account.spent()?;
    let status = Command::new(ground.node.programs().join("runc"))
        .arg("--root")
        .arg(format!("{CONTAINER}/{}", ground.node.name()))
        .args(["exec", "--detach", "--process"])
        .arg(process)
        .arg(container_of(shim))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    ensure!(
        status.context("run runc exec")?.success(),
        "runc exec in a container of {}",
        shim.title()
    );
    sleep(AFTERWARDS);
    Ok(ground.account.spent()? - before)
}
