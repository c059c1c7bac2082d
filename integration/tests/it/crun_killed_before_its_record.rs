//! crun is killed in its `create` when the container's init already waits for its start, and before
//! crun has recorded the container: the shim ends the init, and the name can be used again. crun's
//! own `delete --force` does not find such an init, and the stock shim leaves it.

use bindguard_integration::prelude::*;
use std::thread::JoinHandle;

use bindguard_integration::footprint::parent_of;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

const TRIES: u32 = 20;

on_newest_and_older!(|generation| with_crun(generation).story(story));

mod with_systemd {
    use super::*;

    on_newest_and_older!(|generation| with_crun(generation).systemd().story(story));
}

fn with_crun(generation: Generation) -> Setup {
    Setup::on(generation).oci(Oci::Crun(generation))
}

#[derive(Clone, Copy, Debug)]
enum Victim {
    Crun,
    /// crun dies with it.
    Shim,
}

fn story(node: &Node) -> Result<()> {
    // Where the unified hierarchy is not mounted, crun leaves a folder in its place, named after
    // the container.
    let a_life = || {
        node.ctr()
            .container("web")
            .runs(&["true"])
            .run()?
            .success()
            .map(drop)
    };
    a_life()?;
    stock_shim_leaves_the_init(node)?;
    let before = Leftovers::of(node)?;
    for victim in [Victim::Crun, Victim::Shim] {
        interrupted(node, victim).with_context(|| format!("{victim:?} killed"))?;
        before
            .are_all(node)
            .with_context(|| format!("{victim:?} killed"))?;
    }
    a_life()
}

fn stock_shim_leaves_the_init(node: &Node) -> Result<()> {
    let (create, crun) = held_create(node, Runtime::Stock, "stock")?;
    let init = waiting_init(node, crun)?;
    end(crun)?;
    ensure!(
        join(create)?.code() != 0,
        "the create of a killed runtime succeeded"
    );
    ensure!(
        Path::new(&format!("/proc/{init}")).exists(),
        "the stock shim ends the init as well"
    );
    end(init)?;
    node.ctr().forget("stock")
}

fn interrupted(node: &Node, victim: Victim) -> Result<()> {
    let (create, crun) = held_create(node, Runtime::Bindguard, "web")?;
    let init = waiting_init(node, crun)?;
    match victim {
        Victim::Crun => end(crun)?,
        Victim::Shim => node.shims()?.into_iter().try_for_each(end)?,
    }
    ensure!(
        join(create)?.code() != 0,
        "the create of a killed runtime succeeded"
    );
    until("the waiting init has ended", || {
        Ok(!Path::new(&format!("/proc/{init}")).exists())
    })?;
    let ctr = node.ctr();
    ctr.end_task("web")?;
    ctr.forget("web")
}

type Create = JoinHandle<Result<Finished>>;

/// A create in which crun waits before it records the container, and crun's pid. crun may lose the
/// processor at the wrong time, so a single try is not enough.
fn held_create(node: &Node, runtime: Runtime, id: &'static str) -> Result<(Create, u32)> {
    for _ in 0..TRIES {
        let client = node.ctr();
        let create = thread::spawn(move || client.container(id).runtime(runtime).start());
        block_the_record(node, id, &create);
        let mut crun = None;
        until("crun waits, or has created the container", || {
            crun = creators(node).into_iter().find(opens_a_fifo);
            Ok(crun.is_some() || create.is_finished())
        })?;
        if let Some(crun) = crun {
            return Ok((create, crun));
        }
        join(create)?.success()?;
        node.ctr().remove(id)?;
    }
    bail!("in {TRIES} tries crun was faster")
}

fn join(create: Create) -> Result<Finished> {
    create.join().map_err(|_| anyhow!("the client panicked"))?
}

/// crun writes its record into a temporary file and then renames it. A fifo in the file's place
/// blocks the write until the fifo has a reader.
fn block_the_record(node: &Node, id: &str, create: &Create) {
    let record = Path::new("/run/containerd/runc")
        .join(node.name())
        .join(id)
        .join("status.tmp");
    while mkfifo(&record, Mode::S_IRWXU).is_err() && !create.is_finished() {
        thread::yield_now();
    }
}

fn opens_a_fifo(pid: &u32) -> bool {
    let function = fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
    ["wait_for_partner", "fifo_open"].contains(&function.as_str())
}

fn waiting_init(node: &Node, crun: u32) -> Result<u32> {
    let init = creators(node)
        .into_iter()
        .find(|pid| parent_of(*pid).is_ok_and(|parent| parent == crun));
    init.context("crun has no init")
}

/// crun, and its init until it executes the container's program.
fn creators(node: &Node) -> Vec<u32> {
    let is_one = |pid: &u32| {
        let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split('\0').any(|word| word == "create")
            && words.split('\0').any(|word| word == "--bundle")
    };
    node.all_processes().into_iter().filter(is_one).collect()
}

fn end(pid: u32) -> Result<()> {
    kill(Pid::from_raw(pid.try_into()?), Signal::SIGKILL).context("kill it")
}
