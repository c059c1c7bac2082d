//! The three programs: their source, their destination, and the conditions for their removal.
//!
//! They are opened first, because with `--root` their folder is out of reach afterwards. They are removed only when nothing
//! needs them: a container that was created through bindguard's shim, or through bindguard-runtime, is also killed and deleted
//! through it.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::change::Change;
use super::containerd::USUAL_FOLDERS;

/// The shim.
pub const SHIM: &str = "containerd-shim-bindguard-v2";
/// The OCI runtime wrapper.
pub const GUARD: &str = "bindguard-runtime";
/// This program.
pub const CLI: &str = "bindguard";

/// The folders of running containers' bundles: containerd's, and those of Docker's containerd.
const TASKS: [&str; 2] =
    ["/run/containerd/io.containerd.runtime.v2.task", "/run/docker/containerd/daemon/io.containerd.runtime.v2.task"];

/// The programs, in memory.
#[derive(Debug)]
pub struct Programs {
    folder: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Programs {
    /// The programs beside this one.
    pub fn beside_this_one() -> Result<Self> {
        let own = env::current_exe().context("find out where this program is")?;
        let folder = own.parent().unwrap_or(Path::new("/")).to_owned();
        let read = |name: &'static str| {
            let path = if name == CLI { own.clone() } else { folder.join(name) };
            Ok((
                name,
                fs::read(&path)
                    .with_context(|| format!("read {}, which has to be beside this program", path.display()))?,
            ))
        };
        let files = [SHIM, GUARD, CLI].into_iter().map(read).collect::<Result<_>>()?;
        Ok(Self { folder, files })
    }

    /// The default folder: the current one if services search it and there is no other root, else /usr/local/bin.
    pub fn usual_place(&self, in_another_root: bool) -> PathBuf {
        let is_found = USUAL_FOLDERS.iter().any(|folder| self.folder == Path::new(folder));
        if is_found && !in_another_root { self.folder.clone() } else { PathBuf::from("/usr/local/bin") }
    }

    /// The changes that put them into `prefix`.
    pub fn into_prefix(self, prefix: &Path) -> Result<Vec<Change>> {
        self.files.into_iter().map(|(name, bytes)| Change::of(&prefix.join(name), Some(bytes), 0o755)).collect()
    }
}

/// The shim and the wrapper beside this program, from any installer.
pub fn beside_this_one() -> Vec<PathBuf> {
    let own = env::current_exe().ok();
    let folder = own.as_deref().and_then(Path::parent);
    folder.into_iter().flat_map(|folder| [SHIM, GUARD].map(|name| folder.join(name))).collect()
}

/// The users of the program at `path`, as text; empty if there are none.
pub fn needed_by(path: &Path) -> Vec<String> {
    let bundles = TASKS.iter().flat_map(|tasks| folders(Path::new(tasks))).flat_map(|namespace| folders(&namespace));
    let of_bundle = |bundle: PathBuf| {
        // containerd's shim records its runtime's path in the bundle, and calls it until the container is deleted
        let runtime = fs::read(bundle.join("runtime")).unwrap_or_default();
        (runtime == path.as_os_str().as_bytes()).then(|| format!("the container of {}", bundle.display()))
    };
    let processes =
        folders(Path::new("/proc")).into_iter().filter(|process| is_number(process) && *process != own_process());
    let of_process = |process: PathBuf| {
        let runs = fs::read_link(process.join("exe")).is_ok_and(|program| program == path);
        // conmon has its runtime's path among its arguments
        let names = || {
            fs::read(process.join("cmdline"))
                .unwrap_or_default()
                .split(|byte| *byte == 0)
                .any(|word| word == path.as_os_str().as_bytes())
        };
        ((runs || names()) && has_this_program(&process, path))
            .then(|| format!("process {}", process.file_name().unwrap_or_default().to_string_lossy()))
    };
    bundles.filter_map(of_bundle).chain(processes.filter_map(of_process)).collect()
}

/// Another mount namespace, a container's, may have its own program at that path. An unreadable file counts as this one.
fn has_this_program(process: &Path, path: &Path) -> bool {
    let file = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let Ok(this) = file(path) else { return true };
    match file(&process.join("root").join(path.strip_prefix("/").unwrap_or(path))) {
        Ok(other) => this == other,
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

fn own_process() -> PathBuf {
    Path::new("/proc").join(std::process::id().to_string())
}

fn is_number(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().iter().all(u8::is_ascii_digit))
}

fn folders(path: &Path) -> Vec<PathBuf> {
    path.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that prints a line when it runs, and stays until its stdin ends.
    fn with_argument(before: &str, program: &Path) -> Option<Child> {
        let script = format!("{before} echo there && read end");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, "sh"]).arg(program);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        if said.is_empty() {
            child.wait().unwrap();
            return None;
        }
        Some(child)
    }

    fn needed_beside(before: &str, program: &Path) -> Option<bool> {
        let mut child = with_argument(before, program)?;
        let needed = !needed_by(program).is_empty();
        drop(child.stdin.take());
        child.wait().unwrap();
        Some(needed)
    }

    #[test]
    fn a_program_of_that_name_in_another_mount_namespace_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("bindguard-runtime");
        fs::write(&program, "").unwrap();
        let Some(same) = needed_beside("", &program) else {
            eprintln!("SKIPPED: no mount namespace of its own: this needs CAP_SYS_ADMIN");
            return;
        };
        assert!(same);
        let cover = format!("mount -t tmpfs cover {} &&", folder.path().display());
        assert_eq!(needed_beside(&cover, &program), Some(false), "nothing is there");
        let another = format!("{cover} touch {} &&", program.display());
        assert_eq!(needed_beside(&another, &program), Some(false), "another one is there");
    }
}
