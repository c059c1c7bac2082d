//! The files of a bundle that the shim reads and writes.
//!
//! `runtime`, `options.json` and `init.pid` have the names and forms of Go's shim: after a crash,
//! `delete` may have to work on a bundle of Go's shim, or of any version of this shim. These files
//! are written before the first call of the runtime and removed when nothing of the container is
//! left. The shim reads a few fields of `config.json` and never writes it.

mod spec;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bindguard_sys::write_new_file;

pub(crate) use spec::ShimSpec;

use crate::options::Options;
use crate::step::{StepError, failed};

/// The OCI spec.
const CONFIG: &str = "config.json";
/// The options of the container's runtime.
const OPTIONS: &str = "options.json";
/// The runtime's name alone; shims older than `options.json` read it.
const RUNTIME: &str = "runtime";

/// A bundle's directory.
#[derive(Debug, Clone)]
pub(crate) struct Bundle {
    path: PathBuf,
}

impl Bundle {
    /// The bundle at this path. No file is read yet.
    pub(crate) fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// True if nothing is at its path.
    pub(crate) fn is_gone(&self) -> bool {
        let found = self.path.symlink_metadata();
        found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// The mount point of the container's root filesystem.
    pub(crate) fn rootfs(&self) -> PathBuf {
        self.path.join("rootfs")
    }

    /// criu's default working directory: containerd makes this link to a directory on disk.
    pub(crate) fn work(&self) -> PathBuf {
        self.path.join("work")
    }

    /// The runtime writes the pid of the container's init into this file.
    pub(crate) fn init_pid_file(&self) -> PathBuf {
        self.path.join("init.pid")
    }

    /// The runtime writes the pid of an exec into this file. The prefix keeps it from the bundle's
    /// own files: a client may name an exec `init` or `shim`.
    pub(crate) fn exec_pid_file(&self, exec_id: &str) -> PathBuf {
        self.path.join(format!("exec-{exec_id}.pid"))
    }

    /// The shim writes the process of an exec into this file, for the runtime.
    pub(crate) fn exec_spec_file(&self, exec_id: &str) -> PathBuf {
        self.path.join(format!("exec-{exec_id}.json"))
    }

    /// Reads the fields of `config.json` that the shim needs.
    pub(crate) fn spec(&self) -> Result<ShimSpec, StepError> {
        let path = self.path.join(CONFIG);
        let bytes = fs::read(&path).map_err(failed(format!("read {}", path.display())))?;
        ShimSpec::parse(&bytes).map_err(failed(parse(&path)))
    }

    /// Saves the options of this container's runtime for `delete`.
    pub(crate) fn write_options(&self, options: &Options) -> Result<(), StepError> {
        let path = self.path.join(OPTIONS);
        let json = serde_json::to_vec(options).map_err(failed(parse(&path)))?;
        write(&path, &json)?;
        write(&self.path.join(RUNTIME), options.binary_name.as_bytes())
    }

    /// The options that a shim saved here; defaults if there are none.
    pub(crate) fn read_options(&self) -> Result<Options, StepError> {
        let path = self.path.join(OPTIONS);
        let mut options: Options = match read_if_there(&path)? {
            Some(json) if !json.trim().is_empty() => {
                serde_json::from_str(&json).map_err(failed(parse(&path)))?
            }
            _ => Options::default(),
        };
        if let Some(runtime) = read_if_there(&self.path.join(RUNTIME))? {
            options.binary_name = runtime.trim().to_owned();
        }
        Ok(options)
    }

    /// Records that the runtime no longer knows the container, and that the root filesystem is
    /// unmounted.
    pub(crate) fn settle(&self) {
        for file in [
            self.init_pid_file(),
            self.path.join(OPTIONS),
            self.path.join(RUNTIME),
        ] {
            // A file that stays only makes `delete` check again.
            let _ = fs::remove_file(file);
        }
    }

    /// True if `delete` has nothing to do. In a bundle without options no runtime was called yet,
    /// or everything is removed.
    pub(crate) fn is_settled(&self) -> bool {
        let has = |name: &str| self.path.join(name).try_exists();
        matches!(
            (has(CONFIG), has(OPTIONS), has(RUNTIME)),
            (Ok(true), Ok(false), Ok(false))
        )
    }

    /// The pid in a pid-file.
    pub(crate) fn read_pid(path: &Path) -> Result<u32, StepError> {
        let text = fs::read_to_string(path).map_err(failed(format!("read {}", path.display())))?;
        match text.trim().parse() {
            Ok(pid) if pid > 0 => Ok(pid),
            _ => Err(failed(parse(path))(format!("{text:?} is no pid"))),
        }
    }
}

fn parse(path: &Path) -> String {
    format!("parse {}", path.display())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), StepError> {
    write_beside(path, bytes).map_err(failed(format!("write {}", path.display())))
}

/// Writes a file whole or not at all: readers never see a partial file.
pub(crate) fn write_beside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    let beside = path.with_file_name(name);
    write_new_file(&beside, bytes, 0o644)?;
    fs::rename(&beside, path)
}

fn read_if_there(path: &Path) -> Result<Option<String>, StepError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(failed(format!("read {}", path.display()))(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_survive_the_bundle_and_a_bare_bundle_has_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::at(dir.path());
        assert_eq!(bundle.read_options().unwrap(), Options::default());
        let options = Options {
            binary_name: "crun".into(),
            root: "/r".into(),
            ..Default::default()
        };
        bundle.write_options(&options).unwrap();
        assert_eq!(bundle.read_options().unwrap(), options);
        assert_eq!(
            fs::read_to_string(dir.path().join("runtime")).unwrap(),
            "crun"
        );
    }

    #[test]
    fn a_bundle_is_settled_before_the_runtime_is_called_and_after_all_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::at(dir.path());
        assert!(!bundle.is_settled(), "no spec: unknown");
        fs::write(dir.path().join(CONFIG), "{}").unwrap();
        assert!(bundle.is_settled());
        bundle.write_options(&Options::default()).unwrap();
        assert!(!bundle.is_settled());
        fs::remove_file(dir.path().join(OPTIONS)).unwrap();
        assert!(!bundle.is_settled(), "an older shim's");
        fs::write(bundle.init_pid_file(), "7").unwrap();
        bundle.settle();
        assert!(bundle.is_settled());
        assert!(!bundle.init_pid_file().try_exists().unwrap());
    }

    #[test]
    fn a_pid_file_must_hold_a_pid() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("init.pid");
        fs::write(&file, "4711\n").unwrap();
        assert_eq!(Bundle::read_pid(&file).unwrap(), 4711);
        fs::write(&file, "").unwrap();
        let error = Bundle::read_pid(&file).unwrap_err();
        assert_eq!(error.to_string(), parse(&file));
    }
}
