//! The node's config: its file, or what applies if the file cannot be used.
//!
//! ```text
//! the file ──► not there: defaults
//!          ──► not TOML, or unreadable ──► the last valid file, which the installer and the agent keep
//!                                      ──► defaults, with the runtime that the file names
//! ```
//!
//! Without the file's own text nothing is repaired: the text may say "report".

use std::env;
use std::fmt;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;

use crate::parse::{InvalidToml, parse, salvaged};
use crate::{Config, DEFAULT_PATH, ENVIRONMENT, KEPT_PATH};

/// A larger file is no config, and reading it would waste time.
const MAX_SIZE: u64 = 1 << 20;

/// The active config, and the mistakes of the file.
#[derive(Debug, Default)]
pub struct Loaded {
    pub config: Config,
    /// The reason for ignoring the config file. A missing file is a reason only if the environment
    /// names the file.
    pub problem: Option<Unused>,
    /// The parts of the active file that are not used: the file, the line and the mistake.
    pub warnings: Vec<String>,
    /// The text of the active file; empty without a file.
    pub text: String,
    /// The keys that the active file sets.
    pub set: Vec<&'static str>,
    /// A mistake keeps every check from a repair, and containers from a refresh.
    pub only_reports: bool,
}

/// A file that is not used.
#[derive(Debug, thiserror::Error)]
#[error("ignoring the config, using {instead}")]
pub struct Unused {
    /// The settings that apply instead.
    pub instead: Instead,
    #[source]
    pub reason: Error,
}

/// The settings that apply if the file cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instead {
    Kept,
    /// Every check reports, and nothing is refreshed.
    ReportOnly,
}

impl fmt::Display for Instead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => write!(f, "the last valid one ({KEPT_PATH}) without repairs"),
            Self::ReportOnly => f.write_str("report-only settings"),
        }
    }
}

/// The reason why a config file is not used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read, or its copy could not be written.
    #[error("{act} {}", path.display())]
    File {
        /// `read` or `write`.
        act: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It is not TOML.
    #[error("parse {}, line {}: {reason}", path.display(), reason.line)]
    Parse { path: PathBuf, reason: InvalidToml },
}

impl Error {
    fn file(act: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        Self::File { act, path, source }
    }

    fn is_missing_file(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == ErrorKind::NotFound)
    }
}

impl Loaded {
    /// The active config of a file that is valid.
    ///
    /// # Errors
    /// When it cannot be read or is not TOML.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        Self::from_text(path, &read_text(path, read_patiently)?)
    }

    fn from_text(path: &Path, text: &str) -> Result<Self, Error> {
        let parsed = parse(text).map_err(|reason| Error::Parse {
            path: path.to_owned(),
            reason,
        })?;
        let warning = |warning| format!("{}, {warning}", path.display());
        Ok(Self {
            config: parsed.config,
            problem: None,
            warnings: parsed.warnings.iter().map(warning).collect(),
            text: text.to_owned(),
            set: parsed.set,
            only_reports: parsed.only_reports,
        })
    }

    /// All mistakes in the file, a line for each.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = self.warnings.clone();
        if let Some(problem) = &self.problem {
            remarks.insert(0, error_chain(problem));
        }
        remarks
    }
}

/// Reads the node's config: the file that `BINDGUARD_CONFIG` names, else
/// `/etc/bindguard/config.toml` if it exists. Never fails.
pub fn load() -> Loaded {
    load_by(read_patiently)
}

/// As [`load`], with the caller's function to read a file, or its first bytes up to a limit. For
/// example, the function may never wait for a server.
pub fn load_by(read: impl Fn(&Path, u64) -> io::Result<Vec<u8>>) -> Loaded {
    let (path, is_named) = active_file();
    let mut salvaged_config = Config::default().only_report();
    let reason = match read_text(&path, &read) {
        Err(reason) if reason.is_missing_file() && !is_named => return Loaded::default(),
        Err(reason) => reason,
        Ok(text) => match Loaded::from_text(&path, &text) {
            Ok(loaded) => return loaded,
            Err(reason) => {
                salvaged_config = salvaged(&text);
                reason
            }
        },
    };
    instead(reason, salvaged_config, read)
}

/// The settings if the node's file did not answer in time.
pub fn load_without_file(reason: io::Error) -> Loaded {
    let reason = Error::file("read", &active_file().0, reason);
    instead(reason, Config::default().only_report(), read_patiently)
}

/// The node's config file, and if the environment names it.
fn active_file() -> (PathBuf, bool) {
    match env::var_os(ENVIRONMENT) {
        Some(path) => (path.into(), true),
        None => (DEFAULT_PATH.into(), false),
    }
}

/// The last valid file, where the node keeps one, without repairs; else `config`.
fn instead(
    reason: Error,
    config: Config,
    read: impl FnOnce(&Path, u64) -> io::Result<Vec<u8>>,
) -> Loaded {
    let kept = Path::new(KEPT_PATH);
    let mut instead = Instead::ReportOnly;
    let mut loaded = Loaded {
        config,
        ..Loaded::default()
    };
    if !active_file().1
        && let Ok(text) = read_text(kept, read)
        && let Ok(last) = Loaded::from_text(kept, &text)
    {
        instead = Instead::Kept;
        loaded = last;
        loaded.config = loaded.config.only_report();
    }
    loaded.problem = Some(Unused { instead, reason });
    loaded.only_reports = true;
    loaded
}

/// Keeps a copy of a valid node's config, to be used while the file is invalid. A node without a
/// config keeps nothing.
///
/// # Errors
/// If the file is invalid or the copy cannot be written.
pub fn keep_valid() -> Result<(), Error> {
    let valid = match Loaded::from_file(Path::new(DEFAULT_PATH)) {
        Err(error) if error.is_missing_file() => return Ok(()),
        loaded => loaded?.text,
    };
    let kept = Path::new(KEPT_PATH);
    if read_text(kept, read_patiently).is_ok_and(|old| old == valid) {
        return Ok(());
    }
    replace(kept, &valid).map_err(|source| Error::file("write", kept, source))
}

/// A guard that reads meanwhile finds the old text or the new text.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    // whatever the umask of the caller: guards of any user read the copy
    match DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        Err(_) => {}
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(0o755))?,
    }
    let new = folder.join(format!(".bindguard-{}-config", std::process::id()));
    let written = write_new(&new, text).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        // the error says more than a file that may be left
        let _ = fs::remove_file(&new);
    }
    written
}

fn write_new(path: &Path, text: &str) -> io::Result<()> {
    // a killed process of this pid may have left one
    let _ = fs::remove_file(path);
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.sync_all()
}

fn read_text(
    path: &Path,
    read: impl FnOnce(&Path, u64) -> io::Result<Vec<u8>>,
) -> Result<String, Error> {
    let text = read(path, MAX_SIZE + 1).and_then(|bytes| {
        if bytes.len() as u64 > MAX_SIZE {
            let why = "it is larger than 1 MiB, and so is no config of bindguard's";
            return Err(io::Error::other(why));
        }
        String::from_utf8(bytes).map_err(|_| io::Error::other("it is not text"))
    });
    text.map_err(|source| Error::file("read", path, source))
}

/// Opening a fifo would wait for a writer, with no time limit.
fn read_patiently(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if fs::metadata(path)?.file_type().is_fifo() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is a fifo"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
