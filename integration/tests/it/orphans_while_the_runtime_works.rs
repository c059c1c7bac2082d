//! Issue 14: a container in the host's pid namespace leaves orphans, and the shim inherits them.
//! The shim reaps each orphan at once, also while a call of the runtime runs or hangs: zombies fill
//! the container's pids limit. A process that ends before the runtime reports its pid keeps the
//! exit code.

use bindguard_integration::prelude::*;
use std::collections::BTreeSet;
use std::process;

use bindguard_integration::footprint::parent_of;
use bindguard_integration::runtime::Gate;
use bindguard_integration::shim::{Bundle, Shim};
use containerd_shim_protos::shim::oci::Options;

/// A daemon's way to start a child: the parent ends first.
const ORPHANS: &str = "while :; do (sleep 0.1 &); sleep 0.05; done";
/// So many must come and go.
const ENOUGH: usize = 20;
/// The maximum number of unreaped orphans at any moment.
const AT_ONCE: usize = 10;

fn story(generation: Generation) {
    Setup::on(generation).obedient_runtime().story(|node| {
        let before = Leftovers::of(node)?;
        [Runtime::Stock, Runtime::Bindguard]
            .into_iter()
            .try_for_each(|runtime| orphans(node, runtime))?;
        init_that_ends_before_its_create(node)?;
        before.are_all(node)
    });
}

on_newest_and_older!(story);

/// The first exec hangs before the runtime has begun, the second exec when its process has ended
/// already.
fn orphans(node: &Node, runtime: Runtime) -> Result<()> {
    let (ctr, gate) = (node.ctr(), Gate::of(&node.programs()));
    let namespace = format!("pid:/proc/{}/ns/pid", process::id());
    let host = ctr
        .container("host")
        .runtime(runtime)
        .argument("--with-ns")
        .argument(&namespace);
    host.runs(&["sh", "-c", ORPHANS]).start()?.success()?;
    let shim = parent_of(ctr.pid("host")?)?;

    gate.close_before("exec")?;
    let mut exec = begin_exec(node, "before")?;
    gate.wait_for_call()?;
    orphans_come_and_go(shim).with_context(|| format!("{runtime:?}: the runtime has not begun"))?;
    gate.open()?;
    ensure!(
        exec.wait()?.code() == Some(42),
        "{runtime:?}: the code of an exec that waited"
    );

    gate.close_after("exec")?;
    let mut exec = begin_exec(node, "after")?;
    gate.wait_for_call()?;
    let pid = pid_in_bundle(node, "host", "after.pid")?;
    until(
        &format!("{runtime:?}: the exec that has ended is reaped"),
        || Ok(!is_there(pid)),
    )?;
    orphans_come_and_go(shim)
        .with_context(|| format!("{runtime:?}: the runtime has done its work"))?;
    gate.open()?;
    ensure!(
        exec.wait()?.code() == Some(42),
        "{runtime:?}: the code of an exec that was reaped before its call ended"
    );
    ctr.remove("host")
}

fn begin_exec(node: &Node, exec_id: &str) -> Result<Child> {
    let mut exec = node.ctr().command(&[
        "task",
        "exec",
        "--exec-id",
        exec_id,
        "host",
        "sh",
        "-c",
        "exit 42",
    ]);
    exec.stdin(Stdio::null()).spawn().context("start the exec")
}

/// Waits until enough children of the shim from an earlier check are gone: a zombie would stay.
fn orphans_come_and_go(shim: u32) -> Result<()> {
    let (mut seen, mut gone) = (BTreeSet::new(), BTreeSet::new());
    until("orphans are reaped", || {
        let now = children_of(shim)?;
        gone.extend(seen.difference(&now).copied());
        seen.extend(now);
        Ok(gone.len() >= ENOUGH)
    })
    .with_context(|| format!("{} of {} children have gone", gone.len(), seen.len()))?;
    let zombies: Vec<u32> = children_of(shim)?
        .into_iter()
        .filter(|pid| is_zombie(*pid))
        .collect();
    ensure!(zombies.len() <= AT_ONCE, "zombies: {zombies:?}");
    Ok(())
}

/// The runtime has made the init, which is killed before the runtime returns.
fn init_that_ends_before_its_create(node: &Node) -> Result<()> {
    let gate = Gate::of(&node.programs());
    let bundle = Bundle::create(node, "early", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    gate.close_after("create")?;
    thread::scope(|scope| {
        let create = scope.spawn(|| {
            shim.connect()?
                .create(&bundle.request())
                .context("create it")
        });
        gate.wait_for_call()?;
        let pid: i32 = fs::read_to_string(bundle.path().join("init.pid"))?
            .trim()
            .parse()?;
        kill(Pid::from_raw(pid), Signal::SIGKILL)?;
        let reaped = until("the init is reaped", || Ok(!is_there(pid.unsigned_abs())));
        gate.open()?;
        create
            .join()
            .map_err(|_| anyhow!("the client panicked"))??;
        reaped
    })?;
    let client = shim.connect()?;
    ensure!(
        client.wait("early", "")? == 137,
        "the status of an init that ended before its create"
    );
    client.delete("early", "")?;
    Ok(client.shut_down("early")?)
}

fn children_of(pid: u32) -> Result<BTreeSet<u32>> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).context("list the shim's threads")?;
    let lists = threads
        .flatten()
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    Ok(lists
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect())
}

fn is_there(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// See proc_pid_stat(5).
fn is_zombie(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        stat.rsplit_once(") ")
            .is_some_and(|(_, state)| state.starts_with('Z'))
    })
}

/// The names of the pid files differ between the shims; the ends of the names do not.
fn pid_in_bundle(node: &Node, id: &str, end: &str) -> Result<u32> {
    let bundle = format!(
        "/run/containerd/io.containerd.runtime.v2.task/{}/{id}",
        node.name()
    );
    let files = fs::read_dir(&bundle)
        .with_context(|| format!("read {bundle}"))?
        .flatten()
        .map(|entry| entry.path());
    let file = files
        .into_iter()
        .find(|path| path.to_string_lossy().ends_with(end));
    let text = fs::read_to_string(file.with_context(|| format!("find {end} in {bundle}"))?)?;
    text.trim().parse().context("parse a pid")
}
