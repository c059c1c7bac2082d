//! Daemons of this root file system: root's processes with the `/run` of this process.
//!
//! A mount namespace does not identify a node: a pod that works in the node's root has a separate
//! mount namespace. A container has a separate `/run`, and so has the root of an image.
//!
//! A process of a container can have any name. So `/run` is compared through the process's mount
//! table: a path walk could hang on a filesystem of the container. The command line is read with a
//! time limit.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{Device, MountTable};
use bindguard_core::process_stat::{PARENT, START_TIME, number};
use bindguard_operator::node::{pids_named, root_pids_named, uid_of};
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::process_files::{ProcessFile, arguments_of, contents, inodes, links};
use bindguard_sys::read_mount_table;
use serde::{Deserialize, Serialize};

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
    /// Its pid.
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

impl Daemon {
    /// Root's processes with this name and this `/run`, the oldest first.
    pub fn named(name: &str) -> Vec<Self> {
        let mut pids = root_pids_named(name);
        if pids.is_empty() {
            return Vec::new();
        }
        let own = read_mount_table()
            .ok()
            .and_then(|table| place_of(Path::new(RUN), &table));
        pids.retain(|pid| match &own {
            Some(own) => run_of_process(*pid).as_ref() == Some(own),
            // If this process cannot read its own `/run` mount, each daemon may have the same `/run`.
            None => namespace_of(*pid).is_ok(),
        });
        // between fork and exec a child still has the parent's name
        let is_child = |pid: &u32| parent_of(*pid).is_some_and(|parent| pids.contains(&parent));
        let mut found: Vec<Self> = pids
            .iter()
            .copied()
            .filter(|pid| !is_child(pid))
            .filter_map(Self::of)
            .filter(Self::is_no_command)
            .collect();
        found.sort_by_key(|daemon| (daemon.started, daemon.pid));
        found
    }

    /// False if this is a command of the daemon's program, such as `containerd config dump`, or has
    /// ended.
    fn is_no_command(&self) -> bool {
        let words = arguments_of(&[self.pid]).pop();
        // a later process of this pid may be a user's
        if !self.still_runs() {
            return false;
        }
        match words {
            // at the begin of an exec a process has its new name and no arguments yet
            Some(Ok(words)) => {
                !words.is_empty()
                    && !words[1..]
                        .iter()
                        .any(|word| COMMANDS.contains(&word.as_str()))
            }
            // it blocks its readers
            Some(Err(_)) | None => true,
        }
    }

    /// True if a process has this name and only root may read to which root it belongs.
    pub fn is_hidden(name: &str) -> bool {
        let mut pids = pids_named(name);
        pids.retain(|pid| uid_of(*pid) == Some(0));
        pids.into_iter().any(|pid| {
            namespace_of(pid).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
        })
    }

    /// The process with this pid, if the process exists.
    pub fn of(pid: u32) -> Option<Self> {
        let started = stat_field(pid, START_TIME)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .ok()?
            .trim_end()
            .to_owned();
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
        let words = arguments_of(&[self.pid]).into_iter().flatten().flatten();
        let words = words.collect();
        // a later process of this pid may be a user's
        if self.still_runs() { words } else { Vec::new() }
    }

    /// The `PATH` of its environment, which its shims and runtimes inherit.
    pub fn search_path(&self) -> Option<OsString> {
        let environment = contents(&[ProcessFile::of(self.pid, "environ")])
            .pop()?
            .ok()?;
        let mut variables = environment.split(|byte| *byte == 0);
        let path = variables.find_map(|variable| variable.strip_prefix(b"PATH="))?;
        Some(OsString::from_vec(path.to_vec()))
    }

    /// The file that `--config` or `-c` names.
    pub fn config(&self) -> Option<PathBuf> {
        option(&self.arguments(), &["config", "c"]).map(PathBuf::from)
    }

    /// The socket that `--address` or `-a` names.
    pub fn address(&self) -> Option<PathBuf> {
        option(&self.arguments(), &["address", "a"]).map(PathBuf::from)
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
    let paths = cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths
        .flat_map(|path| path.rsplit('/'))
        .find_map(|part| part.strip_suffix(".service"))
        .map(str::to_owned)
}

fn parent_of(pid: u32) -> Option<u32> {
    stat_field(pid, PARENT)?.try_into().ok()
}

/// A number of proc_pid_stat(5), by the field's number there.
fn stat_field(pid: u32, field: usize) -> Option<u64> {
    let stat = contents(&[ProcessFile::of(pid, "stat")]).pop()?.ok()?;
    number(&String::from_utf8_lossy(&stat), field)
}

/// The filesystem and the place in it that a path shows.
pub fn place_of(path: &Path, table: &MountTable) -> Option<(Device, PathBuf)> {
    let mount = table.mount_over(path)?;
    Some((mount.device, mount.place_in_filesystem(path)?))
}

/// The place of a process's `/run`. `None` if only root may inspect the process.
fn run_of_process(pid: u32) -> Option<(Device, PathBuf)> {
    namespace_of(pid).ok()?;
    place_of(Path::new(RUN), &HeldProcess::open(pid).ok()?.mounts().ok()?)
}

fn namespace_of(pid: u32) -> io::Result<u64> {
    inodes(&[ProcessFile::of(pid, "ns/mnt")])
        .pop()
        .unwrap_or_else(|| Err(ErrorKind::NotFound.into()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;
    use bindguard_testing::held_memory::{Holder, Unwritable, blocks_readers};

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
        assert_eq!((found[0].config(), found[0].address()), (None, None));
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
}
