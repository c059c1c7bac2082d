//! Who needs bindguard: pods of the handler, containers with the name in the database of Docker or Podman,
//! and users of a program.
//!
//! containerd and CRI-O look the handler of a pod up at each start of a container; containerd 1.7 can also
//! need it to report or stop a sandbox (docs/decisions/0037). A pod without a handler in its sandbox goes
//! on with the node's default runtime. A program is removed only when it has no users: a container that
//! was created through bindguard's shim, or through bindguard-runtime, is also killed and deleted through
//! it.
//!
//! Processes of containers are checked, too. A container can block reads of its root directory and of its
//! command line. So no file below a root directory is read. Only the command line of a conmon is read,
//! with a time limit.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::{fs, process};

use anyhow::{Context, Result, ensure};
use bindguard_core::handover::{CLI, RUNTIME, SHIM};
use bindguard_core::mount_table::MountTable;
use bindguard_operator::containers::tasks;
use bindguard_operator::cri::{PodSandbox, SandboxFilter, query};
use bindguard_operator::node::{pids, pids_named, uid_of};
use bindguard_operator::root_program::{RootProgram, output_of};
use bindguard_operator::terminal::print_remark;
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::process_files::{ProcessFile, arguments_of, links};
use bindguard_sys::read_mount_table;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::change::{Doing, Owner, canonical, read};
use crate::running::{
    containerds, crio_socket, daemon_of, docker_info, option, place_of, query_containerd,
};

/// The annotation of a sandbox's spec with its handler; empty for the node's default runtime.
const CRIO_HANDLER: &str = "io.kubernetes.cri-o.RuntimeHandler";

/// The names of the pods that were created with the handler `bindguard` and still have a sandbox.
///
/// # Errors
/// If the daemon runs and does not list its sandboxes.
pub fn pods_with_handler(owner: Owner) -> Result<Vec<String>> {
    let mut found = Vec::new();
    if owner == Owner::Containerd {
        for containerd in containerds() {
            let sandboxes = query_containerd(&containerd, async |cri| {
                cri.sandboxes(SandboxFilter::default()).await
            });
            let sandboxes = sandboxes.with_context(|| {
                format!("list the pods of containerd, process {}", containerd.pid)
            })?;
            found.extend(sandboxes.unwrap_or_default());
        }
    } else if owner == Owner::Crio
        && let Some(crio) = daemon_of(owner)
    {
        let socket = crio_socket(&crio);
        found = query(&socket, async |cri| {
            cri.sandboxes(SandboxFilter::default()).await
        })
        .context("list the pods of CRI-O")?;
        for sandbox in &mut found {
            let handler = crio_handler(&socket, &sandbox.id);
            sandbox.runtime_handler = handler
                .with_context(|| format!("find the handler of CRI-O's pod {}", sandbox.id))?;
        }
    }
    found.retain(|sandbox: &PodSandbox| sandbox.runtime_handler == RUNTIME);
    let mut names = BTreeSet::new();
    for PodSandbox { metadata: pod, .. } in found {
        names.insert(format!("{}/{}", pod.namespace, pod.name));
    }
    Ok(names.into_iter().collect())
}

/// CRI-O leaves the handler out of its list and its status, and records it in the sandbox's spec.
fn crio_handler(socket: &Path, sandbox: &str) -> Result<String> {
    let info = query(socket, async |cri| cri.sandbox_info(sandbox).await)?;
    let info = json_info(&info)?;
    let handler = info["runtimeSpec"]["annotations"][CRIO_HANDLER].as_str();
    let handler = handler.context("its spec names no handler")?;
    Ok(handler.to_owned())
}

/// The runtime's own facts about a sandbox.
fn json_info(info: &str) -> Result<Value> {
    serde_json::from_str(info).context("read the answer's info as JSON")
}

