//! Many bytes through a pipe and a terminal, a slow reader, and a reader that never reads: every
//! byte arrives, and no container waits for the reader of another container.

use bindguard_integration::Ctr;
use bindguard_integration::prelude::*;
use bindguard_integration::shim::{Bundle, Shim, spec};
use containerd_shim_protos::shim::oci::Options;

const MANY: usize = 30_000_000;

on_newest_and_older!(|generation| Setup::on(generation).story(story));

fn story(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    through_a_pipe(node, "out", MANY, "0")?;
    through_a_pipe(node, "slow", 300_000, "0.5")?;
    through_a_terminal(node)?;
    never_read(&ctr)
}

/// All bytes arrive, also if the reader waits before its first read.
fn through_a_pipe(node: &Node, id: &str, bytes: usize, rest: &str) -> Result<()> {
    let bundle = Bundle::create(node, id, &["head", "-c", &bytes.to_string(), "/dev/zero"])?;
    let counted = read(
        node,
        &bundle,
        false,
        &format!("sleep {rest}; wc -c < \"$1\""),
    )?;
    let arrived: usize = counted.trim().parse().context("parse the count")?;
    ensure!(
        arrived == bytes,
        "of {bytes} bytes {arrived} arrive at a reader that rests for {rest} s"
    );
    Ok(())
}

fn through_a_terminal(node: &Node) -> Result<()> {
    let mut spec = spec(
        node,
        "pty",
        &[
            "sh",
            "-c",
            "n=0; while [ $n -lt 20000 ]; do n=$((n + 1)); echo $n; done",
        ],
    );
    spec["process"]["terminal"] = true.into();
    let printed = read(
        node,
        &Bundle::create_with(node, "pty", &spec)?,
        true,
        "cat \"$1\"",
    )?;
    let tail = &printed[printed.len().saturating_sub(40)..];
    let count = printed.lines().count();
    ensure!(
        printed.ends_with("\n20000\r\n") && count == 20_000,
        "{count} lines of a terminal, then {tail:?}"
    );
    Ok(())
}

/// The result of `reader`, a script, on `$1`, a fifo that a container prints into and ends. The
/// story reads itself: with a busy machine and a reader that rests, `ctr` gives up its own copy now
/// and then, in the middle, whichever shim there is.
fn read(node: &Node, bundle: &Bundle, terminal: bool, reader: &str) -> Result<String> {
    let client = Shim::start(node, bundle, &Options::default())?.connect()?;
    let fifo = bundle.fifo("out")?;
    let mut request = bundle.request();
    request.terminal = terminal;
    request.stdout = fifo.display().to_string();
    client.create(&request)?;
    client.start(bundle.id(), "")?;
    let mut shell = Command::new("sh");
    shell.args(["-ec", reader, "sh"]).arg(&fifo);
    let words = run(shell)?.success()?;
    ensure!(client.wait(bundle.id(), "")? == 0);
    client.delete(bundle.id(), "")?;
    client.shut_down(bundle.id())?;
    Ok(words)
}

/// Two containers of a shim: the client of the first never reads the output.
fn never_read(ctr: &Ctr) -> Result<()> {
    let in_pod = |id: &'static str| {
        ctr.container(id)
            .annotation("io.containerd.runc.v2.group", "pod")
    };
    let mut stuck = in_pod("stuck")
        .runs(&["sh", "-c", "while :; do echo words; done"])
        .command(&[]);
    let mut stuck = stuck
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .context("run the talkative container")?;
    ctr.wait_for_status("stuck", "RUNNING")?;
    let quick = || -> Result<Duration> {
        let begin = Instant::now();
        ensure!(
            in_pod("quick")
                .runs(&["echo", "hello"])
                .run_to_end()?
                .success()?
                == "hello\n"
        );
        Ok(begin.elapsed())
    };
    let writer = format!("/proc/{}/stat", ctr.pid("stuck")?);
    until("the pipe is full, and its writer waits", || {
        Ok(fs::read_to_string(&writer)?.contains(") S "))
    })?;
    // A busy machine can delay a container.
    let mut beside = quick()?;
    for _ in 0..2 {
        beside = beside.min(quick()?);
    }
    ctr.kill("stuck", "KILL")?;
    ctr.wait_for_status("stuck", "STOPPED")?;
    let _ = (stuck.kill(), stuck.wait());
    ctr.remove("stuck")?;
    // the shim gives a reader ten seconds; how long a container takes is the machine's affair
    let alone = quick()?;
    ensure!(
        beside < alone * 4 + Duration::from_secs(8),
        "{beside:?} beside one that is stuck, {alone:?} alone"
    );
    Ok(())
}
