//! `start`: the address of the server that takes the container.

use std::error::Error;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bindguard_core::handover::VERSION_FILE;
use bindguard_sys::leave_room;
use containerd_shim_protos::TASK_API_VERSION;
use containerd_shim_protos::bootstrap_api::BootstrapResult;
use protobuf::Message;
use rustix::process::Pid;
use rustix::thread::{CoreSchedulingScope, create_core_scheduling_cookie};

use super::claim::{Claim, claim};
use super::stdin::{Bootstrap, StartInput};
use super::{SOCKET_DIRECTORY, address_of_socket, link_of_group, write_address};
use crate::args::Args;
use crate::bundle::{Bundle, ShimSpec};
use crate::cgroup::hierarchies_with_controllers;
use crate::service::{ServerAnswer, expect};
use crate::step::{StepError, failed};
use crate::{logging, memory};

/// Answers with the address of the group's server, and starts a server if there is none. Runs in
/// the bundle's directory.
pub fn start(args: &Args) -> Result<(), Box<dyn Error>> {
    // Without the fifo the log of `start` is lost; that is no reason to fail.
    let _ = logging::to_fifo(Path::new(logging::FIFO), args.debug);
    let sent = StartInput::read(args)?;
    let spec = Bundle::at(".").spec()?;
    let configured = sent
        .bootstrap
        .as_ref()
        .and_then(|bootstrap| bootstrap.socket_directory.as_deref());
    let directory = configured.unwrap_or(Path::new(SOCKET_DIRECTORY));
    let link = link_of_group(
        directory,
        &args.address,
        &args.namespace,
        &group_of(&spec, &args.id),
    );
    let claimed = claim(&link, |server| waits_for(server, &args.id))
        .map_err(failed("bind the shim's socket"))?;
    let address = address_of_socket(&match claimed {
        Claim::Serving(socket) => socket,
        Claim::New(own) => {
            start_server(args, &sent, own.listener())?;
            own.hand_over()
        }
    });
    // Every bundle gets the address, also if the container joins a server: containerd 1.x reads the
    // file after a restart.
    write_address(&address).map_err(failed("write the address into the bundle"))?;
    let answer =
        encode_answer(&address, sent.bootstrap.as_ref()).map_err(failed("encode the answer"))?;
    Ok(write_out(&answer).map_err(failed("answer with the address"))?)
}

/// True if the server waits for this container from now on. A server that is about to end does not.
fn waits_for(server: UnixStream, id: &str) -> io::Result<bool> {
    let event_loop = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    Ok(event_loop.block_on(expect(server, id)) == ServerAnswer::Waits)
}

