//! Real-time signals, `--all`, execs with a user and a directory, on a terminal, and every refusal:
//! the words and the codes of the stock shim.

use bindguard_integration::output::{read_all_output, staying};
use bindguard_integration::prelude::*;
use bindguard_integration::process::on_a_terminal;

const TRAPS: &str = "trap 'echo real-time > /caught' 37; while :; do sleep 0.02; done";

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        for runtime in [Runtime::Stock, Runtime::Bindguard] {
            signals(node, runtime)?;
            execs(node, runtime)?;
            refusals(node, runtime)?;
        }
        names_of_the_shims_own_files(node)?;
        Ok(())
    });
}

on_newest_and_older!(story);

fn signals(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("trap")
        .runtime(runtime)
        .runs(&["sh", "-c", TRAPS])
        .start()?
        .success()?;
    let caught = (0..100).any(|_| {
        // the trap may not be set yet
        let _ = ctr.kill("trap", "37");
        ctr.read("trap", "/caught")
            .is_ok_and(|text| text == "real-time\n")
    });
    ensure!(caught, "{runtime:?}: the signal did not arrive");
    run(ctr.command(&["task", "kill", "--all", "--signal", "KILL", "trap"]))?.success()?;
    ctr.wait_for_status("trap", "STOPPED")?;
    ctr.remove("trap")
}

fn execs(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let exec = |flags: &[&str], words: &[&str]| {
        ctr.command(&[&["task", "exec"], flags, &["host"], words].concat())
    };
    ctr.container("host").runtime(runtime).start()?.success()?;
    let flags = ["--exec-id", "user", "--user", "1000:1001", "--cwd", "/tmp"];
    let ended = read_all_output(exec(
        &flags,
        &staying(&[
            "sh",
            "-c",
            "id -u; id -g; readlink /proc/self/cwd || ls -d $PWD",
        ]),
    ))?
    .success()?;
    ensure!(ended == "1000\n1001\n/tmp\n", "{runtime:?}: {ended:?}");
    let ended = read_all_output(on_a_terminal(&exec(
        &["--exec-id", "pty", "--tty"],
        &staying(&["sh", "-c", "tty; exit 9"]),
    )))?;
    ensure!(
        ended.code() == 9 && ended.stdout.contains("/dev/pts/"),
        "{runtime:?}: {ended:?}"
    );
    ctr.remove("host")
}

fn refusals(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let fails = |words: &[&str], text: &str| -> Result<()> {
        let error = run(ctr.command(&[&["task"], words].concat()))?.failure()?;
        ensure!(
            error.contains(text),
            "{runtime:?}: {words:?}: {error:?} and not {text:?}"
        );
        Ok(())
    };
    ctr.container("no").runtime(runtime).start()?.success()?;
    run(ctr.command(&[
        "task",
        "exec",
        "--detach",
        "--exec-id",
        "e",
        "no",
        "sleep",
        "1000000",
    ]))?
    .success()?;
    fails(
        &["exec", "--exec-id", "e", "no", "true"],
        "id e: already exists",
    )?;
    fails(
        &["exec", "--exec-id", "f", "no", "/no/such/program"],
        "OCI runtime exec failed: exec failed: unable to start",
    )?;
    fails(
        &["exec", "--exec-id", "g", "--cwd", "/no", "no", "true"],
        "OCI runtime exec failed: ",
    )?;
    fails(&["resume", "no"], "cannot resume a")?;
    fails(
        &["kill", "--exec-id", "unknown", "no"],
        "process does not exist unknown: not found",
    )?;
    run(ctr.command(&["task", "kill", "--exec-id", "e", "--signal", "KILL", "no"]))?.success()?;
    let made_again = (0..100).any(|_| {
        // it may not have ended yet
        let _ = run(ctr.command(&["task", "delete", "--exec-id", "e", "no"]));
        run(ctr.command(&["task", "exec", "--exec-id", "e", "no", "true"]))
            .is_ok_and(|exec| exec.success().is_ok())
    });
    ensure!(
        made_again,
        "{runtime:?}: the name of an exec that was killed and deleted stays taken"
    );
    ctr.kill("no", "KILL")?;
    ctr.wait_for_status("no", "STOPPED")?;
    fails(&["kill", "no"], "process already finished: not found")?;
    fails(
        &["exec", "--exec-id", "h", "no", "true"],
        "cannot exec in a",
    )?;
    ctr.remove("no")
}

/// Issue 14: `init.pid` and `shim.pid` are in the bundle, for programs that clean up after a killed
/// shim.
fn names_of_the_shims_own_files(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("named").start()?.success()?;
    let bundle = format!(
        "/run/containerd/io.containerd.runtime.v2.task/{}/named",
        node.name()
    );
    let files = || -> Result<Vec<(PathBuf, Vec<u8>)>> {
        let entries = fs::read_dir(&bundle)?.flatten().map(|entry| entry.path());
        let mut files: Vec<_> = entries
            .filter(|path| path.is_file())
            .map(|path| (path.clone(), fs::read(path)))
            .collect();
        files.sort_by(|one, other| one.0.cmp(&other.0));
        files
            .into_iter()
            .map(|(path, bytes)| Ok((path, bytes?)))
            .collect()
    };
    let before = files()?;
    ensure!(
        before.iter().any(|(path, _)| path.ends_with("init.pid")),
        "{before:?}"
    );
    for exec_id in ["init", "shim", "config", "options"] {
        let exec = ctr.command(&[
            "task",
            "exec",
            "--exec-id",
            exec_id,
            "named",
            "sh",
            "-c",
            "exit 3",
        ]);
        ensure!(run(exec)?.code() == 3);
    }
    let after = files()?;
    let lost: Vec<_> = before
        .iter()
        .filter(|file| !after.contains(file))
        .map(|(path, _)| path)
        .collect();
    ensure!(
        lost.is_empty() && after.len() == before.len(),
        "gone, or another: {lost:?}"
    );
    ctr.remove("named")
}
