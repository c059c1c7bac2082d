//! Issue 14: a file that a create or an exec has to open does not answer. That call waits; the
//! shim's other containers answer, start and end. A fifo without a peer hangs like a file on a dead
//! server.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use bindguard_integration::leftovers::Leftovers;
use bindguard_integration::shim::{Bundle, Client, Shim};
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Setup};
use containerd_shim_protos::api::{ExecProcessRequest, KillRequest, StateRequest};
use containerd_shim_protos::shim::oci::Options;
use nix::libc;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use protobuf::well_known_types::any::Any;

/// Far more than an answer takes on a busy machine, and the shim is not to hang for good.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn containerd_2_1() {
    Setup::on(Generation::V2_1).story(|node| {
        let before = Leftovers::of(node)?;
        others_go_on(node)?;
        before.are_all(node)
    });
}

fn others_go_on(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "other", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let other = shim.connect()?;
    other.create(&bundle.request())?;
    other.start("other", "")?;

    let pid = fs::read_to_string(bundle.path().join("shim.pid"))?
        .trim()
        .to_owned();
    let scene = Scene { node, shim, pid };
    scene
        .log_file_of_an_init()
        .context("the log file of an init")?;
    scene
        .log_file_of_an_exec()
        .context("the log file of an exec")?;
    scene.options_file().context("the file of the options")?;
    ensure!(other.end("other")?.exit_status == 137);
    Ok(other.shut_down("other")?)
}

struct Scene<'a> {
    node: &'a Node,
    shim: Shim,
    pid: String,
}

impl Scene<'_> {
    fn log_file_of_an_init(&self) -> Result<()> {
        let (bundle, fifo) = (
            Bundle::create(self.node, "logged", &["true"])?,
            fifo(self.node, "init.log")?,
        );
        let mut request = bundle.request();
        request.stdout = format!("file://{}", fifo.display());
        self.while_it_hangs(
            |client| client.create(&request).map(drop),
            || drop(File::open(&fifo)),
        )?;
        let client = self.shim.connect()?;
        client.start("logged", "")?;
        ensure!(client.wait("logged", "")? == 0);
        client.delete("logged", "")?;
        Ok(())
    }

    fn log_file_of_an_exec(&self) -> Result<()> {
        let (client, fifo) = (self.shim.connect()?, fifo(self.node, "exec.log")?);
        let stdout = format!("file://{}", fifo.display());
        let exec = ExecProcessRequest {
            id: "other".into(),
            exec_id: "logged".into(),
            stdout,
            ..Default::default()
        };
        client.exec(exec, &["true"])?;
        self.while_it_hangs(
            |client| client.start("other", "logged").map(drop),
            || drop(File::open(&fifo)),
        )?;
        ensure!(client.wait("other", "logged")? == 0);
        client.delete("other", "logged")?;
        Ok(())
    }

    /// `ConfigPath` of the options that containerd sends for a foreign runtime type.
    fn options_file(&self) -> Result<()> {
        let (bundle, fifo) = (
            Bundle::create(self.node, "optioned", &["true"])?,
            fifo(self.node, "options.toml")?,
        );
        let mut request = bundle.request();
        request.options = Some(generic_options(&fifo)?).into();
        let write = || drop(OpenOptions::new().write(true).open(&fifo));
        self.while_it_hangs(|client| client.create(&request).map(drop), write)?;
        ensure!(self.shim.connect()?.end("optioned")?.exit_status == 137);
        Ok(())
    }

    /// Makes a call that hangs, expects the other containers to go on, removes the cause, and
    /// expects the call to succeed.
    fn while_it_hangs(
        &self,
        call: impl FnOnce(&Client) -> ttrpc::Result<()> + Send,
        end: impl FnOnce(),
    ) -> Result<()> {
        thread::scope(|scope| {
            let shim = &self.shim;
            let hanging = scope.spawn(move || call(&shim.connect()?).context("the call that hung"));
            let others = self.others_go_on();
            end();
            hanging
                .join()
                .map_err(|_| anyhow!("the client panicked"))??;
            others
        })
    }

    fn others_go_on(&self) -> Result<()> {
        until("the shim opens the file", || self.is_opening())?;
        let client = self.shim.connect()?;
        let (state, id) = (
            StateRequest {
                id: "other".into(),
                ..Default::default()
            },
            "other".into(),
        );
        client
            .call_within(CALL_TIMEOUT, async |task, context| {
                task.state(context, &state).await
            })
            .context("State")?;
        let kill = KillRequest {
            id,
            signal: Signal::SIGCONT as u32,
            ..Default::default()
        };
        client
            .call_within(CALL_TIMEOUT, async |task, context| {
                task.kill(context, &kill).await
            })
            .context("Kill")?;
        ensure!(self.is_opening()?, "nothing hung");
        Ok(())
    }

    /// Does a thread wait in openat(2)? See proc_pid_syscall(5).
    fn is_opening(&self) -> Result<bool> {
        let threads =
            fs::read_dir(format!("/proc/{}/task", self.pid)).context("list the shim's threads")?;
        let mut calls = threads
            .flatten()
            .filter_map(|thread| fs::read_to_string(thread.path().join("syscall")).ok());
        let openat = format!("{} ", libc::SYS_openat);
        Ok(calls.any(|call| call.starts_with(&openat)))
    }
}

fn fifo(node: &Node, name: &str) -> Result<PathBuf> {
    let path = node.disk().join(name);
    mkfifo(&path, Mode::from_bits_truncate(0o600))
        .with_context(|| format!("make {}", path.display()))?;
    Ok(path)
}

/// `runtimeoptions.v1.Options` with a `config_path`.
fn generic_options(path: &Path) -> Result<Any> {
    let text = path.to_string_lossy();
    let value = [&[0x12, u8::try_from(text.len())?], text.as_bytes()].concat();
    Ok(Any {
        type_url: "runtimeoptions.v1.Options".to_owned(),
        value,
        ..Default::default()
    })
}
