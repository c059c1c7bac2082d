//! The runtimes that run now, and whether their active configuration names a program.
//!
//! A daemon uses the configuration files as of its start. So an edited file does not show whether a
//! program can be removed: the running daemon is queried. Without a running daemon, as in an image,
//! the files alone decide.
//!
//! | daemon | query |
//! |---|---|
//! | containerd | `Status` with `verbose` of the CRI: `containerd config dump` would read the files |
//! | dockerd | `GET /info` |
//! | CRI-O | `GET /config` on its own socket |
//!
//! Each runtime has its own keys for paths, and versions add more. So any value that is a path to the
//! program's file, or the `runtime_type` by which containerd finds the shim, names a program.
//!
//! A daemon is a process of root with the `/run` of this process. A mount namespace does not identify a
//! node: a pod that works in the node's root has a separate mount namespace. A container has a separate
//! `/run`, and so has the root of an image. A process of a container can have any name. So `/run` is
//! compared through the process's mount table: a path walk could hang on a filesystem of the container.
//! The command line is read with a time limit.

mod containers;

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use anyhow::{Context, Error, Result, bail};
use bindguard_core::handover::{AGENT, RUNTIME, SHIM, SHIM_RUNTIME_TYPE, WRAPPER};
use bindguard_core::identity::{PARENT, START_TIME, stat_number};
use bindguard_core::mount_table::{Device, MountTable};
use bindguard_operator::cri::{Cri, CriError, is_unimplemented, query};
use bindguard_operator::doctor::GuardedRuntimes;
use bindguard_operator::node::{pids_named, root_pids_named, uid_of};
use bindguard_operator::root_program::{PROGRAM_FOLDERS, RootProgram};
use bindguard_operator::unix_http;
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::process_files::{ProcessFile, arguments_of, contents, inodes, links};
use bindguard_sys::read_mount_table;
use rustix::fs::{Access, access};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::change::{Owner, identity, read_text};

pub use self::containers::{
    ProgramUser, docker_containers, docker_root, leave_own_sandbox, podman_containers,
    pods_with_handler, users_of,
};

/// The time in which a restarted runtime has to answer. k3s also starts the kubelet.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(120);
const HEALTH_POLL_INTERVAL: Duration = Duration::from_millis(500);
pub const CONTAINERD: &str = "containerd";
const DOCKER: &str = "dockerd";
const CRIO: &str = "crio";

/// The running daemon that reads the files of a runtime.
pub fn daemon_of(owner: Owner) -> Option<Daemon> {
    let daemons = match owner {
        Owner::Containerd => containerds(),
        Owner::Docker => Daemon::named(DOCKER),
        Owner::Crio => Daemon::named(CRIO),
        Owner::Agent => Daemon::named(AGENT),
        Owner::Podman | Owner::Bindguard => Vec::new(),
    };
    daemons.into_iter().next()
}

/// The containerds that serve pods. dockerd may start a containerd with a file below `docker/`,
/// which serves no pods.
pub fn containerds() -> Vec<Daemon> {
    let mut found = Daemon::named(CONTAINERD);
    found.retain(|daemon| {
        let config = daemon.config().unwrap_or_default();
        !config.to_string_lossy().contains("/docker/")
    });
    found
}

/// Waits until each containerd, or CRI-O, answers.
///
/// # Errors
/// If that does not happen within the time limit, or none of them runs.
pub fn wait_until_healthy() -> Result<()> {
    let start = Instant::now();
    while let Err(error) = check_health() {
        if start.elapsed() > HEALTHY_TIMEOUT {
            return Err(error.context("wait for the runtime after its restart"));
        }
        thread::sleep(HEALTH_POLL_INTERVAL);
    }
    Ok(())
}

fn check_health() -> Result<()> {
    let containerds = containerds();
    for containerd in &containerds {
        active_config(containerd)?;
    }
    match daemon_of(Owner::Crio) {
        Some(crio) => crio_config(&crio).map(drop),
        None if containerds.is_empty() => bail!("neither containerd nor CRI-O runs"),
        None => Ok(()),
    }
}

