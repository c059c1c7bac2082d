//! The verbs that containerd runs besides the server: short-lived processes that answer on stdout.
//!
//! ```text
//!   start    finds or starts the server of a container's group   → unix://…, or a BootstrapResult
//!   delete   cleans up after a server that died                  → DeleteResponse
//!   -info    the features of shim and runtime (containerd 2.x)   → RuntimeInfo
//!   -v       the version, for people
//! ```
//!
//! containerd runs `delete` as a separate process, with the bundle in `-bundle` or as current
//! directory. `delete` removes the container from the runtime in any state, unmounts the root
//! filesystem, and reports a process that was killed. The bundle may be from Go's shim or from any
//! version of this shim. containerd removes the bundle afterwards.
//!
//! containerd runs `delete` at the end of every container, even if the server has deleted the
//! container. For a settled bundle `delete` answers without a call of the runtime.

mod claim;
mod start;

use std::env;
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::SystemTime;

use bindguard_core::error_chain;
use bindguard_core::handover::{SHIM, SHIM_RUNTIME_TYPE};
use containerd_shim_protos::api::{ConnectRequest, DeleteResponse};
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use nix::libc::SIGKILL;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
use rustix::io::Errno;
use tokio::net;
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Code, Request, Response};

use crate::args::Args;
use crate::bundle::{Bundle, Options, ShimSpec, given_or};
use crate::events::timestamp;
use crate::exits::Exits;
use crate::logging;
use crate::runtime::{DEFAULT_BINARY, Runtime, look_up};
use crate::service::{EXPECT, V3};
use crate::task::{end_pod, roll_back};
use crate::work::{Result, block_on, failed};
use claim::hash;

pub use claim::remove as remove_socket;
pub use start::start;

/// The directory all of containerd's shims put their sockets in.
const SOCKET_DIRECTORY: &str = "/run/containerd/s";
/// containerd 1.x reads this file in a bundle after a restart: it has the server's address.
const ADDRESS_FILE: &str = "address";

/// The revision of the sources; the Makefile sets it.
const REVISION: Option<&str> = option_env!("BINDGUARD_REVISION");

/// The name under which Go's containerd registers the runtime spec's features.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// The link to a group's server: a hash of containerd's address, namespace and group, since paths
/// of sockets are short. Go's shim binds its socket at the same path, so a start of either shim
/// finds the group's server.
fn link_of_group(directory: &Path, containerd: &str, namespace: &str, group: &str) -> PathBuf {
    let key = Path::new(containerd).join(namespace).join(group);
    directory.join(hash(key.as_os_str().as_encoded_bytes()))
}

/// containerd's event socket: the address in the environment, else the fixed path beside
/// containerd's own socket.
pub fn events_address(containerd: &str) -> String {
    match env::var("TTRPC_ADDRESS") {
        Ok(address) if !address.is_empty() => address,
        _ => format!("{containerd}.ttrpc"),
    }
}

/// Answers with a RuntimeInfo. containerd 2.x requests it above all to learn whether the runtime
/// can id-map mounts.
pub fn info() -> Result<(), Box<dyn Error>> {
    let (options, any) = start::read_options()?;
    let binary = given_or(&options.binary_name, DEFAULT_BINARY);
    let program =
        look_up(binary).ok_or_else(|| format!("find the runtime {binary:?}: no such program"))?;
    let version = RuntimeVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        revision: REVISION.unwrap_or_default().to_owned(),
        ..Default::default()
    };
    let info = RuntimeInfo {
        name: SHIM_RUNTIME_TYPE.to_owned(),
        version: MessageField::some(version),
        features: MessageField::from_option(features(&program)),
        options: MessageField::from_option(any),
        ..Default::default()
    };
    let answer = info.write_to_bytes().map_err(failed("encode the answer"))?;
    let written = io::stdout().write_all(&answer);
    Ok(written.map_err(failed("answer on stdout"))?)
}

/// The output of `runc features`, if it is JSON. Older runtimes have no such verb: then the answer
/// has no features.
fn features(program: &Path) -> Option<Any> {
    let output = Command::new(program)
        .arg("features")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(&output.stdout).is_ok();
    (is_json && output.status.success()).then(|| Any {
        type_url: FEATURES.to_owned(),
        value: output.stdout,
        ..Default::default()
    })
}

/// Prints the version for people.
pub fn version() {
    let revision = match REVISION {
        None | Some("") => "unknown",
        Some(revision) => revision,
    };
    println!(
        "{SHIM}:\n  Version:  {}\n  Revision: {revision}",
        env!("CARGO_PKG_VERSION")
    );
}

/// The limit of tries: a killed server hangs up, and a new server may have started and been killed.
const DYING_SERVERS: u32 = 5;
/// containerd writes the sandbox's id into this file, in the bundle of each container that it adds
/// to a sandbox.
const SANDBOX: &str = "sandbox";

