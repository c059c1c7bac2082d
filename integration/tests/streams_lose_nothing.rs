//! A lot through a pipe and through a terminal, a reader that is slow, and one that never reads: every byte arrives, and
//! nobody waits for somebody else's reader.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bindguard_integration::process::{run, run_on_a_terminal};
use bindguard_integration::{Ctr, Generation, Node, Setup, on_every_generation};

const MANY: usize = 30_000_000;

fn story(generation: Generation) {
    Setup::on(generation).story(tell);
}

on_every_generation!(story);

fn tell(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    let zeros = format!("head -c {MANY} /dev/zero");
    let out = ctr.container("out").runs(&["sh", "-c", &zeros]).command(&["--rm"]);
    ensure!(counted(out, "wc -c")? == MANY, "bytes of stdout are lost");
    let slow = ctr.container("slow").runs(&["sh", "-c", "head -c 300000 /dev/zero"]).command(&["--rm"]);
    ensure!(counted(slow, "(sleep 0.5; wc -c)")? == 300_000, "a slow reader loses bytes");
    // each terminal on the way adds a \r
    let lines = ctr.container("pty").runs(&["sh", "-c", "n=0; while [ $n -lt 20000 ]; do n=$((n + 1)); echo $n; done"]);
    let printed = run_on_a_terminal(&lines.command(&["--rm", "--tty"]))?.success()?;
    let tail = &printed[printed.len().saturating_sub(40)..];
    let count = printed.lines().count();
    ensure!(printed.trim_end().ends_with("\n20000") && count == 20_000, "{count} lines of a terminal, then {tail:?}");
    never_read(&ctr)
}

/// What a pipeline counts of a command's stdout.
fn counted(command: Command, counter: &str) -> Result<usize> {
    let mut pipeline = Command::new("sh");
    pipeline.args(["-c", &format!("\"$@\" | {counter}"), "sh"]).arg(command.get_program()).args(command.get_args());
    run(pipeline)?.success()?.trim().parse().context("understand the count")
}

/// Two containers of one shim: the client of the first never reads what it asked for.
fn never_read(ctr: &Ctr) -> Result<()> {
    let in_pod = |id: &'static str| ctr.container(id).annotation("io.containerd.runc.v2.group", "pod");
    let mut stuck = in_pod("stuck").runs(&["sh", "-c", "while :; do echo words; done"]).command(&[]);
    let mut stuck = stuck.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().context("run the talkative container")?;
    ctr.wait_for_status("stuck", "RUNNING")?;
    let quick = || -> Result<Duration> {
        let begin = Instant::now();
        ensure!(in_pod("quick").runs(&["echo", "hello"]).run()?.success()? == "hello\n");
        Ok(begin.elapsed())
    };
    thread::sleep(Duration::from_millis(200));
    let beside = quick()?;
    ctr.kill("stuck", "KILL")?;
    ctr.wait_for_status("stuck", "STOPPED")?;
    let _ = (stuck.kill(), stuck.wait());
    ctr.remove("stuck")?;
    // the shim gives a reader ten seconds; how long a container takes is the machine's affair
    let alone = quick()?;
    ensure!(beside < alone * 4 + Duration::from_secs(8), "{beside:?} beside one that is stuck, {alone:?} alone");
    Ok(())
}
