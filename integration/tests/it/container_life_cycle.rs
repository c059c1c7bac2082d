//! The behaviour that clients of containerd expect of any shim: exit codes, signals, exec, stdin, a
//! terminal, a restart of containerd. The test runs with every entry of the guard, so that the
//! guard breaks nothing.

use bindguard_integration::on_every_generation;
use bindguard_integration::output::read_all_output;
use bindguard_integration::prelude::*;
use bindguard_integration::process::on_a_terminal;

const RUNTIMES: [Runtime; 3] = [
    Runtime::Bindguard,
    Runtime::BindguardByPath,
    Runtime::Wrapper,
];

fn story(generation: Generation) {
    life(Setup::on(generation));
}

#[test]
fn runc_1_4() {
    life(Setup::on(Generation::NEWEST).oci(Oci::Runc(Generation::V2_3)));
}

fn life(setup: Setup) {
    setup.story(|node| {
        for runtime in RUNTIMES {
            ends(node, runtime)?;
            words(node, runtime)?;
            signals(node, runtime)?;
        }
        containerd_restarts(node)
    });
}

on_every_generation!(story);

fn ends(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -TERM $$; sleep 1; exit 3", 3),
    ] {
        let ended = ctr
            .container("ends")
            .runtime(runtime)
            .runs(&["sh", "-c", script])
            .run()?;
        ensure!(
            ended.code() == code,
            "{runtime:?}: {script:?} ended with {}: {}",
            ended.code(),
            ended.stderr
        );
    }
    let ended = ctr
        .container("ends")
        .runtime(runtime)
        .runs(&["/no/such/program"])
        .run()?;
    ensure!(
        ended.code() != 0 && ended.stderr.contains("no such file"),
        "{runtime:?}: {ended:?}"
    );
    // a container whose create failed is left to its creator
    let _ = ctr.forget("ends");
    Ok(())
}

fn words(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let ended = ctr
        .container("words")
        .runtime(runtime)
        .runs(&["sh", "-c", "echo out; echo err >&2"])
        .run_to_end()?;
    ensure!(
        ended.stdout == "out\n" && ended.stderr == "err\n",
        "{runtime:?}: {ended:?}"
    );
    let counts =
        ctr.container("words")
            .runtime(runtime)
            .runs(&["sh", "-c", "test $(wc -c) = 1000000"]);
    // more than all pipes on the way can hold: `ctr` forgets to close stdin when it ends before the
    // container starts
    let ended = counts.run_with_input(&"x".repeat(1_000_000))?;
    ensure!(ended.code() == 0, "{runtime:?}: {ended:?}");
    let on_one = ctr
        .container("words")
        .runtime(runtime)
        .runs(&["sh", "-c", "tty; echo end"])
        .staying();
    let ended = read_all_output(on_a_terminal(&on_one.command(&["--rm", "--tty"])))?.success()?;
    ensure!(
        ended.contains("/dev/pts/") && ended.contains("end"),
        "{runtime:?}: {ended}"
    );
    Ok(())
}

fn signals(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("signals")
        .runtime(runtime)
        .start()?
        .success()?;
    ensure!(ctr.exec("signals", &["sh", "-c", "exit 5"])?.code() == 5);
    ensure!(ctr.exec_to_end("signals", &["echo", "hello"])?.stdout == "hello\n");
    let missing = ctr.exec("signals", &["/no/such/program"])?;
    ensure!(missing.code() != 0, "{runtime:?}: {missing:?}");
    ctr.kill("signals", "KILL")?;
    ctr.wait_for_status("signals", "STOPPED")?;
    ctr.remove("signals")
}

fn containerd_restarts(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        for (number, runtime) in RUNTIMES.into_iter().enumerate() {
            ctr.container(&format!("lasting-{number}"))
                .runtime(runtime)
                .start()?
                .success()?;
        }
        node.restart_containerd(signal)?;
        for number in 0..RUNTIMES.len() {
            let id = format!("lasting-{number}");
            // 1.7 learns of its shims anew a moment after it answers
            ctr.wait_for_status(&id, "RUNNING")?;
            ensure!(ctr.exec_to_end(&id, &["echo", "still here"])?.success()? == "still here\n");
            ctr.kill(&id, "KILL")?;
            ctr.wait_for_status(&id, "STOPPED")?;
            ctr.remove(&id)?;
        }
    }
    Ok(())
}
