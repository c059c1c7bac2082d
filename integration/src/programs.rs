//! The programs of a story: the binaries under test, and the matrix of containerds and OCI
//! runtimes.
//!
//! `integration/matrix/fetch.sh` lays out the matrix. The host's own containerd is never used: the
//! same generations run everywhere, and the name of a failed story shows the generation. With
//! `BINDGUARD_CONTAINERD`, a developer's own build in the named folder replaces the newest
//! generation.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

pub const SHIM: &str = "containerd-shim-bindguard-v2";
/// containerd's own shim.
pub const STOCK_SHIM: &str = "containerd-shim-runc-v2";
/// The OCI runtime wrapper under test, in which the guard works.
pub const GUARD: &str = "bindguard-runtime";
pub const CLI: &str = "bindguard";
pub const AGENT: &str = "bindguard-agent";

/// A generation of containerd, with the shim, runc and crun of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Generation {
    /// containerd 1.7, runc 1.1, crun 1.21: Debian trixie.
    V1_7,
    /// containerd 2.1, runc 1.3, crun 1.28: Debian sid.
    V2_1,
    /// containerd 2.3, runc 1.4, crun 1.28: a Go module, Debian experimental and sid.
    V2_3,
    /// containerd 2.4, runc 1.5, crun 1.28: Go modules and Debian sid.
    V2_4,
}

impl Generation {
    /// Every generation, oldest first.
    pub const ALL: [Self; 4] = [Self::V1_7, Self::V2_1, Self::V2_3, Self::V2_4];

    /// The generation on which every story runs.
    pub const NEWEST: Self = Self::V2_4;

    /// The name of the folder that `matrix/fetch.sh` makes.
    fn folder(self) -> &'static str {
        match self {
            Self::V1_7 => "trixie",
            Self::V2_1 => "sid",
            Self::V2_3 => "containerd-2.3",
            Self::V2_4 => "containerd-2.4",
        }
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1_7 => "containerd 1.7",
            Self::V2_1 => "containerd 2.1",
            Self::V2_3 => "containerd 2.3",
            Self::V2_4 => "containerd 2.4",
        })
    }
}

/// The OCI runtime that is `runc` on the node's `PATH`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oci {
    /// runc as packaged with this generation.
    Runc(Generation),
    /// crun as packaged with this generation. containerd 2.1 needs crun 1.21 or newer.
    Crun(Generation),
}

impl fmt::Display for Oci {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runc(generation) => write!(f, "runc beside {generation}"),
            Self::Crun(generation) => write!(f, "crun beside {generation}"),
        }
    }
}

/// The folder that `matrix/fetch.sh` filled, and a folder of programs that replace those of the
/// newest generation.
#[derive(Clone, Debug)]
pub struct Matrix {
    folder: PathBuf,
    own_build: Option<PathBuf>,
}

impl Matrix {
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// `$BINDGUARD_MATRIX`, else `target/matrix` of the workspace.
    pub fn locate() -> Result<Self> {
        let folder = env::var_os("BINDGUARD_MATRIX")
            .map_or_else(|| workspace().join("target/matrix"), PathBuf::from);
        if !folder.join("v").is_dir() {
            bail!(
                "no containerds in {}: run integration/matrix/fetch.sh {0}, or set BINDGUARD_MATRIX",
                folder.display()
            );
        }
        let own_build = env::var_os("BINDGUARD_CONTAINERD")
            .filter(|folder| !folder.is_empty())
            .map(PathBuf::from);
        if let Some(folder) = own_build
            .as_ref()
            .filter(|folder| !folder.join("containerd").is_file())
        {
            bail!(
                "BINDGUARD_CONTAINERD={} holds no containerd",
                folder.display()
            );
        }
        Ok(Self { folder, own_build })
    }

    /// A program of a generation: `containerd`, `ctr`, `containerd-shim-runc-v2`, `runc` or `crun`;
    /// the newest has `criu`.
    pub fn program(&self, generation: Generation, name: &str) -> PathBuf {
        let own = self
            .own_build
            .as_ref()
            .filter(|_| generation == Generation::NEWEST)
            .map(|folder| folder.join(name));
        let packaged = || {
            self.folder
                .join("v")
                .join(generation.folder())
                .join("bin")
                .join(name)
        };
        own.filter(|program| program.is_file())
            .unwrap_or_else(packaged)
    }

