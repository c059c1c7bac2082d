//! The shim's answers about itself, and its behaviour on signals. The shim ignores SIGTERM and
//! `Shutdown` while a container exists. Further signals never end the shim, and SIGUSR1 makes the
//! shim log its state.

use bindguard_integration::prelude::*;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use bindguard_integration::footprint::parent_of;
use bindguard_integration::node::SOCKET;
use bindguard_integration::process::{LIMIT, run_with_bytes};
use bindguard_integration::programs::{SHIM, STOCK_SHIM};
use bindguard_integration::shim::{Bundle, Shim, options_any};
use bindguard_integration::waiting::stays;
use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use nix::libc;
use protobuf::Message;
use protobuf::well_known_types::any::Any;

/// Longer than the shim's interval between two checks whether it may end.
const SEVERAL_POLLS: Duration = Duration::from_millis(1200);
/// The shim's wait, after SIGTERM, for the delete of the last container.
const DELETE_LIMIT: Duration = Duration::from_secs(3);

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(|node| {
        let before = Leftovers::of(node)?;
        command_lines_of_people(node)?;
        socket_of_the_command_line(node)?;
        what_it_is(node)?;
        every_other_signal(node)?;
        sigusr1(node)?;
        sigterm(node)?;
        sigterm_of_the_stock_shim(node)?;
        shutdown_now(node)?;
        before.are_all(node)
    });
}

fn what_it_is(node: &Node) -> Result<()> {
    let options = options_any(&Options {
        binary_name: "runc".to_owned(),
        ..Default::default()
    })?;
    let mut info = node.command(node.programs().join(SHIM))?;
    info.arg("-info")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = info.spawn().context("start it")?;
    child
        .stdin
        .take()
        .context("its stdin")?
        .write_all(&options.write_to_bytes()?)?;
    let answer = child.wait_with_output()?;
    let info = RuntimeInfo::parse_from_bytes(&answer.stdout).context("parse the answer")?;
    ensure!(info.name == "io.containerd.bindguard.v2", "{info:?}");
    ensure!(
        !info.version.version.is_empty() && info.options.value == options.value,
        "{info:?}"
    );
    let features: Value =
        serde_json::from_slice(&info.features.value).context("read the features")?;
    // containerd reads it: can the runtime map the ids of mounts?
    ensure!(
        features["linux"]["mountExtensions"]["idmap"]["enabled"].is_boolean(),
        "{features}"
    );
    ensure!(
        info.features
            .type_url
            .ends_with("runtime-spec/1/features/Features"),
        "{}",
        info.features.type_url
    );
    wrong_options_of_info(node)?;
    let mut version = node.command(node.programs().join(SHIM))?;
    version.arg("-v");
    ensure!(run(version)?.success()?.contains("Version:"));
    Ok(())
}

/// Both shims refuse them. A caller that got an answer would believe that the runtime is
/// there.
fn wrong_options_of_info(node: &Node) -> Result<()> {
    let missing = options_any(&Options {
        binary_name: "/no/such/runtime".to_owned(),
        ..Default::default()
    })?;
    let of_other_type = Any {
        type_url: "io.example.Options".to_owned(),
        ..missing.clone()
    };
    let malformed = Any {
        value: vec![0xff],
        ..missing.clone()
    };
    for shim in ["containerd-shim-runc-v2", SHIM] {
        for input in [
            missing.write_to_bytes()?,
            of_other_type.write_to_bytes()?,
            malformed.write_to_bytes()?,
            vec![0xff],
        ] {
            let mut info = node.command(node.programs().join(shim))?;
            info.arg("-info");
            let answer = run_with_bytes(info, &input, LIMIT)?;
            ensure!(
                answer.code() == 1 && answer.stdout.is_empty(),
                "{shim}: {answer:?}"
            );
        }
    }
    Ok(())
}

