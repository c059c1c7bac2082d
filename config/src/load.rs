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
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;

use crate::parse::{InvalidToml, Warning, parse};
use crate::{Config, DEFAULT_PATH, ENVIRONMENT, Error, KEPT_PATH};

/// A larger file is no config, and reading it would waste time.
const MAX_SIZE: u64 = 1 << 20;

/// The active config, and the mistakes of the file.
#[derive(Debug)]
pub struct Loaded {
    pub config: Config,
    /// The reason for ignoring the config file. A missing file is a reason only if the environment
    /// names the file.
    pub problem: Option<Unused>,
    /// The parts of the active file that are not used.
    pub warnings: Vec<FileWarning>,
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

/// A part of a file that is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileWarning {
    pub path: PathBuf,
    /// The line and the mistake.
    pub warning: Warning,
}

impl fmt::Display for FileWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.path.display(), self.warning)
    }
}

impl Loaded {
    /// The active config of a file that is valid.
    ///
    /// # Errors
    /// When it cannot be read or is not TOML.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let text = read_text(path, read_patiently)?;
        Self::from_text(path, &text).map_err(|reason| reason.of_file(path))
    }

    fn from_text(path: &Path, text: &str) -> Result<Self, InvalidToml> {
        let parsed = parse(text)?;
        let mut loaded = Self::from(Config::of(parsed.settings));
        for warning in parsed.warnings {
            let path = path.to_owned();
            loaded.warnings.push(FileWarning { path, warning });
        }
        loaded.text = text.to_owned();
        loaded.set = parsed.set;
        loaded.only_reports = parsed.only_reports;
        Ok(loaded)
    }

    /// All mistakes in the file, a line for each.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if let Some(problem) = &self.problem {
            remarks.push(error_chain(problem));
        }
        remarks.extend(self.warnings.iter().map(FileWarning::to_string));
        remarks
    }
}

/// A config that no file sets.
impl From<Config> for Loaded {
    fn from(config: Config) -> Self {
        Self {
            config,
            problem: None,
            warnings: Vec::new(),
            text: String::new(),
            set: Vec::new(),
            only_reports: false,
        }
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
    let named = env::var_os(ENVIRONMENT).map(PathBuf::from);
    let path = named.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
    let text = match read_text(path, &read) {
        Ok(text) => text,
        Err(Error::File { source, .. })
            if named.is_none() && source.kind() == io::ErrorKind::NotFound =>
        {
            return Config::default().into();
        }
        Err(reason) => return instead(reason, None, named.is_none().then_some(&read)),
    };
    Loaded::from_text(path, &text).unwrap_or_else(|reason| {
        instead(
            reason.of_file(path),
            Some(&text),
            named.is_none().then_some(&read),
        )
    })
}

/// The settings if the node's file did not answer in time.
pub fn load_without_file(reason: io::Error) -> Loaded {
    let named = env::var_os(ENVIRONMENT).map(PathBuf::from);
    let path = named.clone().unwrap_or_else(|| DEFAULT_PATH.into());
    instead(
        Error::File {
            act: "read",
            path,
            source: reason,
        },
        None,
        named.is_none().then_some(read_patiently),
    )
}

/// `text` is the content of the file, if the file could be read. `read` reads the last valid file,
/// where the node keeps one.
fn instead(
    reason: Error,
    text: Option<&str>,
    read: Option<impl Fn(&Path, u64) -> io::Result<Vec<u8>>>,
) -> Loaded {
    let kept = Path::new(KEPT_PATH);
    let last = read.and_then(|read| Loaded::from_text(kept, &read_text(kept, read).ok()?).ok());
    let (instead, loaded) = match last {
        Some(last) => {
            let config = Config::of(last.config.settings.only_report());
            (Instead::Kept, Loaded { config, ..last })
        }
        None => (Instead::ReportOnly, Config::report_only(text).into()),
    };
    Loaded {
        problem: Some(Unused { instead, reason }),
        only_reports: true,
        ..loaded
    }
}

/// Keeps a copy of a valid node's config, to be used while the file is invalid. A node without a
/// config keeps nothing.
///
/// # Errors
/// If the file is invalid or the copy cannot be written.
pub fn keep_valid() -> Result<(), Error> {
    let path = Path::new(DEFAULT_PATH);
    let text = match read_text(path, read_patiently) {
        Ok(text) => text,
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    Config::parse(&text).map_err(|reason| reason.of_file(path))?;
    let kept = Path::new(KEPT_PATH);
    if read_text(kept, read_patiently).is_ok_and(|old| old == text) {
        return Ok(());
    }
    replace(kept, &text).map_err(|source| Error::File {
        act: "write",
        path: kept.to_owned(),
        source,
    })
}

/// A guard that reads meanwhile finds the old text or the new text.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    // whatever the umask of the caller: guards of any user read the copy
    if let Err(error) = DirBuilder::new().mode(0o755).create(folder) {
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(error);
        }
    } else {
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
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
    let failed = |source| Error::File {
        act: "read",
        path: path.to_owned(),
        source,
    };
    let bytes = read(path, MAX_SIZE + 1).map_err(failed)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(failed(io::Error::other(
            "it is larger than 1 MiB, and so is no config of bindguard's",
        )));
    }
    String::from_utf8(bytes).map_err(|_| failed(io::Error::other("it is not text")))
}

/// Opening a fifo would wait for a writer, with no time limit.
fn read_patiently(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if fs::metadata(path)?.file_type().is_fifo() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a fifo"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
