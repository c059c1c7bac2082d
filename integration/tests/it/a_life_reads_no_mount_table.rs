//! From its start to its removal a container takes three runs of the runtime, and the runtime alone
//! reads a mount table for it: bindguard does nothing that would cost more on a node with more
//! mounts, and saves containerd from it, but for containerd 1.7, which reads the table before it
//! removes a bundle whatever is there.

use bindguard_integration::prelude::*;
use bindguard_integration::privilege;

/// The names of the runtime's processes. runc executes itself again to prepare a container.
const RUNTIME: [&str; 3] = ["runc", "exe", "true"];

fn works(generation: Generation) {
    // being traced takes time
    Setup::on(generation)
        .policy("[guard]\ndeadline-ms = 60000\n")
        .story(story);
}

on_newest_and_older!(works);

fn story(node: &Node) -> Result<()> {
    if !privilege::has_program("strace") {
        privilege::skipped("no strace");
        return Ok(());
    }
    let trace = node.disk().join("trace");
    let mut tracer = attach(containerd(node)?, &trace)?;
    node.ctr()
        .container("short")
        .runs(&["true"])
        .run()?
        .success()?;
    until("the shim has ended", || Ok(node.shims()?.is_empty()))?;
    kill(Pid::from_raw(i32::try_from(tracer.id())?), Signal::SIGTERM).context("end strace")?;
    tracer.wait().context("wait for strace")?;
    let trace = fs::read_to_string(&trace).context("read the trace")?;

    let runs: Vec<&str> = trace.lines().filter_map(run_of_runtime).collect();
    ensure!(
        runs == ["create", "start", "delete"],
        "the runtime was called for {runs:?}"
    );
    let readers: Vec<&str> = trace
        .lines()
        .filter(|line| line.contains("/mountinfo\""))
        .filter_map(name)
        .collect();
    let of_1_7: &[&str] = if node.generation() == Generation::V1_7 {
        &["containerd"]
    } else {
        &[]
    };
    let may = |reader: &&str| {
        RUNTIME.iter().any(|name| reader.starts_with(name)) || of_1_7.contains(reader)
    };
    ensure!(
        !readers.is_empty(),
        "the trace shows no process that reads a mount table"
    );
    ensure!(
        readers.iter().all(may),
        "mount tables were read by {readers:?}"
    );
    Ok(())
}

/// Follows containerd and what it starts from now on.
fn attach(pid: u32, trace: &Path) -> Result<Child> {
    let mut strace = Command::new("strace");
    strace
        .args([
            "-f",
            "-qq",
            "--decode-pids=comm",
            "-s",
            "256",
            "-e",
            "trace=open,openat,execve",
            "-o",
        ])
        .arg(trace);
    strace.args(["-p", &pid.to_string()]).stdin(Stdio::null());
    let tracer = strace.spawn().context("start strace")?;
    until("every thread of containerd is traced", || {
        let threads =
            fs::read_dir(format!("/proc/{pid}/task")).context("list containerd's threads")?;
        let status = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("status"));
        Ok(threads
            .flatten()
            .all(|thread| status(thread).is_ok_and(|text| !text.contains("TracerPid:\t0\n"))))
    })?;
    Ok(tracer)
}

fn containerd(node: &Node) -> Result<u32> {
    let is_containerd = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "containerd\n")
    };
    node.all_processes()
        .into_iter()
        .find(is_containerd)
        .context("find containerd")
}

/// `123<containerd-shim> execve("/PATH/runc", ["/PATH/runc", "--root", ..., "create", ...`: the
/// verb.
fn run_of_runtime(line: &str) -> Option<&str> {
    let (program, words) = line.split_once(" execve(\"")?.1.split_once("\", [")?;
    let verb = ["create", "start", "delete", "kill", "state"].into_iter();
    program
        .ends_with("/runc")
        .then(|| {
            verb.into_iter()
                .find(|verb| words.contains(&format!("\"{verb}\"")))
        })
        .flatten()
}

/// `123<NAME> openat(...`.
fn name(line: &str) -> Option<&str> {
    Some(line.split_once('<')?.1.split_once('>')?.0)
}