/// The exit codes of the stock shim, and a text that explains the flags.
fn command_lines_of_people(node: &Node) -> Result<()> {
    for (words, expected) in [
        (&[][..], 1),
        (&["-id", "web", "delete"], 1),
        (&["-h"], 0),
        (&["-shiny"], 2),
        (&["-id"], 2),
    ] {
        for shim in [STOCK_SHIM, SHIM] {
            let mut command = node.command(node.programs().join(shim))?;
            command.args(words);
            let answer = run(command)?;
            ensure!(answer.code() == expected, "{answer:?}");
            let text = answer.stdout + &answer.stderr;
            ensure!(
                shim == STOCK_SHIM || text.contains("Usage: ") && text.contains("-publish-binary"),
                "{text:?}"
            );
        }
    }
    Ok(())
}

/// `-socket` names the path to serve on.
fn socket_of_the_command_line(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let socket = Path::new("/run/own.sock");
    let mut server = node.command(node.programs().join(SHIM))?;
    server.args([
        "-namespace",
        node.name(),
        "-id",
        "web",
        "-address",
        SOCKET,
        "-socket",
        "/run/own.sock",
    ]);
    let mut server = server
        .current_dir(bundle.path())
        .stdin(Stdio::null())
        .spawn()
        .context("start the server")?;
    until("it serves", || Ok(UnixStream::connect(socket).is_ok()))?;
    ensure!(
        fs::metadata(socket)?.permissions().mode() & 0o777 == 0o600,
        "others may use the socket"
    );
    let client = Shim::at_socket(socket).connect()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    ensure!(client.end("web")?.exit_status == 137);
    client.shut_down("web")?;
    ensure!(server.wait()?.success(), "the server failed");
    ensure!(!socket.exists(), "its socket is left");
    Ok(())
}

/// The stock shim ends at SIGTERM, and its container with it.
fn sigterm_of_the_stock_shim(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("stock")
        .runtime(Runtime::Stock)
        .start()?
        .success()?;
    let (init, shim) = (ctr.pid("stock")?, parent_of(ctr.pid("stock")?)?);
    kill(Pid::from_raw(shim.try_into()?), Signal::SIGTERM)
        .context("send SIGTERM to the stock shim")?;
    until("its container has ended", || {
        Ok(!fs::exists(format!("/proc/{init}"))?)
    })?;
    ctr.forget("stock")
}

fn sigterm(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let client = shim.connect()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    kill(shim_pid(&bundle)?, Signal::SIGTERM).context("send SIGTERM to the shim")?;
    stays(SEVERAL_POLLS, "the container runs", || {
        Ok(client.state("web", "")?.pid > 0)
    })?;
    client.kill("web", "", libc::SIGKILL.try_into()?)?;
    client.wait("web", "")?;
    let ended = Instant::now();
    stays(SEVERAL_POLLS, "the shim serves", || {
        Ok(ended.elapsed() > DELETE_LIMIT || UnixStream::connect(shim.socket()).is_ok())
    })?;
    match client.delete("web", "") {
        Ok(deleted) => ensure!(deleted.exit_status == 137, "{deleted:?}"),
        // A machine with a lot else to do came too late for the shim, which is not at fault.
        Err(error) if ended.elapsed() < DELETE_LIMIT => {
            return Err(error).context("delete the container that ended after SIGTERM");
        }
        Err(_) => {}
    }
    // without a `Shutdown`
    until("the shim has terminated", || {
        Ok(UnixStream::connect(shim.socket()).is_err())
    })
}