/// A running daemon whose active configuration names one of these programs, and that program.
///
/// # Errors
/// If a daemon runs and does not report its configuration.
pub fn daemon_that_names(programs: &[PathBuf]) -> Result<Option<(&'static str, &Path)>> {
    for (daemon, config) in active_configs() {
        let config = config?;
        if let Some(program) = programs.iter().find(|program| is_in(&config, program)) {
            return Ok(Some((daemon, program)));
        }
    }
    Ok(None)
}

/// The running daemons, and their runtimes that call the guard; an error for each daemon that does
/// not report its configuration.
pub fn guarded_runtimes() -> Vec<(&'static str, Result<GuardedRuntimes>)> {
    let mut found = Vec::new();
    for (daemon, config) in active_configs() {
        let runtimes = config.map(|config| match daemon {
            DOCKER => GuardedRuntimes::from_config(DOCKER, &config, "Runtimes", "DefaultRuntime"),
            CRIO => {
                let config = &config["crio"]["runtime"];
                GuardedRuntimes::from_config(CRIO, config, "runtimes", "default_runtime")
            }
            _ => GuardedRuntimes::of_containerd(&config),
        });
        found.push((daemon, runtimes));
    }
    found
}

/// True if the active configuration of containerd or CRI-O has the handler; `None` if none of them
/// runs and answers.
pub fn has_handler() -> Option<bool> {
    let mut found = None;
    for (name, daemon) in guarded_runtimes() {
        let daemon = daemon.ok()?;
        if name != DOCKER {
            let has_it = daemon.runtimes.iter().any(|name| name == RUNTIME);
            found = Some(has_it || found == Some(true));
        }
    }
    found
}

/// The active configuration of each running daemon. A containerd without CRI has none.
fn active_configs() -> Vec<(&'static str, Result<Value>)> {
    let mut configs = Vec::new();
    for (name, daemons) in [
        (CONTAINERD, containerds()),
        (DOCKER, Daemon::named(DOCKER)),
        (CRIO, Daemon::named(CRIO)),
    ] {
        for daemon in daemons {
            let config = match name {
                DOCKER => docker_info(&daemon).map(Some),
                CRIO => crio_config(&daemon).map(Some),
                _ => active_config(&daemon),
            };
            let doing = || {
                let pid = daemon.pid;
                format!("read the active configuration of {name}, process {pid}")
            };
            if let Some(config) = config.with_context(doing).transpose() {
                configs.push((name, config));
            }
        }
    }
    configs
}

/// The command after which the agent runs with its unit and its program of now.
pub const AGENT_RESTART: &str = "systemctl restart bindguard-agent";
/// The command with which dockerd reads its file again.
pub const DOCKER_RELOAD: &str = "systemctl reload docker";

/// True if the running daemon uses its file as it is now, without a restart: dockerd was reloaded.
/// After a removal the name may point at runc, which is not the guard.
pub fn is_reloaded(owner: Owner, command: &str) -> bool {
    if owner != Owner::Docker || command != DOCKER_RELOAD {
        return false;
    }
    let info = daemon_of(owner).and_then(|daemon| docker_info(&daemon).ok());
    let info = info.unwrap_or_default();
    let path = info["Runtimes"][RUNTIME]["path"].as_str();
    path.is_some_and(|path| Path::new(path).ends_with(WRAPPER))
}

fn crio_socket(crio: &Daemon) -> PathBuf {
    let named = crio.socket_option(&["listen"]);
    named.unwrap_or_else(|| "/run/crio/crio.sock".into())
}

fn crio_config(crio: &Daemon) -> Result<Value> {
    let text = unix_http::get(&crio_socket(crio), "/config")?;
    toml::from_str(&text).context("read CRI-O's answer as TOML")
}

fn docker_info(dockerd: &Daemon) -> Result<Value> {
    let socket = dockerd.socket_option(&["host", "H"]).unwrap_or_else(|| {
        let places = ["/run/docker.sock", "/var/run/docker.sock"].map(PathBuf::from);
        let is_there = |socket: &&PathBuf| socket.symlink_metadata().is_ok();
        places.iter().find(is_there).unwrap_or(&places[0]).clone()
    });
    let answer = unix_http::get(&socket, "/info")?;
    serde_json::from_str(&answer).context("read dockerd's answer as JSON")
}

