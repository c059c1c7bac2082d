//! Engines that are not containerd: Podman and Docker, as Debian packages them, on a bare node.
//!
//! The files, images and cgroups of each engine are inside of the node, so that the node's keeper
//! removes them. The programs come from `integration/engines/fetch.sh`.

mod engine;

pub use self::engine::ContainerEngine;

use std::cell::RefCell;
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::image;
use crate::mount_calls::bind;
use crate::node::Node;
use crate::process::{Finished, run};
use crate::waiting::until;

/// Why there are no engines here, if so.
pub fn missing() -> Option<String> {
    let there = folder().join("podman").is_file();
    (!there).then(|| {
        format!(
            "no engines in {}: run integration/engines/fetch.sh",
            folder().display()
        )
    })
}

/// A program that `fetch.sh` laid out.
pub fn program(name: &str) -> PathBuf {
    folder().join(name)
}

/// Podman on a node. There is no daemon: conmon stays with each container.
#[derive(Debug)]
pub struct Podman<'n> {
    node: &'n Node,
    rootfs: PathBuf,
}

impl<'n> Podman<'n> {
    /// Writes its files: roots inside of the node, and cgroups without systemd.
    pub fn on(node: &'n Node) -> Result<Self> {
        let (disk, rootfs) = (node.disk().display(), node.disk().join("podman-rootfs"));
        let conmon = program("conmon");
        write(
            "/etc/containers/containers.conf",
            &format!(
                "[engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nconmon_path = [{conmon:?}]\ntmp_dir = \"/run/libpod\"\n\
                 [engine.runtimes]\nrunc = [{:?}]\ncrun = [{:?}]\n",
                node.programs().join("runc"),
                node.programs().join("crun"),
            ),
        )?;
        write(
            "/etc/containers/storage.conf",
            &format!(
                "[storage]\ndriver = \"vfs\"\nrunroot = \"/run/containers\"\ngraphroot = \"{disk}/podman\"\n"
            ),
        )?;
        image::lay_out(&rootfs)?;
        // crun makes the mount that a root filesystem lies on private, and then no bind of that
        // mount can be a slave
        bind(&rootfs, &rootfs)?;
        Ok(Self { node, rootfs })
    }

    /// Runs a container of busybox to its end. `flags` come before the name of the image, `global`
    /// before `run`.
    pub fn run(&self, global: &[&str], flags: &[&str], words: &[&str]) -> Result<Finished> {
        run(self.run_command(global, &[&["--rm"], flags].concat(), words)?)
    }

    /// Starts its API on its usual socket, as `podman.socket` does.
    pub fn serve(&self) -> Result<Child> {
        fs::create_dir_all("/run/podman")?;
        let mut command = self.node.command(program("podman"))?;
        command.args([
            "system",
            "service",
            "--time",
            "0",
            "unix:///run/podman/podman.sock",
        ]);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start podman's API")?;
        until("podman's API has a socket", || {
            Ok(Path::new("/run/podman/podman.sock").exists())
        })?;
        Ok(child)
    }

    fn run_command(&self, global: &[&str], flags: &[&str], words: &[&str]) -> Result<Command> {
        let mut command = self.node.command(program("podman"))?;
        let group = format!("/{}", self.node.name());
        command
            .args(global)
            .args(["run", "--network", "host", "--cgroup-parent", &group]);
        // its defaults are above the limits of a process in a sandbox
        command.args([
            "--ulimit",
            "nofile=1024:1024",
            "--ulimit",
            "nproc=1000:1000",
        ]);
        command
            .args(flags)
            .arg("--rootfs")
            .arg(&self.rootfs)
            .args(words);
        Ok(command)
    }
}

impl ContainerEngine for Podman<'_> {
    fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.node.command(program("podman"))?;
        command.args(words);
        Ok(command)
    }

    fn start_command(&self, flags: &[&str], words: &[&str]) -> Result<Command> {
        self.run_command(&[], &[&["--detach"], flags].concat(), words)
    }

    /// Podman gives the first process ten seconds to end, also with `--force`.
    fn remove(&self, id: &str) -> Result<()> {
        let removed = self.verb(&["rm", "--force", "--time", "0", id])?;
        removed.success().map(drop)
    }
}

/// The way in which dockerd keeps images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A copy of each layer, on every filesystem.
    Vfs,
    /// overlayfs, for large images.
    Overlay,
}

/// A dockerd on a node, beside its containerd.
#[derive(Debug)]
pub struct Docker<'n> {
    node: &'n Node,
    storage: Storage,
    daemon: RefCell<Child>,
}

const IMAGE: &str = "busybox";
const SOCKET: &str = "unix:///run/docker.sock";

