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

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use anyhow::{Context, Result, anyhow, bail, ensure};
use bindguard_core::handover::{AGENT, CLI, SHIM, WRAPPER, self_test_of};
use bindguard_operator::root_program::{
    Failed, PROGRAM_FOLDERS, RootProgram, check_folders_of_root, output_of,
};
use rustix::fs::{Access, StatVfsMountFlags, access};
use sha2::{Digest, Sha256};

use crate::change::{Change, Content, Doing, Owner, digits_of, identity, nearest};
use crate::record::{Record, remove_file};
use crate::running::{daemon_that_names, users_of};

#[derive(Debug)]
pub struct Programs {
    folder: PathBuf,
    /// The folder's device and inode: in a `--root`, the folder's path leads elsewhere.
    identity: Option<(u64, u64)>,
    files: Vec<OwnProgram>,
    agent: Result<OwnProgram>,
    pub with_agent: bool,
}

impl Programs {
    /// The programs beside this one.
    pub fn beside_this_one(with_agent: bool) -> Result<Self> {
        let own = env::current_exe().context("find out where this program is")?;
        let folder = own.parent().unwrap_or(Path::new("/")).to_owned();
        let open = |name: &'static str| OwnProgram::open(name, &folder.join(name));
        Ok(Self {
            identity: identity(&folder),
            files: vec![open(SHIM)?, open(WRAPPER)?, OwnProgram::open(CLI, &own)?],
            agent: open(AGENT),
            folder,
            with_agent,
        })
    }

    fn files(&self) -> Result<Vec<&OwnProgram>> {
        let mut files: Vec<_> = self.files.iter().collect();
        if self.with_agent {
            files.push(self.agent.as_ref().map_err(|error| anyhow!("{error:#}"))?);
        }
        Ok(files)
    }

    /// Runs each open file, before any file is changed: a truncated program, or a program of another
    /// architecture, would make each create fail.
    ///
    /// # Errors
    /// If a program does not run.
    pub fn check_run(&self) -> Result<()> {
        for program in self.files()? {
            let opened = format!("/proc/self/fd/{}", program.file.as_raw_fd());
            check_runs(program.name, Command::new(opened))
                .with_context(|| format!("run {}, which is to be installed", program.name))?;
        }
        Ok(())
    }

    /// Checks that the installed programs run from where they are, before a runtime's file names
    /// them: a file system or a security module can refuse that.
    ///
    /// # Errors
    /// If one does not.
    pub fn check_installed(&self, folder: &Path) -> Result<()> {
        for program in self.files()? {
            let path = folder.join(program.name);
            let ran = installed(&path).and_then(|it| check_runs(program.name, it.command()));
            ran.with_context(|| format!("run {}, which was installed", path.display()))?;
        }
        Ok(())
    }

    /// The default prefix: the prefix of this program's version, or this program's folder if
    /// services search it for programs, else /usr/local/bin. In a `--root` it is /usr/local/bin.
    pub fn usual_prefix(&self, in_another_root: bool) -> PathBuf {
        if !in_another_root {
            if let Some(prefix) = prefix_of(&self.folder) {
                return prefix;
            }
            if PROGRAM_FOLDERS.map(Path::new).contains(&&*self.folder) {
                return self.folder.clone();
            }
        }
        PathBuf::from("/usr/local/bin")
    }

    /// Checks, before any file is changed, that services can run programs in this folder.
    ///
    /// # Errors
    /// If programs cannot be written there, or not be run from there.
    pub fn check_folder(&self, folder: &Path) -> Result<()> {
        const ADVICE: &str = "name another folder with --prefix DIR";
        let doing = || format!("install programs in {}", folder.display());
        let existing = nearest(folder);
        check_folders_of_root(folder).with_context(|| format!("{}; or {ADVICE}", doing()))?;
        let flags = || rustix::fs::statvfs(existing).map(|found| found.f_flag);
        let why = if !fs::metadata(existing).with_context(doing)?.is_dir() {
            format!("{} is not a folder", existing.display())
        } else if flags()
            .with_context(doing)?
            .contains(StatVfsMountFlags::NOEXEC)
        {
            "its file system is mounted noexec".to_owned()
        } else if let Err(errno) = access(existing, Access::WRITE_OK)
            && !are_all_in(&self.files()?, folder)
        {
            let error = io::Error::from(errno);
            format!("{} is not writable: {error}", existing.display())
        } else {
            return Ok(());
        };
        bail!("{}: {why}; {ADVICE}", doing())
    }

    /// The folder of this version's files, and the changes after which services find these programs in
    /// `prefix`: the files, the link that selects the version, and the programs' links in the prefix.
    /// Programs that are in the prefix themselves, as a package's, stay where they are.
    pub fn in_prefix(&self, prefix: &Path) -> Result<(PathBuf, Vec<Change>)> {
        let mut changes = Vec::new();
        if self.identity.is_some() && identity(prefix) == self.identity {
            return Ok((prefix.to_owned(), changes));
        }
        let programs = self.files()?;
        let version = folder_for(prefix, &programs)?;
        let current = store(prefix).join(CURRENT);
        for program in &programs {
            let path = version.join(program.name);
            if !program.is_at(&path) {
                let bytes = Content::File(program.bytes()?);
                let mut change = Change::to(Owner::Bindguard, path, Some(bytes))?;
                change.mode = 0o755;
                changes.push(change);
            }
        }
        let name = Path::new(version.file_name().unwrap_or_default());
        changes.push(Change::link(Owner::Bindguard, current.clone(), name)?);
        for program in programs {
            let (link, target) = (prefix.join(program.name), current.join(program.name));
            changes.push(Change::link(Owner::Bindguard, link, &target)?);
        }
        Ok((version, changes))
    }
}