/// True if a string in this configuration names the program.
fn is_in(config: &Value, program: &Path) -> bool {
    match config {
        Value::String(text) => is_named(text, program),
        Value::Array(items) => items.iter().any(|item| is_in(item, program)),
        Value::Object(members) => members.values().any(|member| is_in(member, program)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// True if a TOML or JSON file with this text names the program. A template is neither: there the
/// path counts wherever it is.
pub fn is_in_text(text: &str, program: &Path) -> bool {
    match toml::from_str(text).or_else(|_| serde_json::from_str(text)) {
        Ok(config) => is_in(&config, program),
        Err(_) => text.contains(&program.display().to_string()),
    }
}

fn is_named(text: &str, program: &Path) -> bool {
    if text == SHIM_RUNTIME_TYPE {
        return is_found_by_type(program, find(SHIM).as_deref());
    }
    let named = Path::new(text);
    named == program
        || named.is_absolute()
            && named.file_name() == program.file_name()
            && is_same_file(named, program)
}

/// True if containerd may find this program by the shim's type. containerd searches its own `PATH`;
/// where that search cannot be repeated, every installed shim counts as found.
fn is_found_by_type(program: &Path, found: Option<&Path>) -> bool {
    program.file_name().is_some_and(|name| name == SHIM)
        && found.is_none_or(|found| is_same_file(found, program))
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    identity(one).is_some_and(|found| identity(other) == Some(found))
}

/// The time that a containerd has to initialize its CRI plugin after a restart.
const START_LIMIT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// The configuration as of containerd's start. `None` if containerd has no CRI.
pub fn active_config(containerd: &Daemon) -> Result<Option<Value>> {
    let config = query_containerd(containerd, async |cri| cri.active_config().await)?;
    let config = config.map(|config| serde_json::from_str(&config));
    config
        .transpose()
        .context("read the answer's config as JSON")
}

/// The answer of containerd, which may start meanwhile. `None` if containerd has no CRI.
fn query_containerd<A>(
    containerd: &Daemon,
    calls: impl AsyncFn(Cri) -> Result<A, CriError>,
) -> Result<Option<A>> {
    let socket = socket_of(containerd);
    let start = Instant::now();
    loop {
        match query(&socket, &calls) {
            Err(error) if is_starting(&error) && start.elapsed() < START_LIMIT => {
                thread::sleep(PAUSE)
            }
            Err(error) if is_unimplemented(&error) => return Ok(None),
            answer => return answer.map(Some),
        }
    }
}

/// A restart takes the socket away for a moment.
fn is_starting(error: &Error) -> bool {
    let error = error.downcast_ref::<CriError>();
    error.is_some_and(|error| error.is_starting() || matches!(error, CriError::Connect(_)))
}

/// The socket from containerd's arguments, from its file, or the default socket.
pub fn socket_of(containerd: &Daemon) -> PathBuf {
    if let Some(address) = option(&containerd.arguments(), &["address", "a"]) {
        return address.into();
    }
    let config = containerd.config();
    let config = config.unwrap_or_else(|| "/etc/containerd/config.toml".into());
    let text = read_text(&config).ok().flatten().unwrap_or_default();
    address_in(&text).unwrap_or_else(|| "/run/containerd/containerd.sock".into())
}

/// The address in containerd's file: in the section of version 4, or of older versions.
fn address_in(text: &str) -> Option<PathBuf> {
    let file: Value = toml::from_str(text).ok()?;
    let server = &file["plugins"]["io.containerd.server.v1.grpc"];
    let section = if server.is_null() {
        &file["grpc"]
    } else {
        server
    };
    Some(PathBuf::from(section["address"].as_str()?))
}

const RUN: &str = "/run";
/// The verbs and flags with which the programs of containerd, Docker, CRI-O and the agent end soon.
const COMMANDS: [&str; 16] = [
    "-h",
    "--help",
    "help",
    "-v",
    "--version",
    "version",
    "--validate",
    "config",
    "publish",
    "oci-hook",
    "check",
    "status",
    "wipe",
    "complete",
    "man",
    "restart-slot",
];

/// A running process. Its pid alone could belong to a later one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Daemon {
    pub pid: u32,
    /// Clock ticks from the boot to its start: `starttime` in proc_pid_stat(5).
    started: u64,
    /// The id of that boot.
    boot: String,
}

/// False in a root without `/proc`: of an image.
pub fn sees_processes() -> bool {
    Path::new("/proc/1/stat").symlink_metadata().is_ok()
}

/// Why the state of a daemon is not known although no process of it is seen here. `is_installed`:
/// bindguard is installed for it.
pub fn unseen(owner: Owner, is_installed: bool) -> Option<String> {
    let name = match owner {
        Owner::Containerd => CONTAINERD,
        Owner::Docker => DOCKER,
        Owner::Crio => CRIO,
        Owner::Podman | Owner::Agent | Owner::Bindguard => return None,
    };
    if daemon_of(owner).is_some() {
        return None;
    }
    if is_hidden(name) {
        return Some(format!("{name} runs, and only root may read its arguments"));
    }
    is_installed.then(|| format!("{name} does not run, and bindguard is installed for it"))
}

/// True if a daemon of this name runs, and only root may read to which root it belongs.
fn is_hidden(name: &str) -> bool {
    let is_denied = |pid| namespace_of(pid).is_err_and(|error| error.kind() == PermissionDenied);
    let mut pids = pids_named(name).into_iter();
    pids.any(|pid| uid_of(pid) == Some(0) && is_denied(pid))
}

impl Daemon {
    /// Root's processes with this name and this `/run`, the oldest first.
    pub fn named(name: &str) -> Vec<Self> {
        let mut pids = root_pids_named(name);
        if pids.is_empty() {
            return Vec::new();
        }
        let table = read_mount_table().ok();
        let own = table.and_then(|table| place_of(Path::new(RUN), &table));
        pids.retain(|pid| match &own {
            Some(own) => run_of_process(*pid).as_ref() == Some(own),
            // If this process cannot read its own `/run` mount, each daemon may have the same `/run`.
            None => namespace_of(*pid).is_ok(),
        });
        let mut found = Vec::new();
        for pid in &pids {
            // between fork and exec a child still has the parent's name
            let parent = stat_field(*pid, PARENT).and_then(|parent| parent.try_into().ok());
            if parent.is_some_and(|parent| pids.contains(&parent)) {
                continue;
            }
            found.extend(Self::of(*pid).filter(Self::is_no_command));
        }
        found.sort_by_key(|daemon| (daemon.started, daemon.pid));
        found
    }

    /// False if this is a command of the daemon's program, such as `containerd config dump`, or has
    /// ended.
    fn is_no_command(&self) -> bool {
        match self.read_arguments() {
            None => false,
            // at the begin of an exec a process has its new name and no arguments yet
            Some(Ok(words)) => {
                let mut further = words.iter().skip(1);
                !words.is_empty() && !further.any(|word| COMMANDS.contains(&word.as_str()))
            }
            // it blocks its readers
            Some(Err(_)) => true,
        }
    }

    /// The arguments, with the name first; `None` if the daemon has ended.
    fn read_arguments(&self) -> Option<io::Result<Vec<String>>> {
        let words = arguments_of(&[self.pid]).pop()?;
        // a later process of this pid may be a user's
        self.still_runs().then_some(words)
    }

    /// The process with this pid, if the process exists.
    pub fn of(pid: u32) -> Option<Self> {
        let started = stat_field(pid, START_TIME)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let boot = boot.trim_end().to_owned();
        Some(Self { pid, started, boot })
    }

    /// True if it has not ended.
    pub fn still_runs(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }

    /// The path of the daemon's program, which a replaced program keeps. In this mount namespace the
    /// path may lead to another file.
    pub fn program(&self) -> Option<PathBuf> {
        let link = links(&[ProcessFile::of(self.pid, "exe")]).pop()?.ok()?;
        let path = link.to_str()?;
        let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
        path.is_absolute().then(|| path.to_owned())
    }

    /// The daemon's arguments, with its name first. Empty if the daemon cannot be read: then the
    /// default configuration counts.
    pub fn arguments(&self) -> Vec<String> {
        let words = self.read_arguments().and_then(Result::ok);
        words.unwrap_or_default()
    }

    /// The `PATH` of its environment, which its shims and runtimes inherit.
    pub fn search_path(&self) -> Option<OsString> {
        let environment = contents(&[ProcessFile::of(self.pid, "environ")]);
        let environment = environment.into_iter().next()?.ok()?;
        let mut variables = environment.split(|byte| *byte == 0);
        let path = variables.find_map(|variable| variable.strip_prefix(b"PATH="))?;
        Some(OsString::from_vec(path.to_vec()))
    }

    /// The file that `--config` or `-c` names.
    pub fn config(&self) -> Option<PathBuf> {
        option(&self.arguments(), &["config", "c"]).map(PathBuf::from)
    }

    /// The unix socket that an option names, as a path or as a URL.
    fn socket_option(&self, names: &[&str]) -> Option<PathBuf> {
        let value = option(&self.arguments(), names)?;
        let path = value.strip_prefix("unix://").unwrap_or(&value);
        path.starts_with('/').then(|| PathBuf::from(path))
    }

    /// The systemd service of the daemon: `/system.slice/containerd.service` in proc_pid_cgroup(5).
    pub fn service(&self) -> Option<String> {
        let text = fs::read_to_string(format!("/proc/{}/cgroup", self.pid)).ok()?;
        service_in(&text)
    }
}

/// The value of an option, in each form that Go's flag packages accept.
pub fn option(words: &[String], names: &[&str]) -> Option<String> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some(name) = word.strip_prefix('-') else {
            continue;
        };
        let name = name.strip_prefix('-').unwrap_or(name);
        match name.split_once('=') {
            Some((name, value)) if names.contains(&name) => return Some(value.to_owned()),
            None if names.contains(&name) => return words.next().cloned(),
            _ => {}
        }
    }
    None
}