/// Ends the sandbox of this process, if bindguard's shim supervises it: the kubelet then makes a
/// new sandbox, under the present default runtime. Otherwise this process would need the programs
/// for ever.
///
/// `StopPodSandbox` of the CRI would end this process first, and containerd stops nothing more once
/// its client is gone. So the sandbox's first process is killed.
///
/// # Errors
/// If containerd does not know the sandbox.
pub fn leave_own_sandbox() -> Result<()> {
    // in a pod with the node's processes, the shim is the parent of a container's first process
    let words = arguments_of(&[parent_id()]).pop().and_then(Result::ok);
    let words = words.unwrap_or_default();
    let is_own_shim = |program: &String| Path::new(program).file_name() == Some(OsStr::new(SHIM));
    let sandbox = option(&words, &["id"]).filter(|_| words.first().is_some_and(is_own_shim));
    let (Some(sandbox), Some(containerd)) = (sandbox, daemon_of(Owner::Containerd)) else {
        return Ok(());
    };
    print_remark(
        "this pod runs under bindguard's shim: ending its sandbox; the kubelet makes another one",
    );
    let find = || {
        let info = query_containerd(&containerd, async |cri| cri.sandbox_info(&sandbox).await)?;
        let info = json_info(&info.context("containerd has no CRI")?)?;
        let pid = info["pid"].as_i64().context("the info has no pid")?;
        let pid = i32::try_from(pid).context("the pid is too large")?;
        Pid::from_raw(pid).context("it has no process")
    };
    let pid = find().with_context(|| format!("find the process of the sandbox {sandbox}"))?;
    kill_process(pid, Signal::KILL).with_context(|| format!("end the sandbox {sandbox}"))
}

/// dockerd creates this folder at its start, with a folder for each container.
const CONTAINERS: &str = "containers";
/// The length of an id in Docker's own output.
const SHORT_ID: usize = 12;

/// The data root, if a dockerd runs and names it.
pub fn docker_root() -> Option<PathBuf> {
    root_of(&docker_info(&daemon_of(Owner::Docker)?).ok()?).ok()
}

fn root_of(info: &Value) -> Result<PathBuf> {
    let root = info["DockerRootDir"].as_str();
    let root = root.context("read dockerd's answer: it names no data root")?;
    Ok(PathBuf::from(root))
}

/// The names of Docker's containers with the runtime `bindguard`. Without dockerd: `recorded` is the
/// data root that a running dockerd named earlier, `usual` is that of a dockerd which never ran.
///
/// # Errors
/// If they are not known, or if the running dockerd still gives the name to new containers.
pub fn docker_containers(recorded: Option<&Path>, usual: &Path) -> Result<Vec<String>> {
    if let Some(dockerd) = daemon_of(Owner::Docker) {
        let info = docker_info(&dockerd)?;
        // a container that is made after the database was read is not in the answer
        ensure!(
            info["DefaultRuntime"] != RUNTIME,
            "dockerd gives the name to each new container until it is restarted"
        );
        return containers_below(&root_of(&info)?);
    }
    if recorded.is_none()
        && let Err(error) = fs::symlink_metadata(usual.join(CONTAINERS))
        && error.kind() == ErrorKind::NotFound
    {
        // it never ran
        return Ok(Vec::new());
    }
    containers_below(recorded.unwrap_or(usual))
}

fn containers_below(root: &Path) -> Result<Vec<String>> {
    let folder = root.join(CONTAINERS);
    let listing = "list Docker's containers in";
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).doing(listing, &folder)? {
        let entry = entry.doing(listing, &folder)?;
        if !entry.file_type().doing(listing, &folder)?.is_dir() {
            continue;
        }
        let file = entry.path().join("hostconfig.json");
        // without this file, dockerd uses its default runtime
        let Some(bytes) = read(&file)? else {
            continue;
        };
        let config: HostConfig = serde_json::from_slice(&bytes).doing("parse", &file)?;
        if config.runtime == RUNTIME {
            names.push(name_of(&entry.path()));
        }
    }
    names.sort();
    Ok(names)
}

#[derive(serde::Deserialize)]
struct HostConfig {
    #[serde(default, rename = "Runtime")]
    runtime: String,
}

fn name_of(container: &Path) -> String {
    let bytes = fs::read(container.join("config.v2.json")).unwrap_or_default();
    let config: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    if let Some(name) = config["Name"].as_str() {
        return name.trim_start_matches('/').to_owned();
    }
    let id = container.file_name().unwrap_or_default().to_string_lossy();
    id.chars().take(SHORT_ID).collect()
}

