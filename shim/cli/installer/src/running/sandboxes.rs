//! The pods whose containers need bindguard's handler: containerd and CRI-O look the handler of a
//! pod up at each start of a container. containerd 1.7 can also need it to report or stop a sandbox
//! (docs/decisions/0037).
//!
//! A pod without a handler in its sandbox goes on with the node's default runtime.

use std::os::unix::process::parent_id;
use std::path::Path;

use anyhow::{Context, Result};
use bindguard_core::program_names::{RUNTIME, SHIM};
use bindguard_operator::cri::PodSandbox;
use bindguard_operator::cri::of_node::query;
use bindguard_sys::process_files::arguments_of;
use rustix::process::{Pid, Signal, kill_process};

use super::{CRIO, Daemon, containerds, cri_status, crio_socket, option};
use crate::owner::Owner;
use bindguard_operator::terminal::print_remark;

/// The annotation of a sandbox's spec with its handler; empty for the node's default runtime.
const CRIO_HANDLER: &str = "io.kubernetes.cri-o.RuntimeHandler";

/// The names of the pods that were created with the handler `bindguard` and still have a sandbox.
///
/// # Errors
/// If the daemon runs and does not list its sandboxes.
pub fn pods_with_handler(owner: Owner) -> Result<Vec<String>> {
    let mut names: Vec<String> = sandboxes(owner)?
        .into_iter()
        .filter(|sandbox| sandbox.runtime_handler == RUNTIME)
        .map(|sandbox| {
            let pod = sandbox.metadata;
            format!("{}/{}", pod.namespace, pod.name)
        })
        .collect();
    names.sort();
    names.dedup();
    Ok(names)
}

fn sandboxes(owner: Owner) -> Result<Vec<PodSandbox>> {
    match owner {
        Owner::Containerd => {
            let mut found = Vec::new();
            for containerd in containerds() {
                found.extend(cri_status::sandboxes(&containerd).with_context(|| {
                    format!("list the pods of containerd, process {}", containerd.pid)
                })?);
            }
            Ok(found)
        }
        Owner::Crio if Daemon::named(CRIO).is_empty() => Ok(Vec::new()),
        Owner::Crio => {
            let socket = crio_socket();
            let listed = query(&socket, async |cri| cri.sandboxes().await)
                .context("list the pods of CRI-O")?;
            let with_handler = |sandbox: PodSandbox| {
                let runtime_handler = crio_handler(&socket, &sandbox.id)
                    .with_context(|| format!("find the handler of CRI-O's pod {}", sandbox.id))?;
                Ok(PodSandbox {
                    runtime_handler,
                    ..sandbox
                })
            };
            listed.into_iter().map(with_handler).collect()
        }
        Owner::Docker | Owner::Podman | Owner::Agent | Owner::Bindguard => Ok(Vec::new()),
    }
}

/// CRI-O leaves the handler out of its list and its status, and records it in the sandbox's spec.
fn crio_handler(socket: &Path, sandbox: &str) -> Result<String> {
    let info = cri_status::info_of_sandbox(socket, sandbox)?;
    info["runtimeSpec"]["annotations"][CRIO_HANDLER]
        .as_str()
        .map(str::to_owned)
        .context("its spec names no handler")
}

/// The sandbox of this process's container, if bindguard's shim supervises the container. In a pod
/// with the node's processes, the shim is the parent of a container's first process.
fn own_sandbox() -> Option<String> {
    let words = arguments_of(&[parent_id()]).pop()?.ok()?;
    let is_own_shim = Path::new(words.first()?).file_name()? == SHIM;
    option(&words, &["id"]).filter(|_| is_own_shim)
}

/// Ends the sandbox of this process, if bindguard's shim supervises it: the kubelet then makes a
/// new sandbox, under the present default runtime. Otherwise this process would need the programs
/// for ever.
///
/// `StopPodSandbox` of the CRI would end this process first, and containerd stops nothing more once
/// its client is gone. So the sandbox's first process is killed.
///
/// # Errors
/// If containerd does not know the sandbox.
pub fn leave_own_sandbox() -> Result<()> {
    let (Some(sandbox), Some(containerd)) = (own_sandbox(), containerds().into_iter().next())
    else {
        return Ok(());
    };
    print_remark(
        "this pod runs under bindguard's shim: ending its sandbox; the kubelet makes another one",
    );
    let pid = cri_status::pid_of_sandbox(&containerd, &sandbox)
        .and_then(|pid| Pid::from_raw(pid).context("it has no process"))
        .with_context(|| format!("find the process of the sandbox {sandbox}"))?;
    kill_process(pid, Signal::KILL).with_context(|| format!("end the sandbox {sandbox}"))
}
