//! Issue 14: a file that a create or an exec needs does not answer. That call waits; the other
//! containers of the same shim answer, start and end. A fifo without a process at its other end
//! hangs like a file on a dead server.

use bindguard_integration::prelude::*;
use std::fs::{File, OpenOptions};

use bindguard_integration::shim::{Bundle, Client, Shim, options_any};
use bindguard_integration::{SilentServer, privilege};
use containerd_shim_protos::api::{ExecProcessRequest, KillRequest, StateRequest};
use containerd_shim_protos::shim::oci::Options;
use nix::libc;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use protobuf::well_known_types::any::Any;

/// Far more than an answer takes on a busy machine, and the shim is not to hang for good.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(|node| {
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
    scene.runtime().context("the runtime")?;
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

    fn runtime(&self) -> Result<()> {
        if !SilentServer::is_possible() {
            privilege::skipped("no /dev/fuse");
            return Ok(());
        }
        let bundle = Bundle::create(self.node, "served", &["true"])?;
        let mut server = SilentServer::mounted(&self.node.disk().join("silent"))?;
        let options = Options {
            binary_name: server.path().join("runc").display().to_string(),
            ..Default::default()
        };
        let mut request = bundle.request();
        request.options = Some(options_any(&options)?).into();
        self.while_it_hangs_in(
            libc::SYS_statx,
            |client| {
                let answer = client.create(&request);
                ensure!(answer.is_err(), "it was created without a runtime");
                Ok(())
            },
            || server.die(),
        )
    }

    /// Makes a call that hangs, expects the others to go on, ends what it hangs on, and expects it
    /// to succeed then.
    fn while_it_hangs(
        &self,
        call: impl FnOnce(&Client) -> ttrpc::Result<()> + Send,
        end: impl FnOnce(),
    ) -> Result<()> {
        self.while_it_hangs_in(libc::SYS_openat, |client| Ok(call(client)?), end)
    }

    fn while_it_hangs_in(
        &self,
        syscall: libc::c_long,
        call: impl FnOnce(&Client) -> Result<()> + Send,
        end: impl FnOnce(),
    ) -> Result<()> {
        thread::scope(|scope| {
            let shim = &self.shim;
            let hanging = scope.spawn(move || call(&shim.connect()?).context("the call that hung"));
            let others = self.others_go_on(syscall);
            end();
            hanging
                .join()
                .map_err(|_| anyhow!("the client panicked"))??;
            others
        })
    }

    fn others_go_on(&self, syscall: libc::c_long) -> Result<()> {
        until("a call hangs", || self.hangs_in(syscall))?;
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
        ensure!(self.hangs_in(syscall)?, "nothing hung");
        Ok(())
    }

    /// True if a thread of the shim waits in this syscall, see proc_pid_syscall(5).
    fn hangs_in(&self, syscall: libc::c_long) -> Result<bool> {
        let threads =
            fs::read_dir(format!("/proc/{}/task", self.pid)).context("list the shim's threads")?;
        let mut calls = threads
            .flatten()
            .filter_map(|thread| fs::read_to_string(thread.path().join("syscall")).ok());
        let number = format!("{syscall} ");
        Ok(calls.any(|call| call.starts_with(&number)))
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
