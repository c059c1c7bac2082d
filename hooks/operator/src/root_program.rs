//! Programs and files that root alone can change.
//!
//! A command of root's runs programs that it finds by a running process, by `PATH` or by a file.
//! Another user of the node chooses such names, too. So a program is run only if the program and
//! every folder above it, those of symlinks included, belong to root and no other user can write
//! them. The sticky bit of `/tmp` is not enough: a folder of root's there can be removed, and its
//! name is free then.

use std::env;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use bindguard_core::refresh::Found;
use bindguard_sys::{HostWalk, read_file, walk_host_path};
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, fstat, memfd_create};
use rustix::process::{Pid, Signal, geteuid, kill_process_group};

/// The default folders in which services find programs; also systemd's own default.
pub const PROGRAM_FOLDERS: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// The time limit for a query of a program.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval between two looks for the end of a program.
const POLL: Duration = Duration::from_millis(5);

const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A program that root alone can change, as an open file.
#[derive(Debug)]
pub struct RootProgram {
    path: PathBuf,
    file: OwnedFd,
    is_script: bool,
}

impl RootProgram {
    /// Opens a program; `None` if no file has this path.
    ///
    /// # Errors
    /// If another user than root can change what the path leads to. For another caller than root,
    /// the caller's own programs count as well.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let path = std::path::absolute(path)?;
        let opened = open_of_root(&path).with_context(|| format!("run {}", path.display()))?;
        let Some(file) = opened else { return Ok(None) };
        let mut start = [0; 2];
        let is_script = File::open(&path)
            .and_then(|mut file| file.read_exact(&mut start))
            .is_ok_and(|()| start == *b"#!");
        Ok(Some(Self {
            path,
            file,
            is_script,
        }))
    }

    /// The first program with this name in the folder `first`, on `PATH`, or in a default folder.
    /// An absolute name leads to that program alone.
    ///
    /// # Errors
    /// If others than root can change each program that is found.
    pub fn find(name: &Path, first: Option<&Path>) -> Result<Option<Self>> {
        if name.is_absolute() {
            return Self::open(name);
        }
        let on_path = env::var_os("PATH").unwrap_or_default();
        let first = first.map(Path::to_owned).into_iter();
        let folders = first.chain(env::split_paths(&on_path));
        let folders = folders.chain(PROGRAM_FOLDERS.map(PathBuf::from));
        let mut refused = None;
        // a relative folder is one of any user in whose folder root happens to be
        for folder in folders.filter(|folder| folder.is_absolute()) {
            match Self::open(&folder.join(name)) {
                Ok(None) => {}
                Ok(Some(program)) => return Ok(Some(program)),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        refused.map_or(Ok(None), Err)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs the open file. An interpreter needs the name of its script, and the root
    /// of an image may have no `/proc`: there the path is as good, because root alone can change it.
    pub fn command(&self) -> Command {
        let opened = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        if self.is_script || Path::new(&opened).symlink_metadata().is_err() {
            return Command::new(&self.path);
        }
        let mut command = Command::new(opened);
        command.arg0(&self.path);
        command
    }

    /// The output of the program with these arguments.
    ///
    /// # Errors
    /// As [`output_of`].
    pub fn output(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.command();
        command.args(arguments);
        output_of(command)
            .with_context(|| format!("run {} {}", self.path.display(), arguments.join(" ")))
    }
}

/// Opens a regular file that root alone can change; `None` if no file has this path.
///
/// # Errors
/// If a folder on the way or the file belongs to another user, or others can write it.
pub fn open_of_root(path: &Path) -> Result<Option<OwnedFd>> {
    let walk = walk_of_root(path)?;
    let last = walk.look_ups.last();
    if last.is_some_and(|look_up| look_up.found == Found::Missing) {
        return Ok(None);
    }
    let opened = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("open {}", path.display()))?;
    let found = fstat(&opened).with_context(|| format!("open {}", path.display()))?;
    ensure!(
        FileType::from_raw_mode(found.st_mode).is_file(),
        "{} is no regular file",
        path.display()
    );
    refuse_others(path, found.st_uid, found.st_mode)?;
    Ok(Some(opened))
}

/// Checks the folders of a path, as far as they exist.
///
/// # Errors
/// If a folder belongs to another user, or others can write it.
pub fn check_folders_of_root(path: &Path) -> Result<()> {
    walk_of_root(path).map(drop)
}

fn walk_of_root(path: &Path) -> Result<HostWalk> {
    let walk = walk_host_path(path)?;
    for folder in &walk.folders {
        refuse_others(folder.handle.path(), folder.owner, folder.mode)?;
    }
    Ok(walk)
}

fn refuse_others(path: &Path, owner: u32, mode: u32) -> Result<()> {
    let path = path.display();
    ensure!(
        owner == 0 || owner == geteuid().as_raw(),
        "{path} belongs to user {owner}; it has to belong to root"
    );
    ensure!(
        mode & WRITABLE_BY_OTHERS == 0,
        "{path} can be written by others than root (mode {:o}); run chmod go-w {path}",
        mode & 0o7777
    );
    Ok(())
}

/// A program that was started, and ended by itself with this code.
#[derive(Debug, thiserror::Error)]
#[error("exit status: {code}: {message}")]
pub struct Failed {
    code: i32,
    message: String,
}

/// The output of a program that answers a query.
///
/// # Errors
/// If the program cannot be started, fails ([`Failed`]), or does not end within [`QUERY_TIMEOUT`].
pub fn output_of(command: Command) -> Result<String> {
    output_within(QUERY_TIMEOUT, command)
}

/// As [`output_of`], with another time limit.
///
/// # Errors
/// As [`output_of`].
pub fn output_within(limit: Duration, mut command: Command) -> Result<String> {
    // A pipe would have to be read meanwhile, and a child of the program could keep it open.
    let (mut out, mut errors) = (file_in_memory()?, file_in_memory()?);
    // the root of an image may lack /dev/null
    command
        .stdin(Stdio::piped())
        .stdout(out.try_clone()?)
        .stderr(errors.try_clone()?);
    let status = status_within(limit, command)?;
    let mut text = String::new();
    if !status.success() {
        errors.rewind()?;
        errors.read_to_string(&mut text)?;
        let message = text.trim().lines().last().unwrap_or("no message");
        let Some(code) = status.code() else {
            bail!("{status}: {message}");
        };
        let message = message.to_owned();
        return Err(Failed { code, message }.into());
    }
    out.rewind()?;
    out.read_to_string(&mut text).context("read its output")?;
    Ok(text)
}

/// A hardened kernel requires the seal, and kernels before 6.3 do not know it.
fn file_in_memory() -> Result<File> {
    let sealed = MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL;
    let file = memfd_create("output", sealed)
        .or_else(|_| memfd_create("output", MemfdFlags::CLOEXEC))
        .context("create a file in memory")?;
    Ok(File::from(file))
}

/// Runs a command to its end.
///
/// # Errors
/// If the command does not end in time: it is killed, with its children.
pub fn status_within(limit: Duration, mut command: Command) -> Result<ExitStatus> {
    let mut child = command.process_group(0).spawn()?;
    drop(child.stdin.take());
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if start.elapsed() > limit {
            let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            // A program that waits for a dead file server does not end: it is not waited for.
            group.map(|group| kill_process_group(group, Signal::KILL));
            thread::sleep(POLL);
            let _ = child.try_wait();
            bail!("no end after {} s", limit.as_secs());
        }
        thread::sleep(POLL);
    }
}