fn service_in(cgroup: &str) -> Option<String> {
    let mut parts = cgroup.lines().flat_map(|line| line.rsplit('/'));
    let service = parts.find_map(|part| part.strip_suffix(".service"))?;
    Some(service.to_owned())
}

/// A number of proc_pid_stat(5), by the field's number there.
fn stat_field(pid: u32, field: usize) -> Option<u64> {
    let stat = contents(&[ProcessFile::of(pid, "stat")]).pop()?.ok()?;
    stat_number(&String::from_utf8_lossy(&stat), field)
}

/// The filesystem and the place in it that a path shows.
fn place_of(path: &Path, table: &MountTable) -> Option<(Device, PathBuf)> {
    let mount = table.mount_over(path)?;
    Some((mount.device, mount.place_in_filesystem(path)?))
}

/// The place of a process's `/run`. `None` if only root may inspect the process.
fn run_of_process(pid: u32) -> Option<(Device, PathBuf)> {
    namespace_of(pid).ok()?;
    place_of(Path::new(RUN), &HeldProcess::open(pid).ok()?.mounts().ok()?)
}

fn namespace_of(pid: u32) -> io::Result<u64> {
    let namespace = inodes(&[ProcessFile::of(pid, "ns/mnt")]).pop();
    namespace.unwrap_or_else(|| Err(NotFound.into()))
}