/// Issue 14: SIGHUP or SIGQUIT from a script that meant something else, SIGXFSZ from a limit. Only
/// SIGKILL and SIGSTOP cannot be caught.
fn every_other_signal(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let client = shim.connect()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    let pid = shim_pid(&bundle)?;
    let (caught_by_none, asks_to_end) = (
        [libc::SIGKILL, libc::SIGSTOP],
        [libc::SIGTERM, libc::SIGINT],
    );
    for signal in
        (1..=64).filter(|signal| !caught_by_none.contains(signal) && !asks_to_end.contains(signal))
    {
        // a second run meets leftovers of the first
        for _ in 0..2 {
            // SAFETY: kill(2) takes two numbers.
            let result = unsafe { libc::kill(pid.as_raw(), signal) };
            ensure!(result == 0, "signal {signal}: the shim is gone");
        }
        let state = client
            .state("web", "")
            .with_context(|| format!("signal {signal}"))?;
        ensure!(state.pid > 0, "signal {signal}");
    }
    // The runtime and the container ignore only the signals that this test's caller ignores, such
    // as nohup.
    let exec = ExecProcessRequest {
        id: "web".into(),
        exec_id: "e".into(),
        ..Default::default()
    };
    client.exec(exec, &["sleep", "1000000"])?;
    let status = fs::read_to_string(format!("/proc/{}/status", client.start("web", "e")?))?;
    let inherited = signal_set("SigIgn", &fs::read_to_string("/proc/self/status")?)?;
    let of_rust = 1 << (libc::SIGPIPE - 1);
    let of_starter = inherited & !of_rust;
    ensure!(
        signal_set("SigIgn", &status)? & !of_starter == 0 && signal_set("SigBlk", &status)? == 0,
        "{status}"
    );
    ensure!(client.end("web")?.exit_status == 137);
    Ok(client.shut_down("web")?)
}

/// Issue 14: as the stock shim writes its stacks.
fn sigusr1(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    for runtime in [Runtime::Stock, Runtime::Bindguard] {
        let log = fs::read_to_string(node.disk().join("containerd.log"))?.len();
        ctr.container("web").runtime(runtime).start()?.success()?;
        run(ctr.command(&[
            "task",
            "exec",
            "--detach",
            "--exec-id",
            "e",
            "web",
            "sleep",
            "1000000",
        ]))?
        .success()?;
        let shim = parent_of(ctr.pid("web")?)?;
        kill(Pid::from_raw(shim.try_into()?), Signal::SIGUSR1)
            .context("send SIGUSR1 to the shim")?;
        let wanted: &[&str] = match runtime {
            Runtime::Stock => &["goroutine stack dump"],
            _ => &[
                "=== BEGIN state dump ===",
                "container web: running",
                "exec e of web: running",
                "pending call: wait web",
                "child: pid",
                "descriptors: 0=/dev/null",
                "=== END state dump ===",
            ],
        };
        until(&format!("{runtime:?}: the log says {wanted:?}"), || {
            let text = fs::read_to_string(node.disk().join("containerd.log"))?;
            Ok(wanted.iter().all(|line| text[log..].contains(line)))
        })?;
        ctr.wait_for_status("web", "RUNNING")?;
        ctr.remove("web")?;
    }
    Ok(())
}

fn shim_pid(bundle: &Bundle) -> Result<Pid> {
    Ok(Pid::from_raw(
        fs::read_to_string(bundle.path().join("shim.pid"))?
            .trim()
            .parse()?,
    ))
}

/// `Now` is in the API, and containerd never sets it; for containerd-shim-runc-v2 and the Rust
/// runc-shim it changes nothing.
fn shutdown_now(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let client = shim.connect()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    client.shut_down_now("web")?;
    stays(SEVERAL_POLLS, "the container runs", || {
        Ok(client.state("web", "")?.pid > 0)
    })?;
    ensure!(client.end("web")?.exit_status == 137);
    client.shut_down_now("web")?;
    until("the shim has ended", || {
        Ok(UnixStream::connect(shim.socket()).is_err())
    })
}

/// A set of signals in `/proc/PID/status`, see proc_pid_status(5).
fn signal_set(name: &str, status: &str) -> Result<u64> {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"))
        .with_context(|| format!("no line {name}: {status}"))?;
    Ok(u64::from_str_radix(mask, 16)?)
}
