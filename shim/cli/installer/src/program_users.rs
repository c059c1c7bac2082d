//! The users of a program: containers that were created through the program, and processes that run
//! or name it.
//!
//! A program is removed only when it has no users: a container that was created through bindguard's
//! shim, or through bindguard-runtime, is also killed and deleted through it.
//!
//! Processes of containers are checked, too. A container can block reads of its root directory and
//! of its command line. So no file below a root directory is read. Only the command line of a
//! conmon is read, with a time limit.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process;

use bindguard_core::mount_table::MountTable;
use bindguard_core::program_names::{CLI, SHIM};
use bindguard_operator::bundles::tasks;
use bindguard_operator::node::{pids, pids_named, uid_of};
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::process_files::{ProcessFile, arguments_of, links};
use bindguard_sys::read_mount_table;

use crate::change::read;
use crate::running::{option, place_of};

/// The supervisor of Podman and CRI-O. A conmon's arguments contain its runtime's path.
const CONMON: &str = "conmon";

/// A user of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgramUser {
    /// A container, by its bundle.
    Container(PathBuf),
    /// A process, and the id of the sandbox or container that its arguments name.
    Process(u32, Option<String>),
}

impl ProgramUser {
    /// The id of the container, or of the pod's sandbox.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Container(bundle) => bundle.file_name()?.to_str(),
            Self::Process(_, id) => id.as_deref(),
        }
    }
}

impl fmt::Display for ProgramUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Container(bundle) => write!(f, "the container of {}", bundle.display()),
            Self::Process(pid, _) => match uid_of(*pid) {
                Some(0) | None => write!(f, "process {pid}"),
                Some(user) => write!(f, "process {pid} of user {user}"),
            },
        }
    }
}

/// The users of these programs; empty if there are none.
pub fn users_of(programs: &[PathBuf]) -> Vec<ProgramUser> {
    // no container needs the command line
    let programs = programs.iter().filter(|program| !program.ends_with(CLI));
    // /proc/PID/exe has no links, arguments may have links
    let resolved = programs.clone().map(|program| resolved(program));
    let names: Vec<PathBuf> = programs.cloned().chain(resolved).collect();
    let is_named = |bytes: &[u8]| {
        names
            .iter()
            .any(|name| name.as_os_str().as_bytes() == bytes)
    };
    // containerd's shim records its runtime's path in the bundle, and calls it until the container
    // is deleted
    let is_user = |bundle: &PathBuf| {
        read(&bundle.join("runtime")).is_ok_and(|it| it.is_some_and(|it| is_named(&it)))
    };
    let containers = tasks(Path::new("/"))
        .filter(is_user)
        .map(ProgramUser::Container);
    let found = processes_that_name(&names);
    let ids = arguments_of(&found)
        .into_iter()
        .map(|words| option(&words.ok()?, &["id", "c", "cid"]));
    let processes = found
        .iter()
        .zip(ids)
        .map(|(pid, id)| ProgramUser::Process(*pid, id));
    containers.chain(processes).collect()
}

