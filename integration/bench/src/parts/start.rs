//! The command `start`, as containerd 2.1 calls it, until the shim that it leaves behind has
//! answered a call.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bindguard_integration::node::SOCKET;
use containerd_shim_protos::api::ConnectRequest;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use protobuf::Message;
use serde_json::{Value, json};

use crate::candidate::Candidate;
use crate::clocks;
use crate::figure::Figure;
use crate::ground::Ground;
use crate::results::Results;
use crate::turns::in_turns;

const ROUNDS: usize = 40;
const BUNDLE: &str = "/run/bench-bundle";

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    let log = lay_out_bundle(ground)?;
    in_turns(
        results,
        ROUNDS,
        &ground.shims_and_floor(),
        0,
        |candidate| match candidate {
            Candidate::EmptyPrograms => empty_programs(ground),
            shim => {
                let figures = once(ground, shim);
                drain(&log);
                figures
            }
        },
    )
}

/// Returns the reader of the shims' log, because containerd also reads this log.
fn lay_out_bundle(ground: &Ground) -> Result<File> {
    let bundle = Path::new(BUNDLE);
    fs::create_dir_all(bundle.join("rootfs"))
        .with_context(|| format!("create the bundle {BUNDLE}"))?;
    let process = json!({"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
    let linux = json!({"cgroupsPath": format!("/{}/start", ground.node.name())});
    let spec = json!({"ociVersion": "1.0.2", "process": process, "root": {"path": "rootfs"}, "linux": linux});
    fs::write(bundle.join("config.json"), spec.to_string()).context("write the spec")?;
    let log = bundle.join("log");
    mkfifo(&log, Mode::from_bits_truncate(0o600)).context("make the fifo for the shim's log")?;
    let options = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .clone();
    options
        .open(&log)
        .context("open the fifo for the shim's log")
}

fn once(ground: &Ground, shim: Candidate) -> Result<Vec<(Figure, f64)>> {
    let mut command = start_command(ground, shim);
    let (cpu, of_command, begun) = (
        ground.account.spent()?,
        clocks::of_children()?,
        Instant::now(),
    );
    let done = command.output().context("run start")?;
    let of_command = clocks::of_children()? - of_command;
    ensure!(
        done.status.success(),
        "start: {}: {}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    );
    let listener = Listener::of(&done.stdout)?;
    listener.call()?;
    let wall = begun.elapsed().as_secs_f64() * 1e3;
    let cpu = ground.account.spent()? - cpu;
    end(ground, &listener)?;
    Ok(vec![
        (Figure::StartWall, wall),
        (Figure::StartCpu, cpu),
        (Figure::StartCommandCpu, of_command),
    ])
}

/// The second program inherits stdout, so the output ends when both have ended.
fn empty_programs(ground: &Ground) -> Result<Vec<(Figure, f64)>> {
    let mut command = Command::new(ground.node.programs().join(Candidate::EmptyPrograms.link()));
    command
        .arg("start")
        .envs(ground.node.environment())
        .current_dir(BUNDLE)
        .stdin(Stdio::null());
    let (cpu, of_command) = (ground.account.spent()?, clocks::of_children()?);
    let done = command.output().context("run the empty program")?;
    let of_command = clocks::of_children()? - of_command;
    ensure!(done.status.success(), "the empty program: {}", done.status);
    Ok(vec![
        (Figure::StartCpu, ground.account.spent()? - cpu),
        (Figure::StartCommandCpu, of_command),
    ])
}

/// A shim that finds the fifo full of its predecessors' words waits.
fn drain(mut log: &File) {
    let mut words = [0; 4096];
    while log.read(&mut words).is_ok_and(|length| length > 0) {}
}

/// Arguments and environment are those of `pkg/shim/util.go` of containerd 2.1.
fn start_command(ground: &Ground, shim: Candidate) -> Command {
    let node = &ground.node;
    let mut command = Command::new(node.programs().join(shim.link()));
    command.args([
        "-namespace",
        node.name(),
        "-address",
        SOCKET,
        "-publish-binary",
        "containerd",
        "-id",
        "start",
        "start",
    ]);
    command.envs([
        ("GOMAXPROCS", "2"),
        ("MAX_SHIM_VERSION", "3"),
        ("NAMESPACE", node.name()),
        ("GRPC_ADDRESS", SOCKET),
    ]);
    command.env("TTRPC_ADDRESS", format!("{SOCKET}.ttrpc"));
    command
        .envs(node.environment())
        .current_dir(BUNDLE)
        .stdin(Stdio::null());
    command
}

/// The address that a shim's `start` printed.
struct Listener {
    socket: PathBuf,
    service: &'static str,
}

impl Listener {
    /// An address, or since version 3 a JSON document with the address.
    fn of(said: &[u8]) -> Result<Self> {
        let text = String::from_utf8_lossy(said);
        let parameters: Option<Value> = serde_json::from_str(&text).ok();
        let field = |name: &str| {
            parameters
                .as_ref()
                .and_then(|parameters| parameters.get(name))
        };
        let address = field("address")
            .and_then(Value::as_str)
            .unwrap_or(text.trim());
        let is_third = field("version").and_then(Value::as_u64) == Some(3);
        let service = if is_third {
            "containerd.task.v3.Task"
        } else {
            "containerd.task.v2.Task"
        };
        let socket = address
            .strip_prefix("unix://")
            .with_context(|| format!("start said {text:?}"))?;
        Ok(Self {
            socket: socket.into(),
            service,
        })
    }

    /// A ttrpc call by hand: a client of the crate would start an event loop within the measured
    /// time. Any answer is enough.
    fn call(&self) -> Result<()> {
        let payload = ConnectRequest {
            id: "start".to_owned(),
            ..Default::default()
        };
        let payload = payload.write_to_bytes().context("encode the call")?;
        let request = ttrpc::Request {
            service: self.service.to_owned(),
            method: "Connect".to_owned(),
            payload,
            ..Default::default()
        };
        let body = request.write_to_bytes().context("encode the call")?;
        // length, stream, type of message, flags: PROTOCOL.md of containerd/ttrpc
        let length = u32::try_from(body.len())
            .context("a call that is too long")?
            .to_be_bytes();
        let frame = [&length[..], &1u32.to_be_bytes(), &[1, 0], &body].concat();
        let mut stream = UnixStream::connect(&self.socket).context("connect to the shim")?;
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .context("set a time limit")?;
        stream
            .write_all(&frame)
            .and_then(|()| stream.read_exact(&mut [0; 10]))
            .context("call the shim")
    }
}

fn end(ground: &Ground, listener: &Listener) -> Result<()> {
    for pid in ground.account.shims()? {
        // the shim may have ended by itself
        let _ = kill(
            Pid::from_raw(pid.try_into().context("a shim's pid")?),
            Signal::SIGKILL,
        );
    }
    ground.account.settle()?;
    // A killed shim of bindguard also leaves its group's link, and a peer cannot bind where a link
    // leads nowhere.
    let sockets = listener.socket.parent().context("the socket's folder")?;
    for entry in fs::read_dir(sockets)
        .with_context(|| format!("list {}", sockets.display()))?
        .flatten()
    {
        let _ = fs::remove_file(entry.path());
    }
    sleep(Duration::from_millis(5));
    Ok(())
}