/// The names of root's Podman containers with the runtime `bindguard`.
///
/// # Errors
/// If Podman does not list them.
pub fn podman_containers() -> Result<Vec<String>> {
    let found = RootProgram::find(Path::new("podman"), None)?;
    let podman = found.context("find podman: it is not on PATH")?;
    let listed = podman.output(&["ps", "--all", "--quiet", "--no-trunc"])?;
    let mut names = Vec::new();
    if listed.trim().is_empty() {
        return Ok(names);
    }
    let format = "{{.OCIRuntime}} {{.Name}}";
    let mut inspect = podman.command();
    inspect.args(["container", "inspect", "--format", format]);
    inspect.args(listed.split_whitespace());
    let inspected = output_of(inspect).context("run podman container inspect")?;
    for line in inspected.lines() {
        if let Some((RUNTIME, name)) = line.split_once(' ') {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// The supervisor of Podman and CRI-O. A conmon's arguments contain its runtime's path.
const CONMON: &str = "conmon";

/// A user of a program.
#[derive(Debug)]
pub struct ProgramUser {
    /// The container, by its bundle, or the process.
    pub name: String,
    /// The id of the container, or of the pod's sandbox.
    pub id: Option<String>,
}

/// The users of these programs; empty if there are none.
pub fn users_of(programs: &[PathBuf]) -> Vec<ProgramUser> {
    let mut names = Vec::new();
    // no container needs the command line
    for program in programs.iter().filter(|program| !program.ends_with(CLI)) {
        // /proc/PID/exe has no links, arguments may have links
        names.extend([program.clone(), canonical(program)]);
    }
    let mut users = Vec::new();
    for bundle in tasks(Path::new("/")) {
        // containerd's shim records its runtime's path in the bundle, and calls it until the container
        // is deleted
        let runtime = read(&bundle.join("runtime")).ok().flatten();
        let runtime = runtime.unwrap_or_default();
        if names
            .iter()
            .any(|name| name.as_os_str().as_bytes() == runtime)
        {
            let id = bundle.file_name().and_then(OsStr::to_str);
            users.push(ProgramUser {
                name: format!("the container of {}", bundle.display()),
                id: id.map(str::to_owned),
            });
        }
    }
    let processes = processes_that_name(&names);
    for (pid, words) in processes.iter().zip(arguments_of(&processes)) {
        let mut name = format!("process {pid}");
        if let Some(user @ 1..) = uid_of(*pid) {
            name += &format!(" of user {user}");
        }
        let id = option(&words.unwrap_or_default(), &["id", "c", "cid"]);
        users.push(ProgramUser { name, id });
    }
    users
}

/// The processes that run one of these programs, or are a conmon with its path as an argument. A
/// user may run any program; only a shim or a conmon of a user can supervise a rootless container.
fn processes_that_name(names: &[PathBuf]) -> Vec<u32> {
    let table = read_mount_table().ok();
    let mut found = Vec::new();
    let mut pids = pids();
    pids.retain(|pid| *pid != process::id());
    let programs: Vec<_> = pids
        .iter()
        .map(|pid| ProcessFile::of(*pid, "exe"))
        .collect();
    for (pid, program) in pids.into_iter().zip(links(&programs)) {
        let program = program.unwrap_or_default();
        let program = program.as_os_str().as_bytes();
        // The kernel marks the link of a process whose program an upgrade replaced.
        let program = program.strip_suffix(b" (deleted)").unwrap_or(program);
        let is_user = names.iter().any(|name| {
            name.as_os_str().as_bytes() == program
                && (program.ends_with(SHIM.as_bytes()) || uid_of(pid) == Some(0))
                && has_this_program(pid, name, table.as_ref())
        });
        if is_user {
            found.push(pid);
        }
    }
    let mut conmons = pids_named(CONMON);
    conmons.retain(|pid| *pid != process::id() && !found.contains(pid));
    for (pid, words) in conmons.iter().zip(arguments_of(&conmons)) {
        let is_user = names.iter().any(|name| {
            // a process that does not answer may name each program
            let is_named = words.as_ref().map_or(true, |words| {
                words.iter().any(|word| Path::new(word).as_os_str() == name)
            });
            is_named && has_this_program(*pid, name, table.as_ref())
        });
        if is_user {
            found.push(*pid);
        }
    }
    found
}

/// A container's mount namespace may have a different program at `path`. The mount tables show
/// whether both paths are the same place of the same filesystem. If a table is unreadable, a living
/// process counts as a user.
fn has_this_program(pid: u32, path: &Path, own: Option<&MountTable>) -> bool {
    let Ok(process) = HeldProcess::open(pid) else {
        return false;
    };
    let theirs = process.mounts().ok();
    let place = |table: Option<&MountTable>| place_of(path, table?);
    match (place(own), place(theirs.as_ref())) {
        (Some(own), Some(theirs)) => own == theirs,
        (_, None) => process.is_alive(),
        (None, Some(_)) => true,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]
    use super::*;
    use bindguard_testing::held_memory::{Holder, blocks_readers};
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    #[test]
    fn an_entry_that_is_not_understood_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        assert!(containers_below(root.path()).is_err(), "an unmounted disk");
        let write = |id: &str, file: &str, text: &str| {
            let folder = root.path().join("containers").join(id);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(file), text).unwrap();
        };
        write("a", "hostconfig.json", "{\"Runtime\":\"bindguard\"}");
        write("a", "config.v2.json", "{\"Name\":\"/web\"}");
        write(
            "0123456789abcdef",
            "hostconfig.json",
            "{\"Runtime\":\"bindguard\"}",
        );
        write("b", "hostconfig.json", "{\"Runtime\":\"runc\"}");
        write("c", "hostconfig.json", "{}");
        write("d", "config.v2.json", "{\"Name\":\"/removed\"}");
        assert_eq!(
            containers_below(root.path()).unwrap(),
            ["0123456789ab", "web"]
        );
        write("b", "hostconfig.json", "{\"Runtime\":");
        assert!(containers_below(root.path()).is_err());
    }

    /// A conmon that prints a line when it runs, and stays until its stdin ends.
    fn with_argument(before: &str, program: &Path) -> Option<Child> {
        let script = format!("{before} echo there && read end");
        let bin = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/bin/sh", bin.path().join(CONMON)).unwrap();
        let mut command = Command::new("unshare");
        command
            .arg("--mount")
            .arg(bin.path().join(CONMON))
            .args(["-c", &script, "sh"])
            .arg(program);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        if said.is_empty() {
            child.wait().unwrap();
            return None;
        }
        Some(child)
    }

    fn needed_beside(before: &str, program: &Path) -> Option<bool> {
        let mut child = with_argument(before, program)?;
        let needed = !users_of(&[program.to_owned()]).is_empty();
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
        assert_eq!(
            needed_beside(&cover, &program),
            Some(false),
            "nothing is there"
        );
        let another = format!("{cover} touch {} &&", program.display());
        assert_eq!(
            needed_beside(&another, &program),
            Some(false),
            "another one is there"
        );
    }

    /// Its owner keeps it: the program stays, and the command ends.
    #[test]
    fn a_conmon_that_holds_its_memory_keeps_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("bindguard-runtime");
        fs::write(&program, "").unwrap();
        let Some(holder) = Holder::start(c"conmon", || {}) else {
            return;
        };
        assert!(
            blocks_readers(holder.pid()),
            "the process does not hold its memory"
        );
        assert!(is_user(&program, &holder));
    }

    fn is_user(program: &Path, holder: &Holder) -> bool {
        let users = users_of(&[program.to_owned()]);
        let name = format!("process {}", holder.pid());
        users
            .iter()
            .any(|user| user.name == name && user.id.is_none())
    }

    #[test]
    fn a_process_that_holds_its_memory_is_no_user() {
        let Some(holder) = Holder::start(c"app", || {}) else {
            return;
        };
        assert!(
            blocks_readers(holder.pid()),
            "the process does not hold its memory"
        );
        assert!(!is_user(Path::new("/no/such/program"), &holder));
    }
}
