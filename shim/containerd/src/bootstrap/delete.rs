//! `delete`: cleans up after a server that died.
//!
//! containerd runs `delete` as a separate process, with the bundle in `-bundle` or as current
//! directory. `delete` removes the container from the runtime in any state, unmounts the root
//! filesystem, and reports a process that was killed. The bundle may be from Go's shim or from any
//! version of this shim. containerd removes the bundle afterwards.
//!
//! containerd runs `delete` at the end of every container, even if the server has deleted the
//! container. For a settled bundle `delete` answers without a call of the runtime.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bindguard_core::error_chain;
use containerd_shim_protos::api::DeleteResponse;
use nix::libc::SIGKILL;
use protobuf::Message;

use super::ADDRESS_FILE;
use super::claim::{self, SocketState};
use crate::args::Args;
use crate::bundle::{Bundle, ShimSpec};
use crate::events::timestamp;
use crate::exits::Exits;
use crate::logging;
use crate::options::Options;
use crate::runtime::Runtime;
use crate::service::is_alive;
use crate::step::{StepError, failed};
use crate::task::{end_pod, roll_back};

/// The limit of tries: a killed server hangs up, and a new server may have started and been killed.
const DYING_SERVERS: u32 = 5;
/// containerd writes the sandbox's id into this file, in the bundle of each container that it adds
/// to a sandbox.
const SANDBOX: &str = "sandbox";

/// Cleans up after a dead server and answers on stdout.
pub fn delete(args: &Args) -> Result<(), StepError> {
    logging::to_stderr(args.debug).map_err(failed("log to stderr"))?;
    let bundle = Bundle::at(bundle_path(args).map_err(failed("find the bundle"))?);
    let pid = Bundle::read_pid(&bundle.init_pid_file()).unwrap_or_default();
    let event_loop = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let event_loop = event_loop.map_err(failed("start an event loop"))?;
    event_loop.block_on(async {
        let crashed = !bundle.is_settled();
        if crashed {
            clean_up(args, &args.id, &bundle).await;
        }
        if remove_socket(&bundle.path, &args.id).await && crashed {
            for (id, bundle) in joined(&bundle.path, &args.id) {
                clean_up(args, &id, &bundle).await;
            }
        }
    });
    let answer = DeleteResponse {
        pid,
        exit_status: 128 + SIGKILL.unsigned_abs(),
        exited_at: timestamp(SystemTime::now()),
        ..Default::default()
    };
    let answer = answer
        .write_to_bytes()
        .map_err(failed("encode the answer"))?;
    io::stdout().write_all(&answer).map_err(failed("answer"))
}

async fn clean_up(args: &Args, id: &str, bundle: &Bundle) {
    let options = bundle.read_options().unwrap_or_else(|error| {
        tracing::warn!(
            error = error_chain(&error),
            "using the default runtime to delete the container"
        );
        Options::default()
    });
    let spec = bundle.spec().unwrap_or_else(|error| {
        tracing::warn!(
            error = error_chain(&error),
            "what the spec says is not known"
        );
        ShimSpec::default()
    });
    let exits = Arc::new(Exits::default());
    let runtime = Runtime::new(&options, &args.namespace, bundle.clone(), exits);
    roll_back(&runtime, id, &spec.cgroups_path).await;
    end_pod(&runtime, id, &spec).await;
}

/// Returns true if no server listens on the socket that a bundle names any more.
async fn remove_socket(bundle: &Path, id: &str) -> bool {
    let Ok(address) = fs::read_to_string(bundle.join(ADDRESS_FILE)) else {
        return false;
    };
    let address = address.trim();
    let socket = Path::new(address.strip_prefix("unix://").unwrap_or(address));
    for _ in 0..DYING_SERVERS {
        match claim::remove_stale(socket) {
            SocketState::Gone => return true,
            SocketState::Silent => return false,
            SocketState::Accepts(server) => {
                if is_alive(server, id).await {
                    return false;
                }
            }
        }
    }
    false
}

/// `-bundle` if it is given. Older containerds start `delete` in the bundle; its last part is the
/// id in any case.
fn bundle_path(args: &Args) -> io::Result<PathBuf> {
    if !args.bundle.is_empty() {
        return Ok(PathBuf::from(&args.bundle));
    }
    let here = std::env::current_dir()?;
    Ok(here.parent().unwrap_or(Path::new("/")).join(&args.id))
}

/// The containers, by name, that joined the sandbox without a `start`. Their bundles are beside the
/// sandbox's bundle.
///
/// With version 3 of the protocol containerd 2.3 sends a pod's later containers directly to the
/// sandbox's server. When this server dies, containerd runs `delete` only for the sandbox, and just
/// removes the bundles of the pod's containers. The containers' processes would live on, unknown to
/// containerd.
fn joined(sandbox: &Path, id: &str) -> Vec<(String, Bundle)> {
    let mut joined = Vec::new();
    let beside = sandbox.parent().map(fs::read_dir);
    for entry in beside.into_iter().flatten().flatten().flatten() {
        let path = entry.path();
        // containerd runs `delete` for a container that had a `start`.
        if path != sandbox
            && fs::read_to_string(path.join(SANDBOX)).is_ok_and(|of| of.trim() == id)
            && matches!(path.join(ADDRESS_FILE).try_exists(), Ok(false))
            && let Ok(name) = entry.file_name().into_string()
        {
            joined.push((name, Bundle::at(path)));
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::{fs, thread};

    use super::*;

    #[tokio::test]
    async fn the_socket_of_a_server_that_is_being_killed_is_removed() {
        let bundle = tempfile::tempdir().unwrap();
        let path = bundle.path().join("socket");
        fs::write(
            bundle.path().join("address"),
            format!("unix://{}", path.display()),
        )
        .unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        let killed = thread::spawn(move || {
            let mut connection = listener.accept().unwrap().0;
            let _ = connection.read(&mut [0]);
            drop(listener);
        });
        assert!(remove_socket(bundle.path(), "c").await);
        killed.join().unwrap();
        assert!(!path.try_exists().unwrap());
    }

    #[test]
    fn only_containers_of_this_sandbox_without_a_start() {
        let namespace = tempfile::tempdir().unwrap();
        for (id, sandbox, has_address) in [
            ("pod", "pod", true),
            ("web", "pod", false),
            ("old", "pod", true),
            ("other", "pod2", false),
        ] {
            let bundle = namespace.path().join(id);
            fs::create_dir(&bundle).unwrap();
            fs::write(bundle.join(SANDBOX), sandbox).unwrap();
            if has_address {
                fs::write(bundle.join("address"), "unix:///s/a").unwrap();
            }
        }
        let joined = joined(&namespace.path().join("pod"), "pod");
        assert_eq!(
            joined.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(),
            ["web"]
        );
    }
}
