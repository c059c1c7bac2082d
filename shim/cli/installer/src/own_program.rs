//! A program to install, as an open file: an installed copy is recognized without a second reading.
//!
//! An installer's pod checks its node twice a minute. So a program is compared in small parts, once
//! for each file, and read as a whole only if it has to be written.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bindguard_core::program_names::self_test_of;
use bindguard_operator::root_program::{Failed, RootProgram, output_of};

/// The size of the parts that are compared.
const PART_SIZE: usize = 64 << 10;

/// A program.
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

    /// Its name.
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

    /// Its content.
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
