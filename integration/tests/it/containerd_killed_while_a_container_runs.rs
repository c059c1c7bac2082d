//! containerd is SIGKILLed, and meanwhile a container ends. The restarted containerd gets the exit
//! with the status.
//!
//! A lost exit would leave a dead container "running" for ever.

use bindguard_integration::prelude::*;

/// Ends on SIGTERM.
const ENDING: [&str; 3] = [
    "sh",
    "-c",
    "until [ -e /door/open ]; do sleep 0.02; done; exit 5",
];

on_newest_and_older!(|generation| Setup::on(generation).story(story));

fn story(node: &Node) -> Result<()> {
    let (ctr, before) = (node.ctr(), Leftovers::of(node)?);
    ctr.container("lasting").start()?.success()?;
    let door = node.disk().join("door");
    fs::create_dir(&door).context("make a door")?;
    ctr.container("ending")
        .mount(Bind::new(&door, "/door"))
        .runs(&ENDING)
        .start()?
        .success()?;
    let (lasting, ending) = (ctr.pid("lasting")?, ctr.pid("ending")?);
    node.without_containerd(Signal::SIGKILL, || {
        fs::write(door.join("open"), "").context("open the door")?;
        until("the container has ended", || {
            Ok(!fs::exists(format!("/proc/{ending}"))?)
        })
    })?;
    ctr.wait_for_status("ending", "STOPPED")?;
    ctr.wait_for_status("lasting", "RUNNING")?;
    ensure!(ctr.pid("lasting")? == lasting);
    ensure!(ctr.exec("lasting", &["sh", "-c", "exit 6"])?.code() == 6);
    let deleted = run(ctr.command(&["task", "delete", "ending"]))?;
    ensure!(
        deleted.stderr.contains("exit code 5") || deleted.code() == 5,
        "{deleted:?}"
    );
    ctr.forget("ending")?;
    ctr.remove("lasting")?;
    before.are_all(node)
}
