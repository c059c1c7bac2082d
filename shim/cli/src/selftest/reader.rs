//! The processes that the scenes start from this program: a reader, on the host or in a container,
//! and a refresh that is killed.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use bindguard_guard::refresh::HelperProcess;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::scenes::{Pod, refresh};

/// The place of the file in a container.
pub(super) const PLACE: &str = "/etc/app/key";

/// Does the part of a started process, and prints its error for the scene.
pub(super) fn run(part: &str, arguments: &[String]) -> Result<()> {
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
    match done {
        Ok(seen) => println!("{seen}"),
        Err(error) => println!("{error:#}"),
    }
    Ok(())
}

fn refresh_when_told(pod: &Pod, init: &str) -> Result<u64> {
    let helper = HelperProcess::start().context("start the helper process")?;
    println!("ready");
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
    println!("ready");
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
pub(super) struct Part {
    pub child: Child,
    out: BufReader<ChildStdout>,
}

impl Part {
    /// Starts it, and waits until it is ready.
    pub(super) fn start(part: &str, arguments: &[&Path]) -> Result<Self> {
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

    pub(super) fn mounts(&self) -> Result<String> {
        Ok(fs::read_to_string(format!(
            "/proc/{}/mountinfo",
            self.child.id()
        ))?)
    }

    /// Sends a process its input.
    pub(super) fn tell(&mut self, input: &str) -> Result<()> {
        let mut stdin = self.child.stdin.take().context("no stdin")?;
        Ok(stdin.write_all(input.as_bytes())?)
    }

    /// Stops a reader that has to see this version last; returns its number of reads.
    pub(super) fn stop(mut self, version: u64) -> Result<u64> {
        self.tell(&version.to_string())?;
        let line = self.line()?;
        line.parse().ok().with_context(|| line)
    }
}