/// A program of root's on `PATH`, or in a default folder.
pub fn find(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let found = RootProgram::find(Path::new(name.as_ref()), None).ok()??;
    Some(found.path().to_owned())
}

/// The error of a default that is no runtime of its daemon.
pub fn not_configured<T>(runtime: &str) -> Result<T> {
    bail!("the runtime {runtime:?} is not configured")
}

/// The folders in which a daemon and its shims find programs.
#[derive(Debug, Clone)]
pub struct SearchPath {
    folders: Vec<PathBuf>,
    /// False if no daemon runs, or its environment is unreadable: a program that is not found may be
    /// in a folder that is not known.
    is_complete: bool,
}

impl SearchPath {
    /// The folders of the `PATH` of a daemon, or the default folders. `beside`: a program whose
    /// folder is searched, too, as containerd's.
    pub fn of(path: Option<OsString>, beside: Option<&Path>) -> Self {
        let is_complete = path.is_some();
        let path = path.or_else(|| env::var_os("PATH")).unwrap_or_default();
        let mut folders: Vec<PathBuf> = env::split_paths(&path).collect();
        if !is_complete {
            folders.extend(PROGRAM_FOLDERS.map(PathBuf::from));
        }
        folders.extend(beside.and_then(Path::parent).map(Path::to_owned));
        Self {
            folders,
            is_complete,
        }
    }

