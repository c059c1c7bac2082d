//! `ctr events` prints equal events in equal order for a container of the stock shim and of
//! bindguard's shim.
//!
//! Exception: the stock shim of 2.1 sometimes ends before sending the container's delete event.

use bindguard_integration::events;
use bindguard_integration::prelude::*;

const WANTED: [&str; 16] = [
    "create quick",
    "start quick",
    "exit quick quick 7",
    "delete quick 7",
    "create long",
    "start long",
    "exec-added long",
    "exec-started long",
    "exit long short 3",
    "paused long",
    "resumed long",
    "exec-added long",
    "exec-started long",
    "exit long left 137",
    "exit long long 137",
    "delete long 137",
];

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        let ours = events::during(node, || lives(node, Runtime::Bindguard))?;
        ensure!(ours == WANTED, "{ours:?}\n{WANTED:?}");
        let stock = events::during(node, || lives(node, Runtime::Stock))?;
        let no_delete = |events: Vec<String>| {
            events
                .into_iter()
                .filter(|event| !event.starts_with("delete"))
        };
        ensure!(
            no_delete(stock.clone()).eq(no_delete(ours)),
            "the stock shim: {stock:?}"
        );
        Ok(())
    });
}

on_newest_and_older!(story);

fn lives(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let task = |words: &[&str]| run(ctr.command(&[&["task"], words].concat())).map(drop);
    ctr.container("quick")
        .runtime(runtime)
        .runs(&["sh", "-c", "exit 7"])
        .start()?
        .success()?;
    ctr.wait_for_status("quick", "STOPPED")?;
    ctr.remove("quick")?;

    ctr.container("long").runtime(runtime).start()?.success()?;
    task(&["exec", "--exec-id", "short", "long", "sh", "-c", "exit 3"])?;
    task(&["pause", "long"])?;
    task(&["resume", "long"])?;
    // it is still running when the init is killed, and its end is published first
    task(&[
        "exec",
        "--detach",
        "--exec-id",
        "left",
        "long",
        "sleep",
        "1000000",
    ])?;
    ctr.kill("long", "KILL")?;
    ctr.wait_for_status("long", "STOPPED")?;
    ctr.remove("long")
}