/// The shim and the wrapper beside this program, from any installer.
pub fn beside_this_one() -> Vec<PathBuf> {
    let own = env::current_exe().unwrap_or_default();
    match own.parent() {
        Some(folder) => [SHIM, WRAPPER].map(|name| folder.join(name)).to_vec(),
        None => Vec::new(),
    }
}

#[derive(Debug)]
struct OwnProgram {
    name: &'static str,
    file: File,
    size: u64,
}

impl OwnProgram {
    fn open(name: &'static str, path: &Path) -> Result<Self> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (found, file) = opened.with_context(|| {
            let path = path.display();
            format!("read {path}, which has to be beside this program")
        })?;
        let size = found.len();
        Ok(Self { name, file, size })
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.size).context("hold a program in memory")?];
        let read = self.file.read_exact_at(&mut bytes, 0);
        read.doing("read", Path::new(self.name))?;
        Ok(bytes)
    }

    /// True if the file at a path has this content.
    fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|found| found.len() == self.size)
            && matches!((fs::read(path), self.bytes()), (Ok(there), Ok(own)) if there == own)
    }
}

fn are_all_in(programs: &[&OwnProgram], folder: &Path) -> bool {
    let is_there = |program: &&OwnProgram| program.is_at(&folder.join(program.name));
    programs.iter().all(is_there)
}

/// Checks that a program of bindguard starts, and is not another program.
fn check_runs(name: &str, command: Command) -> Result<()> {
    let said = self_test(name, command)?;
    ensure!(
        said.contains(name),
        "it is another program: it prints {said:?}"
    );
    Ok(())
}

/// Checks that the kernel runs an installed program, whose bytes are as installed. A program of another
/// version runs, even if its exit status is a failure: that version may not know the self-test.
///
/// # Errors
/// If the program cannot be started, is killed, or does not end.
pub fn check_starts(name: &str, path: &Path) -> Result<()> {
    match self_test(name, installed(path)?.command()) {
        Err(error) if error.is::<Failed>() => Ok(()),
        answer => answer.map(drop),
    }
}

fn self_test(name: &str, mut command: Command) -> Result<String> {
    command.arg(self_test_of(name));
    output_of(command)
}

fn installed(path: &Path) -> Result<RootProgram> {
    RootProgram::open(path)?.context("there is no such file")
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The name of the link that selects a version.
pub const CURRENT: &str = "current";

/// The folder of all versions: beside a prefix `bin`, or below any other prefix.
pub fn store(prefix: &Path) -> PathBuf {
    let above = match prefix.parent() {
        Some(parent) if prefix.file_name() == Some(OsStr::new("bin")) => parent,
        _ => prefix,
    };
    above.join("lib/bindguard")
}

/// The folder for programs with these contents. A build that differs from the present one of its
/// version gets its own folder: the files of a running shim are never replaced.
fn folder_for(prefix: &Path, files: &[&OwnProgram]) -> Result<PathBuf> {
    let usual = store(prefix).join(VERSION);
    let is_other = |program: &&OwnProgram| {
        let path = usual.join(program.name);
        path.symlink_metadata().is_ok() && !program.is_at(&path)
    };
    if !files.iter().any(is_other) {
        return Ok(usual);
    }
    // the selected version first, without a hash of every program
    if let Ok(selected) = fs::read_link(store(prefix).join(CURRENT)) {
        let selected = store(prefix).join(selected);
        if are_all_in(files, &selected) {
            return Ok(selected);
        }
    }
    let mut hash = Sha256::new();
    for program in files {
        hash.update(program.bytes()?);
    }
    let digits = digits_of(&hash.finalize()[..4]);
    Ok(store(prefix).join(format!("{VERSION}-{digits}")))
}

/// The prefix of an installed version, whose programs are in `folder`.
fn prefix_of(folder: &Path) -> Option<PathBuf> {
    let above = folder.ancestors().nth(3)?;
    for prefix in [above.join("bin"), above.to_owned()] {
        let store = store(&prefix);
        let link = fs::read_link(prefix.join(CLI));
        if folder.starts_with(&store) && link.is_ok_and(|to| to.starts_with(store.join(CURRENT))) {
            return Some(prefix);
        }
    }
    None
}

/// Removes the versions that are not selected, and that no process and no running runtime's
/// configuration needs.
pub fn remove_unneeded(record: &mut Record, prefix: &Path) -> Result<()> {
    let store = store(prefix);
    let Ok(selected) = fs::read_link(store.join(CURRENT)) else {
        return Ok(());
    };
    let selected = store.join(selected);
    let mut versions: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for entry in &record.files {
        if let Some(folder) = entry.path.parent()
            && folder.parent() == Some(&store)
            && folder != selected
        {
            let files = versions.entry(folder.to_owned()).or_default();
            files.push(entry.path.clone());
        }
    }
    for files in versions.into_values() {
        let is_needed = !users_of(&files).is_empty()
            || daemon_that_names(&files).map_or(true, |daemon| daemon.is_some());
        for file in files.iter().filter(|_| !is_needed) {
            remove_file(file)?;
            record.forget(file)?;
        }
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
