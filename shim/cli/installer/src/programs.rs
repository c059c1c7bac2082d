//! The programs: those to install, the versions of a node side by side, and the search for other
//! programs.
//!
//! ```text
//! /usr/local/bin/containerd-shim-bindguard-v2 ──► /usr/local/lib/bindguard/current/containerd-shim-bindguard-v2
//! /usr/local/lib/bindguard/current            ──► 0.2.0
//! ```
//!
//! Configurations name the link in the prefix. Replacing `current` is a single rename(2), which switches
//! all programs at once. A running shim was started from its version's folder and takes the guard from
//! this folder: an upgrade does not mix versions. The programs to install are opened first, because with
//! `--root` their folder is out of reach afterwards.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use anyhow::{Context, Result, anyhow, ensure};
use bindguard_core::program_names::{AGENT, CLI, SHIM, WRAPPER, self_test_of};
use bindguard_operator::root_program::{Failed, RootProgram, check_folders_of_root, output_of};
use rustix::fs::{Access, StatVfsMountFlags, access};
use sha2::{Digest, Sha256};

use crate::change::{Change, identity, nearest};
use crate::record::{Entry, Record, there_or_not};
use crate::running::{daemon_that_names, users_of};
use crate::search_path::is_searched;

#[derive(Debug)]
pub struct Programs {
    folder: PathBuf,
    /// The folder's device and inode: in a `--root`, the folder's path leads elsewhere.
    identity: Option<(u64, u64)>,
    files: Vec<OwnProgram>,
    agent: Result<OwnProgram>,
}

impl Programs {
    /// The programs beside this one.
    pub fn beside_this_one() -> Result<Self> {
        let own = env::current_exe().context("find out where this program is")?;
        let folder = own.parent().unwrap_or(Path::new("/")).to_owned();
        let open = |name: &'static str| OwnProgram::open(name, &folder.join(name));
        Ok(Self {
            identity: identity(&folder),
            files: vec![open(SHIM)?, open(WRAPPER)?, OwnProgram::open(CLI, &own)?],
            agent: open(AGENT),
            folder,
        })
    }

    fn files(&self, with_agent: bool) -> Result<Vec<&OwnProgram>> {
        let mut files: Vec<_> = self.files.iter().collect();
        if with_agent {
            files.push(self.agent.as_ref().map_err(|error| anyhow!("{error:#}"))?);
        }
        Ok(files)
    }

    /// Runs each program, before any file is changed.
    ///
    /// # Errors
    /// If a program does not run.
    pub fn check_run(&self, with_agent: bool) -> Result<()> {
        for program in self.files(with_agent)? {
            program.check_runs()?;
        }
        Ok(())
    }

    /// Checks that the installed programs run from where they are, before a runtime's file names
    /// them: a file system or a security module can refuse that.
    ///
    /// # Errors
    /// If one does not.
    pub fn check_installed(&self, prefix: &Path, with_agent: bool) -> Result<()> {
        let programs = self.files(with_agent)?;
        let folder = if self.identity.is_some() && identity(prefix) == self.identity {
            prefix.to_owned()
        } else {
            folder_for(prefix, &programs)?
        };
        for program in programs {
            let path = folder.join(program.name());
            check_installed(program.name(), &path)
                .with_context(|| format!("run {}, which was installed", path.display()))?;
        }
        Ok(())
    }

    /// The default prefix: the prefix of this program's version, or this program's folder if
    /// services search it for programs, else /usr/local/bin. In a `--root` it is /usr/local/bin.
    pub fn usual_prefix(&self, in_another_root: bool) -> PathBuf {
        let own = prefix_of(&self.folder)
            .or_else(|| is_searched(&self.folder).then(|| self.folder.clone()));
        own.filter(|_| !in_another_root)
            .unwrap_or_else(|| PathBuf::from("/usr/local/bin"))
    }

    /// Checks, before any file is changed, that services can run programs in this folder.
    ///
    /// # Errors
    /// If programs cannot be written there, or not be run from there.
    pub fn check_folder(&self, folder: &Path, with_agent: bool) -> Result<()> {
        const ADVICE: &str = "name another folder with --prefix DIR";
        let doing = || format!("install programs in {}", folder.display());
        let existing = nearest(folder);
        check_folders_of_root(folder).with_context(|| format!("{}; or {ADVICE}", doing()))?;
        ensure!(
            fs::metadata(existing).with_context(doing)?.is_dir(),
            "{}: {} is not a folder; {ADVICE}",
            doing(),
            existing.display()
        );
        let flags = rustix::fs::statvfs(existing).with_context(doing)?.f_flag;
        ensure!(
            !flags.contains(StatVfsMountFlags::NOEXEC),
            "{}: its file system is mounted noexec; {ADVICE}",
            doing()
        );
        let has_all = self
            .files(with_agent)?
            .iter()
            .all(|program| program.is_at(&folder.join(program.name())));
        if has_all {
            return Ok(());
        }
        access(existing, Access::WRITE_OK)
            .map_err(io::Error::from)
            .map_err(|error| {
                anyhow!(
                    "{}: {} is not writable: {error}; {ADVICE}",
                    doing(),
                    existing.display()
                )
            })
    }