// The number of parts of the installation that other tools changed. The installer's pod writes the
// number once a minute, and the agent reads it: only the installer evaluates a runtime's files.
//
// An old number is no number: the installer's pod has ended, or the node was started again.

/// The file with the number of changed parts.
pub const DRIFT_COUNT: &str = "/run/bindguard/drift-count";

const MAX_DRIFT_AGE: Duration = Duration::from_secs(10 * 60);
const MAX_DRIFT_SIZE: u64 = 32;

/// The number in a recent file that root alone can write.
pub fn recent_drift_count(path: &Path) -> Option<u32> {
    let file = File::from(open_of_root(path).ok()??);
    let written = file.metadata().ok()?.modified().ok()?;
    let now = SystemTime::now();
    // a time that is yet to come is from before the clock was set
    now.duration_since(written)
        .ok()
        .filter(|age| *age < MAX_DRIFT_AGE)?;
    let text = read_file(path, MAX_DRIFT_SIZE).ok()?;
    String::from_utf8(text).ok()?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    const USER: u32 = 65534;

    fn folder() -> Option<tempfile::TempDir> {
        if !geteuid().is_root() {
            eprintln!("SKIPPED: not root");
            return None;
        }
        Some(tempfile::tempdir_in("/run").unwrap())
    }

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }

    fn refusal(path: &Path) -> String {
        format!("{:#}", RootProgram::open(path).unwrap_err())
    }

    #[test]
    fn a_program_that_a_user_can_change_is_refused() {
        let Some(folder) = folder() else { return };
        let at = |name: &str| folder.path().join(name);
        write(&at("root/program"), "");
        write(&at("user/program"), "");
        write(&at("group/program"), "");
        write(&at("sticky/below/program"), "");
        write(&at("root/of-user"), "");
        write(&at("root/writable"), "");
        chown(at("user"), Some(USER), None).unwrap();
        chown(at("root/of-user"), Some(USER), None).unwrap();
        for (path, mode) in [
            ("group", 0o775),
            ("sticky", 0o1777),
            ("root/writable", 0o757),
        ] {
            fs::set_permissions(at(path), Permissions::from_mode(mode)).unwrap();
        }
        symlink(at("user/program"), at("root/into-user")).unwrap();
        symlink(at("root"), at("user/to-root")).unwrap();
        symlink("../root/program", at("root/link")).unwrap();
        symlink("nowhere", at("root/dangling")).unwrap();

        for path in ["root/program", "root/link"] {
            assert!(RootProgram::open(&at(path)).unwrap().is_some(), "{path}");
        }
        for path in ["root/missing", "root/dangling", "missing/program"] {
            assert!(RootProgram::open(&at(path)).unwrap().is_none(), "{path}");
        }
        for (path, why) in [
            ("user/program", "user belongs to user 65534"),
            ("user/missing", "user belongs to user 65534"),
            ("user/to-root/program", "user belongs to user 65534"),
            ("root/into-user", "user belongs to user 65534"),
            ("root/of-user", "of-user belongs to user 65534"),
            (
                "group/program",
                "group can be written by others than root (mode 775)",
            ),
            (
                "sticky/below/program",
                "sticky can be written by others than root (mode 1777)",
            ),
            (
                "root/writable",
                "writable can be written by others than root (mode 757)",
            ),
            ("root", "is no regular file"),
        ] {
            assert!(
                refusal(&at(path)).contains(why),
                "{path}: {}",
                refusal(&at(path))
            );
        }

        let found = |first: &str| RootProgram::find(Path::new("program"), Some(&at(first)));
        assert_eq!(found("root").unwrap().unwrap().path(), at("root/program"));
        assert!(found("user").is_err(), "the only one is a user's");
    }

    #[test]
    fn a_binary_runs_by_its_descriptor_and_a_script_by_its_name() {
        let Some(folder) = folder() else { return };
        let script = folder.path().join("script");
        write(&script, "#!/bin/sh\necho \"$0\"\n");
        let said = RootProgram::open(&script)
            .unwrap()
            .unwrap()
            .output(&[])
            .unwrap();
        assert_eq!(said.trim(), script.to_str().unwrap());
        let shell = RootProgram::open(Path::new("/bin/sh")).unwrap().unwrap();
        assert!(
            shell
                .command()
                .get_program()
                .to_str()
                .unwrap()
                .starts_with("/proc/self/fd/")
        );
        assert_eq!(shell.output(&["-c", "echo \"$0\""]).unwrap(), "/bin/sh\n");
        let failed = shell
            .output(&["-c", "echo broken >&2; exit 3"])
            .unwrap_err();
        assert!(
            format!("{failed:#}").ends_with("exit status: 3: broken"),
            "{failed:#}"
        );
    }

    /// The child of the program keeps its output open.
    #[test]
    fn a_program_that_does_not_end_is_killed_with_its_children() {
        let shell = RootProgram::open(Path::new("/bin/sh")).unwrap().unwrap();
        let mut command = shell.command();
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        command
            .args(["-c", "sleep 1000 & echo $! > $1; wait", "sh"])
            .arg(&pid);
        let ended = status_within(Duration::from_secs(1), command).unwrap_err();
        assert_eq!(ended.to_string(), "no end after 1 s");
        let child = format!("/proc/{}/stat", fs::read_to_string(&pid).unwrap().trim());
        while fs::read_to_string(&child).is_ok_and(|stat| !stat.contains(") Z ")) {
            thread::sleep(POLL);
        }
    }
}

#[cfg(test)]
mod drift_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_number_that_is_old_or_of_others_is_unknown() {
        if !geteuid().is_root() {
            eprintln!("SKIPPED: not root");
            return;
        }
        let folder = tempfile::tempdir_in("/run").unwrap();
        let path = folder.path().join("drift-count");
        assert_eq!(recent_drift_count(&path), None);
        for (text, number) in [("3\n", Some(3)), ("", None), ("-1\n", None), ("3 4", None)] {
            fs::write(&path, text).unwrap();
            assert_eq!(recent_drift_count(&path), number, "{text:?}");
        }
        fs::write(&path, "3\n").unwrap();
        let now = SystemTime::now();
        for (time, number) in [
            (now - Duration::from_secs(300), Some(3)),
            (now - Duration::from_secs(900), None),
            (now + Duration::from_secs(900), None),
            (now, Some(3)),
        ] {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_modified(time).unwrap();
            assert_eq!(recent_drift_count(&path), number);
        }
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        assert_eq!(recent_drift_count(&path), None);

        fs::remove_file(&path).unwrap();
        symlink(folder.path(), &path).unwrap();
        assert_eq!(recent_drift_count(&path), None);
    }
}