    /// The file of a runtime's program; `None` if it may be in a folder that is not known.
    ///
    /// # Errors
    /// If the program is missing or not executable. Other errors, such as those of a file system
    /// that does not answer, say nothing about the program.
    pub fn program_of(&self, runtime: &str, name: &str) -> Result<Option<PathBuf>> {
        let path = Path::new(name);
        let source = if path.is_absolute() {
            match runnable(path) {
                Ok(()) => return Ok(Some(path.to_owned())),
                Err(error) => error,
            }
        } else {
            if name.contains('/') {
                return Ok(None);
            }
            for folder in &self.folders {
                let program = folder.join(name);
                if runnable(&program).is_ok() {
                    return Ok(Some(program));
                }
            }
            if !self.is_complete {
                return Ok(None);
            }
            io::Error::new(NotFound, "it is not on the daemon's PATH")
        };
        if !is_definite(&source) {
            return Ok(None);
        }
        bail!("the program {name} of the runtime {runtime:?} cannot be run: {source}")
    }
}

/// True if this program is missing, or cannot be executed.
pub fn is_gone(program: &Path) -> bool {
    runnable(program).is_err_and(|error| is_definite(&error))
}

fn runnable(program: &Path) -> io::Result<()> {
    if !fs::metadata(program)?.is_file() {
        return Err(PermissionDenied.into());
    }
    // refused also on a file system that is mounted noexec
    Ok(access(program, Access::EXEC_OK)?)
}

