//! The users of a program: containers that were created through it, and processes that run it or name it.
//!
//! A program is removed only when it has no users: a container that was created through bindguard's shim, or through
//! bindguard-runtime, is also killed and deleted through it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The folders of running containers' bundles: containerd's, those of Docker's containerd, k3s', k0s' and MicroK8s'.
const TASKS: [&str; 5] = [
    "/run/containerd/io.containerd.runtime.v2.task",
    "/run/docker/containerd/daemon/io.containerd.runtime.v2.task",
    "/run/k3s/containerd/io.containerd.runtime.v2.task",
    "/run/k0s/containerd/io.containerd.runtime.v2.task",
    "/var/snap/microk8s/common/run/containerd/io.containerd.runtime.v2.task",
];

/// The users of the program at `path`, as text; empty if there are none.
pub fn users_of(path: &Path) -> Vec<String> {
    // a process shows its program without links, and its arguments with them
    let resolved = resolved(path);
    let mut users = users_by_name(path);
    if resolved != path {
        users.extend(users_by_name(&resolved));
    }
    users
}

#[expect(clippy::disallowed_methods, reason = "a program, not the source of a container's bind")]
fn resolved(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn users_by_name(path: &Path) -> Vec<String> {
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
        let needed = !users_of(program).is_empty();
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
