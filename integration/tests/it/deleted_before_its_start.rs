//! A container is created and deleted, and never started. No program has run, so there is no exit
//! to report: the answer has status 0, as with the stock shim, and no TaskExit arrives. The stock
//! shim's events are not compared: at a shutdown the stock shim drops unsent events.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::Gate;
use bindguard_integration::shim::{Bundle, Shim};
use bindguard_integration::{events, privilege};
use containerd_shim_protos::shim::oci::Options;

/// Many times what a delete takes that waits for nothing.
const FOR_A_DELETE: Duration = Duration::from_millis(700);

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(|node| {
        let before = Leftovers::of(node)?;
        // bindguard's shim first: a late event of the stock shim would look like an event of
        // bindguard's shim.
        let seen = events::during(node, || create_and_delete(node, Runtime::Bindguard))?;
        ensure!(seen == ["create web", "delete web"], "{seen:?}");
        create_and_delete(node, Runtime::Stock).context("stock")?;
        before.are_all(node)
    });
}

/// The delete arrives when the program has run and the runtime has not answered the start yet.
#[test]
fn during_its_start() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let seen = events::during(node, || start_and_delete(node))?;
            ensure!(
                seen == [
                    "create short",
                    "start short",
                    "exit short short 3",
                    "delete short 3"
                ],
                "{seen:?}"
            );
            Ok(())
        });
}

/// The delete that is repeated after a failed unmount does not find an exit either.
#[test]
fn again_after_a_failed_unmount() {
    Setup::on(Generation::NEWEST).story(|node| {
        if !privilege::has_program("strace") {
            privilege::skipped("no strace");
            return Ok(());
        }
        delete_twice(node)
    });
}

fn delete_twice(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    client.create(&bundle.request())?;
    let shim = fs::read_to_string(bundle.path().join("shim.pid"))?;
    let mut strace = Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null"])
        .args(["-e", "inject=umount2:error=EPERM", "-p", shim.trim()])
        .spawn()
        .context("start strace")?;
    let status = format!("/proc/{}/status", shim.trim());
    until("the shim is traced", || {
        Ok(!fs::read_to_string(&status)?.contains("TracerPid:\t0\n"))
    })?;
    let refused = client.delete("web", "");
    kill(Pid::from_raw(i32::try_from(strace.id())?), Signal::SIGTERM).context("end strace")?;
    strace.wait().context("wait for strace")?;
    let error = refused.err().context("it was deleted")?.to_string();
    ensure!(error.contains("unmount "), "{error}");
    let deleted = client.delete("web", "")?;
    ensure!(deleted.exit_status == 0, "{deleted:?}");
    Ok(client.shut_down("web")?)
}

fn start_and_delete(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "short", &["sh", "-c", "exit 3"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let (client, gate) = (shim.connect()?, Gate::of(&node.programs()));
    let pid = client.create(&bundle.request())?;
    gate.close_after("start")?;
    thread::scope(|scope| {
        let start = scope.spawn(|| shim.connect()?.start("short", "").context("start"));
        gate.wait_for_call()?;
        let init = format!("/proc/{pid}");
        until("the program ends", || Ok(fs::metadata(&init).is_err()))?;
        let delete = scope.spawn(|| shim.connect()?.delete("short", "").context("delete"));
        thread::sleep(FOR_A_DELETE);
        gate.open()?;
        let join = |_| anyhow!("the client panicked");
        start.join().map_err(join)??;
        ensure!(delete.join().map_err(join)??.exit_status == 3);
        anyhow::Ok(())
    })?;
    Ok(client.shut_down("short")?)
}

fn create_and_delete(node: &Node, runtime: Runtime) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = match runtime {
        Runtime::Stock => Shim::start_stock(node, &bundle)?,
        _ => Shim::start(node, &bundle, &Options::default())?,
    };
    let client = shim.connect()?;
    let pid = client.create(&bundle.request())?;
    let deleted = client.delete("web", "")?;
    ensure!(
        (deleted.pid, deleted.exit_status) == (pid, 0),
        "{deleted:?}"
    );
    match client.shut_down("web") {
        // The stock shim may end before it has answered.
        Err(_) if runtime == Runtime::Stock => Ok(()),
        answer => Ok(answer?),
    }
}