    /// The changes after which services find these programs in `prefix`: the files of this version,
    /// the link that selects it, and the programs' links in the prefix. A package's own programs
    /// stay where they are.
    pub fn in_prefix(&self, prefix: &Path, with_agent: bool) -> Result<Vec<Change>> {
        if self.identity.is_some() && identity(prefix) == self.identity {
            return Ok(Vec::new());
        }
        let programs = self.files(with_agent)?;
        let version = folder_for(prefix, &programs)?;
        let current = current(prefix);
        let missing = programs
            .iter()
            .filter(|program| !program.is_at(&version.join(program.name())));
        let files = missing.map(|program| {
            Change::of(&version.join(program.name()), Some(program.bytes()?), 0o755)
        });
        let link = |program: &&OwnProgram| {
            Change::link(&prefix.join(program.name()), &current.join(program.name()))
        };
        let selection = Change::link(&current, Path::new(version.file_name().unwrap_or_default()));
        files
            .chain([selection])
            .chain(programs.iter().map(link))
            .collect()
    }
}

/// The shim and the wrapper beside this program, from any installer.
pub fn beside_this_one() -> Vec<PathBuf> {
    let own = env::current_exe().ok();
    let folder = own.as_deref().and_then(Path::parent);
    folder
        .into_iter()
        .flat_map(|folder| [SHIM, WRAPPER].map(|name| folder.join(name)))
        .collect()
}

/// The size of the parts that are compared.
const PART_SIZE: usize = 64 << 10;

#[derive(Debug)]
pub struct OwnProgram {
    name: &'static str,
    file: File,
    size: u64,
    /// The compared files by device and inode, and the results.
    compared: RefCell<HashMap<(u64, u64), bool>>,
}

impl OwnProgram {
    /// Opens it: with `--root` its folder is out of reach afterwards.
    pub fn open(name: &'static str, path: &Path) -> Result<Self> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (found, file) = opened.with_context(|| {
            format!(
                "read {}, which has to be beside this program",
                path.display()
            )
        })?;
        let itself = HashMap::from([((found.dev(), found.ino()), true)]);
        Ok(Self {
            name,
            file,
            size: found.size(),
            compared: RefCell::new(itself),
        })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Runs the open file: a truncated program, or a program of another architecture, would make
    /// each create fail.
    pub fn check_runs(&self) -> Result<()> {
        let opened = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        check_runs(self.name, Command::new(opened))
            .with_context(|| format!("run {}, which is to be installed", self.name))
    }

    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.size).context("hold a program in memory")?];
        self.file
            .read_exact_at(&mut bytes, 0)
            .with_context(|| format!("read {}", self.name))?;
        Ok(bytes)
    }

    /// True if the file at a path has this content.
    pub fn is_at(&self, path: &Path) -> bool {
        let Ok(found) = fs::metadata(path) else {
            return false;
        };
        let identity = (found.dev(), found.ino());
        let known = self.compared.borrow().get(&identity).copied();
        known.unwrap_or_else(|| {
            let same = found.size() == self.size
                && File::open(path)
                    .and_then(|file| self.equals(&file))
                    .unwrap_or(false);
            self.compared.borrow_mut().insert(identity, same);
            same
        })
    }

    fn equals(&self, other: &File) -> io::Result<bool> {
        let (mut mine, mut theirs) = (vec![0; PART_SIZE], vec![0; PART_SIZE]);
        let mut at = 0;
        while at < self.size {
            let length = PART_SIZE.min(usize::try_from(self.size - at).unwrap_or(PART_SIZE));
            self.file.read_exact_at(&mut mine[..length], at)?;
            other.read_exact_at(&mut theirs[..length], at)?;
            if mine[..length] != theirs[..length] {
                return Ok(false);
            }
            at += length as u64;
        }
        Ok(true)
    }
}

/// Checks that a program of bindguard runs.
///
/// # Errors
/// If the program cannot be started, fails, or is another program.
pub fn check_runs(name: &str, mut command: Command) -> Result<()> {
    command.arg(self_test_of(name));
    let said = output_of(command)?;
    ensure!(
        said.contains(name),
        "it is another program: it prints {said:?}"
    );
    Ok(())
}

/// Checks that an installed program runs, and is the program that was installed.
///
/// # Errors
/// If it is not.
pub fn check_installed(name: &str, path: &Path) -> Result<()> {
    let program = RootProgram::open(path)?.context("there is no such file")?;
    check_runs(name, program.command())
}