/// Cleans up after a dead server and answers on stdout.
pub fn delete(args: &Args) -> Result<()> {
    logging::to_stderr(args.debug).map_err(failed("log to stderr"))?;
    // Older containerds start `delete` in the bundle; its last part is the id in any case.
    let path = match args.bundle.as_str() {
        "" => env::current_dir().map(|here| here.with_file_name(&args.id)),
        given => Ok(given.into()),
    };
    let bundle = Bundle::at(path.map_err(failed("find the bundle"))?);
    let pid = Bundle::read_pid(&bundle.init_pid_file()).unwrap_or_default();
    let done = block_on(async {
        let crashed = !bundle.is_settled();
        if crashed {
            clean_up(args, &args.id, &bundle).await;
        }
        if is_socket_gone(&bundle.path, &args.id).await && crashed {
            for (id, bundle) in joined(&bundle.path, &args.id) {
                clean_up(args, &id, &bundle).await;
            }
        }
    });
    done.map_err(failed("start an event loop"))?;
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
        log::warn!(
            error:% = error_chain(&error);
            "using the default runtime to delete the container"
        );
        Options::default()
    });
    let spec = bundle.spec().unwrap_or_else(|error| {
        log::warn!(error:% = error_chain(&error); "what the spec says is not known");
        ShimSpec::default()
    });
    let exits = Arc::new(Exits::default());
    let runtime = Runtime::new(&options, &args.namespace, id, bundle.clone(), exits);
    roll_back(&runtime, &spec.cgroups_path).await;
    end_pod(&runtime, &spec).await;
}

/// Returns true if no server listens on the socket that a bundle names any more.
async fn is_socket_gone(bundle: &Path, id: &str) -> bool {
    let Ok(address) = fs::read_to_string(bundle.join(ADDRESS_FILE)) else {
        return false;
    };
    let address = address.trim();
    let socket = Path::new(address.strip_prefix("unix://").unwrap_or(address));
    for _ in 0..DYING_SERVERS {
        match claim::remove_stale(socket) {
            Err(Errno::CONNREFUSED | Errno::NOENT) => return true,
            Ok(Some(server)) => {
                if is_alive(server, id).await {
                    return false;
                }
            }
            // The server does not even accept, or the kernel does not say.
            Ok(None) | Err(_) => return false,
        }
    }
    false
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

/// The time limit: a server that hangs must not block the caller.
const LIMIT_NANOSECONDS: i64 = 2_000_000_000;

/// True if the connection's server lives. The kernel accepts for a killed server until its files
/// are closed, and then hangs up. A living server answers, with or without the container. A server
/// that hangs counts as alive.
pub async fn is_alive(server: UnixStream, id: &str) -> bool {
    let answer = call_server(server, V3, "Connect", id).await;
    matches!(
        answer,
        Ok(_) | Err(ttrpc::Error::RpcStatus(_) | ttrpc::Error::Others(_))
    )
}

/// Announces a container to the server behind this connection, for `start`. False if the server is
/// about to end.
///
/// A pod's last container may be deleted, and its shim shut down, between a new container's `start`
/// and `Create`: the create would find no server. So `start` calls first. If the server answers
/// that it ends, `start` makes a new server. A server without this call, of Go's shim or of an
/// older version, is used without the announcement.
pub async fn takes(server: UnixStream, id: &str) -> bool {
    let (service, method) = EXPECT.split_once('/').unwrap_or_default();
    match call_server(server, service, method, id).await {
        Err(ttrpc::Error::RpcStatus(status)) => status.code() != Code::UNAVAILABLE,
        Err(error @ ttrpc::Error::Others(_)) => {
            log::warn!(error:%; "announce the container to the shim of its group");
            true
        }
        // The server hung up before, during or after the call.
        Err(_) => false,
        Ok(_) => true,
    }
}

/// Calls a method whose only argument is the container. `Others`: no answer in time, or the call
/// could not be sent.
async fn call_server(
    server: UnixStream,
    service: &str,
    method: &str,
    id: &str,
) -> ttrpc::Result<Response> {
    let message = ConnectRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    let request = Request {
        service: service.to_owned(),
        method: method.to_owned(),
        timeout_nano: LIMIT_NANOSECONDS,
        payload: message.write_to_bytes().map_err(not_sent)?,
        ..Default::default()
    };
    server.set_nonblocking(true).map_err(not_sent)?;
    let server = net::UnixStream::from_std(server).map_err(not_sent)?;
    Client::new(Socket::from(server)).request(request).await
}

fn not_sent(error: impl Error) -> ttrpc::Error {
    ttrpc::Error::Others(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_has_the_name_of_gos_socket() {
        let link = |namespace| {
            link_of_group(
                Path::new(SOCKET_DIRECTORY),
                "/run/containerd/containerd.sock",
                namespace,
                "abc",
            )
        };
        // sha256("/run/containerd/containerd.sock/k8s.io/abc")
        let name =
            "/run/containerd/s/a99a1752d3a0fadfb1f869026f16760475df03a572e20f4ccea9e6c1e5470b72";
        assert_eq!(link("k8s.io"), Path::new(name));
        assert_ne!(link("moby"), Path::new(name));
    }
}

#[cfg(test)]
mod delete_tests {
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
        assert!(is_socket_gone(bundle.path(), "c").await);
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