fn start_server(args: &Args, sent: &StartInput, listener: &UnixListener) -> Result<(), StepError> {
    join_core_scheduling_group();
    // The link, not its target: after an upgrade, too, bindguard-runtime is searched beside it.
    let program = std::env::current_exe().map_err(failed("find this program"))?;
    let words = [
        "-namespace",
        &args.namespace,
        "-id",
        &args.id,
        "-address",
        &args.address,
    ];
    let bootstrap = sent.bootstrap.as_ref();
    let debug = args.debug || bootstrap.is_some_and(|bootstrap| bootstrap.debug);
    let words = words.into_iter().chain(debug.then_some("-debug"));
    let mut environment = vec![memory::settings()];
    if let Some(address) = bootstrap
        .map(|bootstrap| &bootstrap.ttrpc_address)
        .filter(|address| !address.is_empty())
    {
        environment.push(("TTRPC_ADDRESS", address.into()));
    }
    let socket = listener
        .try_clone()
        .map_err(failed("pass on the shim's socket"))?;
    let mut command = Command::new(program);
    command.args(words).envs(environment);
    command
        .stdin(OwnedFd::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // A signal to containerd's process group does not reach it.
    command.process_group(0);
    let server = command.spawn().map_err(failed("start the server"))?.id();
    // An upgrade replaces the program's file, and the server runs on: `bindguard status` reads the
    // version. Both files are worth less than a create, which may need the room.
    if File::open(".").is_ok_and(|bundle| leave_room(&bundle).is_ok()) {
        let pid = server.to_string();
        for (name, text) in [
            ("shim.pid", &*pid),
            (VERSION_FILE, env!("CARGO_PKG_VERSION")),
        ] {
            let _ = crate::bundle::write_beside(Path::new(name), text.as_bytes());
        }
    }
    join_cgroup(server, &sent.options.shim_cgroup);
    adjust_oom_score(server);
    Ok(())
}

fn write_out(answer: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(answer)?;
    stdout.flush()
}

// The answer to `start`, in a form that the calling containerd understands.
//
// | containerd | sends | understands | what follows for a pod |
// |---|---|---|---|
// | 1.6, 1.7 | an `Any` or nothing | the plain address | `start` and `delete` for each container |
// | 2.0 to 2.2 | an `Any` or nothing | the plain address, JSON | with the address, version 2: the same |
// | 2.3 and later | `BootstrapParams` | also a `BootstrapResult` | with version 3: `start` and `delete` for the sandbox alone |

/// The bytes for stdout.
fn encode_answer(address: &str, bootstrap: Option<&Bootstrap>) -> protobuf::Result<Vec<u8>> {
    match bootstrap {
        None => Ok(address.as_bytes().to_owned()),
        Some(_) => {
            let (address, protocol) = (address.to_owned(), "ttrpc".to_owned());
            BootstrapResult {
                version: TASK_API_VERSION,
                address,
                protocol,
                ..Default::default()
            }
            .write_to_bytes()
        }
    }
}

// The group of containers that share a server: those of a pod.

/// Searched in this order; the second is the CRI plugin's.
const GROUP_ANNOTATIONS: [&str; 2] = [
    "io.containerd.runc.v2.group",
    "io.kubernetes.cri.sandbox-id",
];

/// The group that an annotation names; a container without an annotation is a group of its own.
fn group_of(spec: &ShimSpec, id: &str) -> String {
    let named = GROUP_ANNOTATIONS
        .iter()
        .find_map(|name| spec.annotations.get(*name));
    named
        .filter(|group| !group.is_empty())
        .cloned()
        .unwrap_or_else(|| id.to_owned())
}

// The server's placement among the node's processes: out-of-memory order, cgroup, core scheduling.
//
// Failures are logged only: a node without these features must still run containers.

/// The highest `oom_score_adj` of the kernel.
const HIGHEST_OOM_SCORE: i32 = 1000;

/// Gives this process and the server a separate core scheduling group, if containerd sets
/// `SCHED_CORE`.
fn join_core_scheduling_group() {
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
fn adjust_oom_score(server: u32) {
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
fn join_cgroup(server: u32, cgroup: &str) {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn an_older_containerd_gets_the_address_alone() {
        assert_eq!(encode_answer("unix:///s/a", None).unwrap(), b"unix:///s/a");
        // A newer containerd that parses it first as a BootstrapResult must fail.
        assert!(BootstrapResult::parse_from_bytes(b"unix:///s/a").is_err());
    }

    /// The bytes that Go's protobuf encodes for version 3, this address and "ttrpc".
    #[test]
    fn one_that_sent_parameters_gets_a_result() {
        let expected = b"\x08\x03\x12\x0bunix:///s/a\x1a\x05ttrpc";
        assert_eq!(
            encode_answer("unix:///s/a", Some(&Bootstrap::default())).unwrap(),
            expected
        );
    }

    fn group(annotations: &str) -> String {
        let spec =
            ShimSpec::parse(format!(r#"{{"annotations":{annotations}}}"#).as_bytes()).unwrap();
        group_of(&spec, "self")
    }

    #[test]
    fn the_runc_annotation_goes_before_the_pods() {
        assert_eq!(group("{}"), "self");
        assert_eq!(group(r#"{"io.kubernetes.cri.sandbox-id":"pod"}"#), "pod");
        assert_eq!(
            group(r#"{"io.kubernetes.cri.sandbox-id":"pod","io.containerd.runc.v2.group":"g"}"#),
            "g"
        );
        assert_eq!(group(r#"{"io.kubernetes.cri.sandbox-id":""}"#), "self");
    }
}