#[expect(
    clippy::disallowed_methods,
    reason = "a program, not the source of a container's bind"
)]
fn resolved(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// The processes that run one of these programs, or are a conmon with its path as an argument. A
/// user may run any program; only a shim or a conmon of a user can supervise a rootless container.
fn processes_that_name(names: &[PathBuf]) -> Vec<u32> {
    let table = read_mount_table().ok();
    let is_user = |pid: u32, named: &dyn Fn(&[u8]) -> bool| {
        names
            .iter()
            .filter(|name| named(name.as_os_str().as_bytes()))
            .any(|name| has_this_program(pid, name, table.as_ref()))
    };
    let others = |pids: Vec<u32>| {
        pids.into_iter()
            .filter(|pid| *pid != process::id())
            .collect()
    };
    let pids: Vec<u32> = others(pids());
    let programs: Vec<_> = pids
        .iter()
        .map(|pid| ProcessFile::of(*pid, "exe"))
        .collect();
    let mut found: Vec<u32> = pids
        .into_iter()
        .zip(links(&programs))
        .filter(|(pid, program)| {
            let program = program
                .as_ref()
                .map_or(&b""[..], |it| it.as_os_str().as_bytes());
            // The kernel marks the link of a process whose program an upgrade replaced.
            let program = program.strip_suffix(b" (deleted)").unwrap_or(program);
            is_user(*pid, &|name| {
                name == program && (name.ends_with(SHIM.as_bytes()) || uid_of(*pid) == Some(0))
            })
        })
        .map(|(pid, _)| pid)
        .collect();
    let mut conmons: Vec<u32> = others(pids_named(CONMON));
    conmons.retain(|pid| !found.contains(pid));
    let words = arguments_of(&conmons);
    let users = conmons.into_iter().zip(words).filter(|(pid, words)| {
        // a process that does not answer may name each program
        is_user(*pid, &|name| {
            words.as_ref().map_or(true, |words| {
                words.iter().any(|word| word.as_bytes() == name)
            })
        })
    });
    found.extend(users.map(|(pid, _)| pid));
    found
}

/// A container's mount namespace may have a different program at `path`. The mount tables show
/// whether both paths are the same place of the same filesystem. If a table is unreadable, a living
/// process counts as a user.
fn has_this_program(pid: u32, path: &Path, own: Option<&MountTable>) -> bool {
    let Ok(process) = HeldProcess::open(pid) else {
        return false;
    };
    let theirs = process.mounts().ok();
    let place = |table: Option<&MountTable>| place_of(path, table?);
    match (place(own), place(theirs.as_ref())) {
        (Some(own), Some(theirs)) => own == theirs,
        (_, None) => process.is_alive(),
        (None, Some(_)) => true,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;
    use bindguard_testing::held_memory::{Holder, blocks_readers};

    /// A conmon that prints a line when it runs, and stays until its stdin ends.
    fn with_argument(before: &str, program: &Path) -> Option<Child> {
        let script = format!("{before} echo there && read end");
        let bin = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/bin/sh", bin.path().join(CONMON)).unwrap();
        let mut command = Command::new("unshare");
        command
            .arg("--mount")
            .arg(bin.path().join(CONMON))
            .args(["-c", &script, "sh"])
            .arg(program);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        if said.is_empty() {
            child.wait().unwrap();
            return None;
        }
        Some(child)
    }

    fn needed_beside(before: &str, program: &Path) -> Option<bool> {
        let mut child = with_argument(before, program)?;
        let needed = !users_of(&[program.to_owned()]).is_empty();
        drop(child.stdin.take());
        child.wait().unwrap();
        Some(needed)
    }

    #[test]
    fn a_program_of_that_name_in_another_mount_namespace_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("bindguard-runtime");
        fs::write(&program, "").unwrap();
        let Some(same) = needed_beside("", &program) else {
            eprintln!("SKIPPED: no mount namespace of its own: this needs CAP_SYS_ADMIN");
            return;
        };
        assert!(same);
        let cover = format!("mount -t tmpfs cover {} &&", folder.path().display());
        assert_eq!(
            needed_beside(&cover, &program),
            Some(false),
            "nothing is there"
        );
        let another = format!("{cover} touch {} &&", program.display());
        assert_eq!(
            needed_beside(&another, &program),
            Some(false),
            "another one is there"
        );
    }

    /// Its owner keeps it: the program stays, and the command ends.
    #[test]
    fn a_conmon_that_holds_its_memory_keeps_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("bindguard-runtime");
        fs::write(&program, "").unwrap();
        let Some(holder) = Holder::start(c"conmon", || {}) else {
            return;
        };
        assert!(
            blocks_readers(holder.pid()),
            "the process does not hold its memory"
        );
        assert!(is_user(&program, &holder));
    }

    fn is_user(program: &Path, holder: &Holder) -> bool {
        let users = users_of(&[program.to_owned()]);
        users.contains(&ProgramUser::Process(holder.pid(), None))
    }

    #[test]
    fn a_process_that_holds_its_memory_is_no_user() {
        let Some(holder) = Holder::start(c"app", || {}) else {
            return;
        };
        assert!(
            blocks_readers(holder.pid()),
            "the process does not hold its memory"
        );
        assert!(!is_user(Path::new("/no/such/program"), &holder));
    }
}
