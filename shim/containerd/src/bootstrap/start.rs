//! `start`: the address of the server that takes the container.

use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bindguard_core::handover::VERSION_FILE;
use bindguard_sys::leave_room;

use super::claim::{Claim, claim};
use super::group::group_of;
use super::stdin::StartInput;
use super::{address, answer, placement};
use crate::args::Args;
use crate::bundle::Bundle;
use crate::service::{ServerAnswer, expect};
use crate::step::{StepError, failed};
use crate::{logging, memory};

/// Answers with the address of the group's server, and starts a server if there is none. Runs in
/// the bundle's directory.
pub(crate) fn start(args: &Args) -> Result<(), Box<dyn Error>> {
    // Without the fifo the log of `start` is lost; that is no reason to fail.
    let _ = logging::to_fifo(Path::new(logging::FIFO), args.debug);
    let sent = StartInput::read(args)?;
    let spec = Bundle::at(".").spec()?;
    let configured = sent
        .bootstrap
        .as_ref()
        .and_then(|bootstrap| bootstrap.socket_directory.as_deref());
    let directory = configured.unwrap_or(Path::new(address::SOCKET_DIRECTORY));
    let link = address::link_of_group(
        directory,
        &args.address,
        &args.namespace,
        &group_of(&spec, &args.id),
    );
    let claimed = claim(&link, |server| waits_for(server, &args.id))
        .map_err(failed("bind the shim's socket"))?;
    let address = address::of_socket(&match claimed {
        Claim::Serving(socket) => socket,
        Claim::New(own) => {
            start_server(args, &sent, own.listener())?;
            own.hand_over()
        }
    });
    // Every bundle gets the address, also if the container joins a server: containerd 1.x reads the
    // file after a restart.
    address::write(&address).map_err(failed("write the address into the bundle"))?;
    let answer =
        answer::encode(&address, sent.bootstrap.as_ref()).map_err(failed("encode the answer"))?;
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
    placement::join_core_scheduling_group();
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
    placement::join_cgroup(server, &sent.options.shim_cgroup);
    placement::adjust_oom_score(server);
    Ok(())
}

fn write_out(answer: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(answer)?;
    stdout.flush()
}
