//! The programs to install: source and destination.
//!
//! They are opened first, because with `--root` their folder is out of reach afterwards.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use bindguard_core::program_names::{AGENT, CLI, SHIM, WRAPPER};
use bindguard_operator::root_program::check_folders_of_root;
use rustix::fs::{Access, StatVfsMountFlags};

use crate::attributes::identity;
use crate::change::{Change, nearest};
use crate::own_program::{OwnProgram, check_installed};
use crate::search_path::is_searched;
use crate::versions;

/// The programs.
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
            versions::folder_for(prefix, &programs)?
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
        let own = versions::prefix_of(&self.folder)
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
        rustix::fs::access(existing, Access::WRITE_OK)
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
        let version = versions::folder_for(prefix, &programs)?;
        let current = versions::current(prefix);
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
