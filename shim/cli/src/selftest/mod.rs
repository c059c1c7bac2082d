//! `bindguard selftest`: whether this node's kernel and OCI runtimes do what bindguard relies on.
//!
//! The scenes run in a child with a pid namespace and a mount namespace of its own, on a tmpfs. The
//! kernel kills the child with its parent, and everything in both namespaces with the child: no
//! mount, process or file is left on the node, also if the self-test is killed.

mod scenes;

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf, absolute};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use bindguard_guard::refresh::HelperProcess;
use bindguard_operator::doctor::PointStatus;
use bindguard_operator::node::is_root;
use bindguard_operator::root_program::status_within;
use clap::Args;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::selftest::scenes::{Pod, refresh};
use crate::{doctor, show};

/// A time limit against a kernel that hangs. All scenes take about a second, in an emulated machine a minute.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Arguments of `selftest`.
#[derive(Debug, Args)]
pub struct Selftest {
    /// Check this OCI runtime, beside the runc and crun on PATH.
    #[arg(long, value_name = "FILE")]
    runtime: Vec<PathBuf>,
    /// Print the points as JSON, for a bug report.
    #[arg(long)]
    json: bool,
    /// The part of a process that the self-test starts.
    #[arg(hide = true, trailing_var_arg = true)]
    part: Vec<String>,
}

impl Selftest {
    /// Runs it.
    pub fn run(self) -> Result<ExitCode> {
        match self.part.first().map(String::as_str) {
            None => self.run_scenes(),
            Some("scenes") => {
                let report = scenes::run(&self.runtime)?;
                show::print_report(&report, self.json, doctor::text)?;
                let [is_unknown, has_failed] =
                    [PointStatus::Unknown, PointStatus::Failed].map(|status| report.has(status));
                Ok(show::code(is_unknown && !has_failed, has_failed))
            }
            Some(part) => run(part, &self.part[1..]).map(|()| ExitCode::SUCCESS),
        }
    }

    fn run_scenes(&self) -> Result<ExitCode> {
        ensure!(is_root(), "run the self-test: this needs root");
        let mut command = Command::new("/proc/self/exe");
        command.arg("selftest").args(self.json.then_some("--json"));
        for runtime in &self.runtime {
            let path = absolute(runtime)?;
            let found = path.symlink_metadata();
            found.with_context(|| format!("run {}", path.display()))?;
            command.arg("--runtime").arg(path);
        }
        command.arg("scenes");
        // The child is the first process of the pid namespace.
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID)
            .context("create namespaces for the self-test")?;
        let status = status_within(TIMEOUT, command).context("run the scenes")?;
        let code = status
            .code()
            .with_context(|| format!("the scenes ended: {status}"))?;
        Ok(ExitCode::from(u8::try_from(code)?))
    }
}

// The processes that the scenes start from this program: a reader, on the host or in a container,
// and a refresh that is killed.

/// The place of the file in a container.
const PLACE: &str = "/etc/app/key";

/// Does the part of a started process, and prints its error for the scene.
fn run(part: &str, arguments: &[String]) -> Result<()> {
    let Some(pod) = arguments.first().map(|folder| Pod::at(folder)) else {
        // The program of a container of a real runtime.
        print!("{}", fs::read_to_string(PLACE)?);
        return Ok(());
    };
    let done = match arguments.get(1) {
        Some(init) => refresh_when_told(&pod, init),
        None if part == "host" => read(&pod.subpath()),
        None => enter_container(&pod, part == "own-users").and_then(|()| {
            let seen = read(Path::new(PLACE))?;
            let opened = OpenOptions::new().write(true).open(PLACE);
            ensure!(opened.is_err(), "the read-only bind became writable");
            Ok(seen)
        }),
    };
    let line = match done {
        Ok(seen) => seen.to_string(),
        Err(error) => format!("{error:#}"),
    };
    // a scene that failed reads no more
    let _ = writeln!(io::stdout(), "{line}");
    Ok(())
}

fn refresh_when_told(pod: &Pod, init: &str) -> Result<u64> {
    let helper = HelperProcess::start().context("start the helper process")?;
    writeln!(io::stdout(), "ready")?;
    io::stdin().read_exact(&mut [0])?;
    refresh(&helper, pod, init.parse()?, None)?;
    Ok(1)
}

/// Enters a mount namespace as a runtime makes one, with a read-only bind of the pod's subPath.
fn enter_container(pod: &Pod, has_own_users: bool) -> Result<()> {
    if has_own_users {
        unshare(CloneFlags::CLONE_NEWUSER)?;
        // user_namespaces(7): a process may map its own ids.
        for (file, text) in [
            ("setgroups", "deny"),
            ("uid_map", "0 0 1"),
            ("gid_map", "0 0 1"),
        ] {
            fs::write(format!("/proc/self/{file}"), text)?;
        }
    }
    unshare(CloneFlags::CLONE_NEWNS)?;
    let (none, bind) = (None::<&str>, MsFlags::MS_BIND);
    let change = |place: &Path, flags| mount(none, place, none, flags, none);
    change(Path::new("/"), MsFlags::MS_SLAVE | MsFlags::MS_REC)?;
    let root = pod.root();
    let place = root.join(&PLACE[1..]);
    mount(Some(&root), &root, none, bind, none)?;
    mount(Some(&pod.shared()), &root.join("host"), none, bind, none)?;
    mount(Some(&pod.subpath()), &place, none, bind, none)?;
    change(&place, bind | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY)?;
    change(&place, MsFlags::MS_PRIVATE)?;
    chdir(&root)?;
    pivot_root(".", "old")?;
    umount2("/old", MntFlags::MNT_DETACH)?;
    Ok(chdir("/")?)
}

/// Reads the file until stdin has the number of the last version, and returns the number of reads.
/// Fails unless no read failed, none saw an older version again, and the last saw the last version.
fn read(file: &Path) -> Result<u64> {
    writeln!(io::stdout(), "ready")?;
    let (mut reads, mut last) = (0, 0);
    let (stdin, now) = (io::stdin(), Timespec::default());
    let mut is_end = false;
    while !is_end {
        is_end = poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&now))? > 0;
        let text = fs::read_to_string(file).with_context(|| format!("after {reads} reads"))?;
        let version = text.parse::<u64>().context("read a truncated file")?;
        ensure!(version >= last, "a read saw version {version} after {last}");
        last = version;
        reads += 1;
    }
    let expected = io::read_to_string(stdin)?;
    ensure!(
        expected == last.to_string(),
        "the last read saw version {last}, not {expected}"
    );
    Ok(reads)
}

/// A process of the self-test.
struct Part {
    pub child: Child,
    out: BufReader<ChildStdout>,
}

impl Part {
    /// Starts it, and waits until it is ready.
    fn start(part: &str, arguments: &[&Path]) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["selftest", part]).args(arguments);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut started = Self { child, out };
        let line = started.line()?;
        ensure!(line == "ready", "{line}");
        Ok(started)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.out.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    fn mounts(&self) -> Result<String> {
        Ok(fs::read_to_string(format!(
            "/proc/{}/mountinfo",
            self.child.id()
        ))?)
    }

    /// Sends a process its input.
    fn tell(&mut self, input: &str) -> Result<()> {
        let mut stdin = self.child.stdin.take().context("no stdin")?;
        Ok(stdin.write_all(input.as_bytes())?)
    }

    /// Stops a reader that has to see this version last; returns its number of reads.
    fn stop(mut self, version: u64) -> Result<u64> {
        self.tell(&version.to_string())?;
        let line = self.line()?;
        line.parse().ok().with_context(|| line)
    }
}
