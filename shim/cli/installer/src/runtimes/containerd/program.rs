//! The version and the effective configuration of the containerd program.

use std::cell::{Cell, OnceCell};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use bindguard_operator::root_program::{RootProgram, output_of};
use bindguard_sys::write_new_file;
use tempfile::TempDir;

use super::effective::Effective;
use crate::scratch;

/// Major and minor.
pub type Version = (u32, u32);

/// A containerd program and its version.
#[derive(Debug)]
pub struct Containerd {
    program: RootProgram,
    version: Version,
    /// The folder in which files are tried out. No runtime watches it, and no monitor of a
    /// runtime's folder sees them.
    folder: OnceCell<TempDir>,
    files: Cell<u32>,
}

impl Containerd {
    /// The named program, else the running program, else the program on `PATH`.
    pub fn locate(named: Option<&Path>, running: Option<&Path>) -> Result<Self> {
        let program = match named.or(running) {
            Some(program) => RootProgram::open(program)?
                .with_context(|| format!("run {}: no such file", program.display()))?,
            None => RootProgram::find(Path::new("containerd"), None)?
                .context("find containerd: it is not on PATH, name it with --containerd PROGRAM")?,
        };
        let said = run(&program, &["--version"])?;
        let version = version_in(&said).with_context(|| {
            let said = said.lines().next().unwrap_or_default();
            format!(
                "find a version in what {} says: {said:?}: is it containerd?",
                program.path().display()
            )
        })?;
        Ok(Self {
            program,
            version,
            folder: OnceCell::new(),
            files: Cell::new(0),
        })
    }

    /// Its program.
    pub fn program(&self) -> &Path {
        self.program.path()
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The effective configuration with this text in place of the main file `path`.
    pub fn effective(&self, path: &Path, text: &str) -> Result<Effective> {
        let trial = self.trial_file(text)?;
        let named = |path: &Path| path.display().to_string();
        let words = ["--config", &named(&trial), "config", "dump"];
        let about_file = |error: anyhow::Error| {
            anyhow!(format!("{error:#}").replace(&named(&trial), &named(path)))
        };
        let dump = run(&self.program, &words)
            .map_err(about_file)
            .with_context(|| format!("run containerd config dump for {}", path.display()))?;
        Effective::from_dump(&dump).with_context(|| {
            format!(
                "read what {} config dump says",
                self.program.path().display()
            )
        })
    }

    /// A file to try out, in a folder of this process's own.
    pub fn trial_file(&self, text: &str) -> Result<PathBuf> {
        let folder = match self.folder.get() {
            Some(folder) => folder,
            None => {
                let folder =
                    scratch::private_folder().context("create a folder for files to try out")?;
                self.folder.get_or_init(|| folder)
            }
        };
        let number = self.files.replace(self.files.get() + 1);
        let path = folder.path().join(format!("{number}.toml"));
        // containerd's file may have the password of a registry
        write_new_file(&path, text.as_bytes(), 0o600)
            .with_context(|| format!("write {}", path.display()))?;
        Ok(path)
    }
}

/// k3s is a single program with many names.
fn run(program: &RootProgram, words: &[&str]) -> Result<String> {
    let mut command: Command = program.command();
    if program.path().file_name().is_some_and(|name| name == "k3s") {
        command.arg0("containerd");
    }
    command.args(words);
    output_of(command).with_context(|| format!("run {}", program.path().display()))
}

/// The first word that looks like a version: `1.6.20~ds1`, `v1.7.24`, `2.1.9+unknown`.
fn version_in(said: &str) -> Option<Version> {
    let words = said.split_whitespace();
    words
        .skip_while(|word| *word != "containerd")
        .find_map(|word| {
            let mut parts = word.strip_prefix('v').unwrap_or(word).split('.');
            Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_packagers_and_upstream() {
        for (said, version) in [
            (
                "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3\n",
                (1, 6),
            ),
            (
                "containerd github.com/containerd/containerd v1.7.24 88bf19b2105c8b17560993bee28a01ddc2f97182",
                (1, 7),
            ),
            (
                "containerd github.com/containerd/containerd/v2 2.1.9+unknown \n",
                (2, 1),
            ),
        ] {
            assert_eq!(version_in(said), Some(version));
        }
        assert_eq!(version_in("containerd, of no version"), None);
    }
}
