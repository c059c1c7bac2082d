//! Issue 14: a client waits for an exec before it starts it, as containerd's documentation shows,
//! and the start fails. The wait is answered at once, with a status that no client takes for
//! success; the exec has ended, and its name is free after its delete.

use anyhow::Context as _;
use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, ObedientRuntime};
use bindguard_integration::shim::{Client, Shim, code};
use containerd_shim_protos::api::{ExecProcessRequest, Status, WaitRequest};
use ttrpc::Code;

/// Far more than an answer takes on a busy machine.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            for runtime in [Runtime::Stock, Runtime::Bindguard] {
                let ctr = node.ctr();
                ctr.container("web").runtime(runtime).start()?.success()?;
                let shim =
                    Shim::of_container(node, "web").with_context(|| format!("{runtime:?}"))?;
                no_such_program(&shim, runtime)
                    .with_context(|| format!("{runtime:?}: no such program"))?;
                if runtime == Runtime::Bindguard {
                    runtime_without_a_word(node, &shim)
                        .context("a runtime that fails without a word")?;
                    stream_that_is_not_there(&shim).context("a stream that is not there")?;
                    container_that_is_paused(node, &shim).context("a container that is paused")?;
                }
                ctr.remove("web")?;
            }
            Ok(())
        });
}

fn no_such_program(shim: &Shim, runtime: Runtime) -> Result<()> {
    let client = shim.connect()?;
    client.exec(exec("none"), &["/no/such/program"])?;
    let status = wait_and_start(shim, "none")?;
    let state = client.state("web", "none")?;
    eprintln!(
        "{runtime:?}: Wait answers {status}, State {:?} with {}",
        state.status, state.exit_status
    );
    ensure!(
        state.status.enum_value() == Ok(Status::CREATED) && state.exit_status == 0,
        "{state:?}"
    );
    ensure!(
        code(client.kill("web", "none", 15))? == Code::FAILED_PRECONDITION,
        "a signal to it"
    );
    if runtime == Runtime::Bindguard {
        ensure!(status == 255, "Wait answers {status}");
        ensure!(
            code(client.start("web", "none"))? == Code::FAILED_PRECONDITION,
            "a second start"
        );
    }
    ensure!(wait(&client, "none")? == status, "a second Wait");
    client.delete("web", "none")?;
    client.exec(exec("none"), &["true"])?;
    client.start("web", "none")?;
    ensure!(wait(&client, "none")? == 0, "the name is used again");
    client.delete("web", "none")?;
    Ok(())
}

fn runtime_without_a_word(node: &Node, shim: &Shim) -> Result<()> {
    ObedientRuntime::of(&node.programs()).next("exec", Fault::OnlyRecord)?;
    shim.connect()?.exec(exec("silent"), &["true"])?;
    ends_with_255(shim, "silent")
}

fn stream_that_is_not_there(shim: &Shim) -> Result<()> {
    let stdout = "/run/no/such/fifo".to_owned();
    shim.connect()?.exec(
        ExecProcessRequest {
            stdout,
            ..exec("streamless")
        },
        &["true"],
    )?;
    ends_with_255(shim, "streamless")
}

fn container_that_is_paused(node: &Node, shim: &Shim) -> Result<()> {
    let client = shim.connect()?;
    client.exec(exec("frozen"), &["true"])?;
    client.pause("web")?;
    let ended = ends_with_255(shim, "frozen");
    client.resume("web")?;
    node.ctr().wait_for_status("web", "RUNNING")?;
    ended
}

fn ends_with_255(shim: &Shim, exec_id: &str) -> Result<()> {
    let status = wait_and_start(shim, exec_id)?;
    ensure!(status == 255, "{status}");
    shim.connect()?.delete("web", exec_id)?;
    Ok(())
}

/// Waits, then starts; answers what the wait was answered.
fn wait_and_start(shim: &Shim, exec_id: &str) -> Result<u32> {
    thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(&shim.connect()?, exec_id));
        let started = shim.connect()?.start("web", exec_id);
        let waited = waiting.join().map_err(|_| anyhow!("the client panicked"))?;
        ensure!(started.is_err(), "it has started");
        waited
    })
}

fn wait(client: &Client, exec_id: &str) -> Result<u32> {
    let request = WaitRequest {
        id: "web".to_owned(),
        exec_id: exec_id.to_owned(),
        ..Default::default()
    };
    let answer = client.call_within(CALL_TIMEOUT, async |task, context| {
        task.wait(context, &request).await
    });
    Ok(answer.context("Wait")?.exit_status)
}

fn exec(exec_id: &str) -> ExecProcessRequest {
    ExecProcessRequest {
        id: "web".to_owned(),
        exec_id: exec_id.to_owned(),
        ..Default::default()
    }
}