impl<'n> Docker<'n> {
    /// Starts it with the node's daemon.json, and gives it an image.
    pub fn start(node: &'n Node) -> Result<Self> {
        Self::start_with(node, Storage::Vfs)
    }

    /// As `start`, with this storage of images.
    pub fn start_with(node: &'n Node, storage: Storage) -> Result<Self> {
        let docker = Self {
            node,
            storage,
            daemon: RefCell::new(spawn(node, storage)?),
        };
        docker.wait_until_it_answers()?;
        let layer = node.disk().join("layer.tar");
        image::write_layer(&layer)?;
        run(docker.command(&["import", &layer.display().to_string(), IMAGE])?)?.success()?;
        Ok(docker)
    }

    /// Ends it and starts it again, as `systemctl restart docker` does.
    pub fn restart(&self) -> Result<()> {
        let pid = Pid::from_raw(self.daemon.borrow().id().try_into()?);
        kill(pid, Signal::SIGTERM).context("end dockerd")?;
        self.daemon
            .borrow_mut()
            .wait()
            .context("wait for dockerd")?;
        *self.daemon.borrow_mut() = spawn(self.node, self.storage)?;
        self.wait_until_it_answers()
    }

    /// Its address, for `DOCKER_HOST`.
    pub const HOST: &'static str = SOCKET;

    /// Runs a container of busybox to its end.
    pub fn run(&self, flags: &[&str], words: &[&str]) -> Result<Finished> {
        self.run_image(IMAGE, flags, words)
    }

    /// Runs a container of this image to its end.
    pub fn run_image(&self, image: &str, flags: &[&str], words: &[&str]) -> Result<Finished> {
        run(self.command(
            &[
                &["run", "--rm", "--network", "host"],
                flags,
                &[image],
                words,
            ]
            .concat(),
        )?)
    }

    /// Has it read daemon.json again, as `systemctl reload docker` does.
    pub fn reload(&self) -> Result<()> {
        let before = self.log()?.matches("Reloaded configuration").count();
        let pid = fs::read_to_string("/run/docker.pid").context("read dockerd's pid")?;
        kill(Pid::from_raw(pid.trim().parse()?), Signal::SIGHUP)?;
        let has_reloaded = || Ok(self.log()?.matches("Reloaded configuration").count() > before);
        until("dockerd has reloaded its file", has_reloaded)
            .with_context(|| self.log().unwrap_or_default())
    }

    fn wait_until_it_answers(&self) -> Result<()> {
        let answers = || Ok(run(self.command(&["version"])?)?.status.success());
        until("dockerd answers", answers).with_context(|| self.log().unwrap_or_default())
    }

    fn log(&self) -> Result<String> {
        fs::read_to_string(self.node.disk().join("dockerd.log")).context("read dockerd's log")
    }
}

impl ContainerEngine for Docker<'_> {
    fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.node.command(program("docker"))?;
        command.args(["--host", SOCKET]).args(words);
        Ok(command)
    }

    fn start_command(&self, flags: &[&str], words: &[&str]) -> Result<Command> {
        self.command(
            &[
                &["run", "--detach", "--network", "host"],
                flags,
                &[IMAGE],
                words,
            ]
            .concat(),
        )
    }
}

impl Drop for Docker<'_> {
    fn drop(&mut self) {
        let mut daemon = self.daemon.borrow_mut();
        let _ = daemon.kill();
        let _ = daemon.wait();
    }
}

fn spawn(node: &Node, storage: Storage) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(node.disk().join("dockerd.log"));
    let log = log.context("create dockerd's log")?;
    let mut command = node.command(program("dockerd"))?;
    command
        .arg("--data-root")
        .arg(node.disk().join("docker"))
        .args(["--exec-root", "/run/docker", "--host", SOCKET]);
    let driver = match storage {
        Storage::Vfs => "vfs",
        Storage::Overlay => "overlay2",
    };
    command.args([
        "--storage-driver",
        driver,
        "--bridge",
        "none",
        "--iptables=false",
        "--ip6tables=false",
    ]);
    command.args([
        "--cgroup-parent",
        node.name(),
        "--pidfile",
        "/run/docker.pid",
    ]);
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    command.spawn().context("start dockerd")
}

fn folder() -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/engines");
    env::var_os("BINDGUARD_ENGINES")
        .map_or_else(beside, PathBuf::from)
        .join("bin")
}

/// Writes a file below `/etc`, and the folders above it.
pub(crate) fn write(path: &str, text: &str) -> Result<()> {
    let path = Path::new(path);
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(path, text))
        .with_context(|| format!("write {}", path.display()))
}