fn is_definite(error: &io::Error) -> bool {
    matches!(error.kind(), NotFound | NotADirectory | PermissionDenied)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]
    use bindguard_operator::cri::SandboxFilter;

    use super::*;
    use bindguard_testing::held_memory::{Holder, Unwritable, blocks_readers};
    use serde_json::json;
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    #[test]
    fn a_path_another_path_to_it_and_the_type_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join(SHIM), folder.path().join("link"));
        fs::write(&real, "").unwrap();
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        let in_link = link.join(SHIM);
        for text in [real.to_str().unwrap(), in_link.to_str().unwrap()] {
            let config = json!({ "runtimes": [{ "x": { "runtimePath": text } }] });
            assert!(is_in(&config, &real), "{text}");
        }
        for text in [
            "/usr/bin/runc",
            "/elsewhere/containerd-shim-bindguard-v2",
            "containerd-shim-runc-v2",
            "",
        ] {
            assert!(!is_in(&json!([text]), &real), "{text}");
        }
        let other = folder.path().join("other");
        fs::write(&other, "").unwrap();
        assert!(is_found_by_type(&real, None) && is_found_by_type(&real, Some(&in_link)));
        assert!(!is_found_by_type(&real, Some(&other)), "another version");
        assert!(!is_found_by_type(
            Path::new("/usr/local/bin/bindguard-runtime"),
            None
        ));
    }

    /// A pod that removes bindguard restarts containerd, and then looks for its own sandbox.
    #[test]
    fn a_containerd_without_a_socket_may_start() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("containerd.sock");
        let called = || {
            query(&socket, async |cri| {
                cri.sandboxes(SandboxFilter::default()).await
            })
        };
        assert!(is_starting(&called().unwrap_err()));
        // As after a kill: the socket has no server.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        assert!(is_starting(&called().unwrap_err()));
    }

    #[test]
    fn the_address_is_found_in_every_version_of_the_file() {
        let old = "version = 3\n[grpc]\naddress = '/run/a.sock'\n";
        let new =
            "version = 4\n[plugins.'io.containerd.server.v1.grpc']\naddress = '/run/a.sock'\n";
        assert_eq!(
            [old, new].map(address_in),
            [(); 2].map(|()| Some(PathBuf::from("/run/a.sock")))
        );
        assert_eq!(address_in("version = 4\n"), None);
    }

    #[test]
    fn a_process_is_recognized_until_it_ends() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let daemon = Daemon::of(child.id()).unwrap();
        assert!(daemon.still_runs());
        assert!(
            !Daemon {
                started: daemon.started + 1,
                ..daemon.clone()
            }
            .still_runs(),
            "a later process of that pid"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!daemon.still_runs());
    }

    #[test]
    fn a_daemon_that_holds_its_memory_is_found_without_its_arguments() {
        // A part of the name of this program: the name of a daemon is in that of its program.
        let Some(holder) = Holder::start(c"bindguard_ins", || {}) else {
            return;
        };
        assert!(
            blocks_readers(holder.pid()),
            "the process does not hold its memory"
        );
        let mut found = Daemon::named("bindguard_ins");
        found.retain(|daemon| daemon.pid == holder.pid());
        let address = found[0].socket_option(&["address", "a"]);
        assert_eq!((found[0].config(), address), (None, None));
    }

    /// A container has a filesystem of its own at `/run`, whose daemon never answers.
    #[test]
    fn another_run_is_recognized_without_a_walk() {
        let Some(files) = Unwritable::mounted() else {
            return;
        };
        let run = files.file();
        let script = format!(
            "mount --bind {} /run 2>/dev/null || exit 1; echo there; read end",
            run.parent().unwrap().display()
        );
        let bin = tempfile::tempdir().unwrap();
        // cp is a separate process: a program that a child has open for writing cannot be run
        let copied = Command::new("cp")
            .arg("/bin/sh")
            .arg(bin.path().join("other-run"))
            .status();
        assert!(copied.unwrap().success());
        let mut other = Command::new("unshare");
        other
            .args(["--mount", "--propagation", "private"])
            .arg(bin.path().join("other-run"))
            .args(["-c", &script]);
        let mut other = other
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(other.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        assert_eq!(said, "there\n");
        files.stop_answering();
        assert!(Daemon::named("other-run").is_empty());
        assert!(root_pids_named("other-run").contains(&other.id()));
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn options_of_both_forms_are_read() {
        let of = |line: &str, names: &[&str]| {
            option(
                &line.split(' ').map(str::to_owned).collect::<Vec<_>>(),
                names,
            )
        };
        for line in [
            "containerd -c /x",
            "containerd --config /x",
            "containerd --config=/x -a /y",
            "containerd -config=/x",
        ] {
            assert_eq!(of(line, &["config", "c"]).as_deref(), Some("/x"), "{line}");
        }
        assert_eq!(
            of("containerd --config=/x -a /y", &["address", "a"]).as_deref(),
            Some("/y")
        );
        assert_eq!(of("containerd config", &["config", "c"]), None);
    }

    #[test]
    fn the_service_is_in_the_cgroups_path() {
        assert_eq!(
            service_in("0::/system.slice/k3s.service\n").as_deref(),
            Some("k3s")
        );
        assert_eq!(
            service_in("1:name=systemd:/system.slice/containerd.service\n0::/\n").as_deref(),
            Some("containerd")
        );
        assert_eq!(service_in("0::/user.slice\n"), None);
    }

    #[test]
    fn only_a_known_path_shows_that_a_program_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("crun");
        let path = |is_complete| SearchPath {
            folders: vec![folder.path().to_owned()],
            is_complete,
        };
        let found = |path: SearchPath, name: &str| path.program_of("x", name);
        assert_eq!(found(path(false), "crun").unwrap(), None);
        assert!(found(path(true), "crun").is_err());
        let absolute = program.to_str().unwrap();
        assert!(found(path(false), absolute).is_err());
        fs::write(&program, "").unwrap();
        assert!(found(path(false), absolute).is_err(), "not executable");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["crun", absolute] {
            assert_eq!(found(path(true), name).unwrap(), Some(program.clone()));
        }
        assert!(found(path(true), folder.path().to_str().unwrap()).is_err());
    }
}