/// Checks that the kernel runs an installed program, whose bytes are as installed. A program of another
/// version runs, even if its exit status is a failure: that version may not know the self-test.
///
/// # Errors
/// If the program cannot be started, is killed, or does not end.
pub fn check_starts(name: &str, path: &Path) -> Result<()> {
    let program = RootProgram::open(path)?.context("there is no such file")?;
    let mut command = program.command();
    command.arg(self_test_of(name));
    match output_of(command) {
        Err(error) if error.is::<Failed>() => Ok(()),
        answer => answer.map(drop),
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The name of the link that selects a version.
pub const CURRENT: &str = "current";

/// The folder of all versions: beside a prefix `bin`, or below any other prefix.
pub fn store(prefix: &Path) -> PathBuf {
    let above = if prefix.file_name() == Some(OsStr::new("bin")) {
        prefix.parent()
    } else {
        None
    };
    above.unwrap_or(prefix).join("lib/bindguard")
}

/// The link that selects a version.
pub fn current(prefix: &Path) -> PathBuf {
    store(prefix).join(CURRENT)
}

/// The folder for programs with these contents. A build that differs from the present one of its
/// version gets its own folder: the files of a running shim are never replaced.
pub fn folder_for(prefix: &Path, files: &[&OwnProgram]) -> Result<PathBuf> {
    let usual = store(prefix).join(VERSION);
    let is_other = |program: &&OwnProgram| {
        let path = usual.join(program.name());
        path.symlink_metadata().is_ok() && !program.is_at(&path)
    };
    if !files.iter().any(is_other) {
        return Ok(usual);
    }
    // the selected version first, without a hash of every program
    let selected = fs::read_link(current(prefix)).map(|version| store(prefix).join(version));
    if let Some(selected) = selected
        .ok()
        .filter(|folder| files.iter().all(|one| one.is_at(&folder.join(one.name()))))
    {
        return Ok(selected);
    }
    let mut hash = Sha256::new();
    for program in files {
        hash.update(program.bytes()?);
    }
    let digits: String = hash
        .finalize()
        .iter()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Ok(store(prefix).join(format!("{VERSION}-{digits}")))
}

/// The prefix of an installed version, whose programs are in `folder`.
pub fn prefix_of(folder: &Path) -> Option<PathBuf> {
    let above = folder.parent()?.parent()?.parent()?;
    let candidates = [above.join("bin"), above.to_owned()];
    candidates
        .into_iter()
        .find(|prefix| folder.starts_with(store(prefix)) && is_linked(prefix))
}

fn is_linked(prefix: &Path) -> bool {
    fs::read_link(prefix.join(CLI)).is_ok_and(|to| to.starts_with(current(prefix)))
}

/// Removes the versions that are not selected, and that no process and no running runtime's
/// configuration needs.
pub fn remove_unneeded(record: &mut Record, prefix: &Path) -> Result<()> {
    let store = store(prefix);
    let Ok(selected) = fs::read_link(store.join(CURRENT)) else {
        return Ok(());
    };
    let is_old = |entry: &&Entry| {
        let folder = entry
            .path
            .parent()
            .filter(|folder| folder.parent() == Some(&store));
        folder.is_some_and(|folder| folder.file_name() != Some(selected.as_os_str()))
    };
    let old: Vec<Entry> = record.files.iter().filter(is_old).cloned().collect();
    let folder_of = |entry: &Entry| entry.path.parent().map(Path::to_owned);
    let is_needed = |folder: Option<PathBuf>| {
        let files = old.iter().filter(|entry| folder_of(entry) == folder);
        let files: Vec<PathBuf> = files.map(|entry| entry.path.clone()).collect();
        !users_of(&files).is_empty() || daemon_that_names(&files).map_or(true, |it| it.is_some())
    };
    for entry in old.iter().filter(|entry| !is_needed(folder_of(entry))) {
        there_or_not(fs::remove_file(&entry.path))
            .with_context(|| format!("remove {}", entry.path.display()))?;
        record.forget(&entry.path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]
    use super::*;

    fn folder(prefix: &Path, program: &OwnProgram) -> PathBuf {
        folder_for(prefix, &[program]).unwrap()
    }

    #[test]
    fn versions_are_beside_bin_or_below_another_prefix() {
        assert_eq!(
            store(Path::new("/usr/local/bin")),
            Path::new("/usr/local/lib/bindguard")
        );
        assert_eq!(
            store(Path::new("/opt/guard")),
            Path::new("/opt/guard/lib/bindguard")
        );
    }

    #[test]
    fn another_build_of_a_version_gets_its_own_folder() {
        let prefix = tempfile::tempdir().unwrap();
        let build = tempfile::tempdir().unwrap();
        let program = |text: &str| {
            let path = build.path().join(text);
            fs::write(&path, text).unwrap();
            OwnProgram::open("bindguard", &path).unwrap()
        };
        let first = folder(prefix.path(), &program("one"));
        assert_eq!(first.file_name().unwrap(), VERSION);
        fs::create_dir_all(&first).unwrap();
        fs::write(first.join("bindguard"), "one").unwrap();
        assert_eq!(folder(prefix.path(), &program("one")), first);
        let second = folder(prefix.path(), &program("two"));
        assert_ne!(second, first);
        assert!(
            second
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with(&format!("{VERSION}-"))
        );
    }
}