    /// The version that a generation's containerd reports, such as `1.7.24`: Debian's newest suite
    /// changes.
    pub fn containerd_version(&self, generation: Generation) -> Result<String> {
        let containerd = self.program(generation, "containerd");
        let output = Command::new(&containerd).arg("--version").output();
        let output = output.with_context(|| format!("run {} --version", containerd.display()))?;
        let line = String::from_utf8_lossy(&output.stdout);
        // containerd github.com/containerd/containerd v2.1.9 f9f1b0a
        let version = line
            .split(' ')
            .nth(2)
            .with_context(|| format!("{}: no version in {line:?}", containerd.display()))?;
        Ok(version
            .trim_start_matches('v')
            .split(['~', '+'])
            .next()
            .unwrap_or(version)
            .trim()
            .to_owned())
    }

    /// The executable of an OCI runtime.
    pub fn oci(&self, oci: Oci) -> PathBuf {
        match oci {
            Oci::Runc(generation) => self.program(generation, "runc"),
            Oci::Crun(generation) => self.program(generation, "crun"),
        }
    }
}

/// The folder of the binaries under test: `$BINDGUARD_BIN_DIR`, else the first of
/// `target/TRIPLE/release`, `target/release` and `target/debug` that has the shim.
pub fn binaries_under_test() -> Result<PathBuf> {
    if let Some(folder) = env::var_os("BINDGUARD_BIN_DIR").map(PathBuf::from) {
        return match has_shim(&folder) {
            true => Ok(folder),
            false => bail!("BINDGUARD_BIN_DIR={} holds no {}", folder.display(), SHIM),
        };
    }
    let searched: Vec<PathBuf> = target_folders()
        .iter()
        .flat_map(|target| profiles(target))
        .collect();
    match searched.iter().find(|folder| has_shim(folder)) {
        Some(folder) => Ok(folder.clone()),
        None => bail!(
            "{} is not built: run `cargo build --workspace`, or set BINDGUARD_BIN_DIR (searched {searched:?})",
            SHIM
        ),
    }
}

/// The folder of a guard and a shim with the feature `fault-points`: `$BINDGUARD_FAULTS_DIR`, else
/// the folder of the programs under test, if they have the feature.
pub fn folder_with_fault_points() -> Option<PathBuf> {
    // An unoptimized search of the programs takes most of a second, and hundreds of nodes need it.
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(find_fault_points).clone()
}

fn find_fault_points() -> Option<PathBuf> {
    let separate = env::var_os("BINDGUARD_FAULTS_DIR").map(PathBuf::from);
    let has_them = |folder: &PathBuf| {
        // The agent is built with them. Its program is too large to be searched for each story.
        let has_agent = folder.join(AGENT).is_file();
        has_agent
            && contains(&folder.join(GUARD), b"BINDGUARD_FAULT")
            && contains(&folder.join(SHIM), b"panic-in-")
    };
    separate
        .into_iter()
        .chain(binaries_under_test().ok())
        .find(has_them)
}

/// Looks for a word that is compiled in with the fault points, and with nothing else.
fn contains(program: &Path, word: &[u8]) -> bool {
    fs::read(program).is_ok_and(|bytes| bytes.windows(word.len()).any(|window| window == word))
}

fn has_shim(folder: &Path) -> bool {
    folder.join(SHIM).is_file()
}

/// The target folder this very program was built into comes first, so `CARGO_TARGET_DIR` needs no
/// second mention.
fn target_folders() -> Vec<PathBuf> {
    let own = env::current_exe().ok().and_then(|exe| {
        exe.ancestors()
            .find(|folder| folder.join("CACHEDIR.TAG").is_file())
            .map(Path::to_path_buf)
    });
    own.into_iter()
        .chain([workspace().join("target")])
        .collect()
}

fn profiles(target: &Path) -> Vec<PathBuf> {
    let triples = target
        .read_dir()
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("release"));
    let triples = triples.filter(|folder| folder.is_dir());
    triples
        .chain([target.join("release"), target.join("debug")])
        .collect()
}

fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}
