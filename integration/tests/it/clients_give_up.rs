//! A client disconnects in the middle of a call, or its deadline passes. The call completes anyway,
//! the next client finds the result, and nothing is lost. If containerd itself gives a create up and
//! removes the bundle, no container and no shim is left.

use anyhow::Context as _;
use bindguard_integration::prelude::*;
use bindguard_integration::runtime::Gate;
use bindguard_integration::shim::{Bundle, Client, Shim, code};
use bindguard_integration::waiting::stays;
use containerd_shim_protos::api::{DeleteRequest, ExecProcessRequest, StartRequest, Status};
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::shim_async::TaskClient;
use nix::mount::{MntFlags, umount2};
use ttrpc::Code;
use ttrpc::context::Context;

#[derive(Clone, Copy, PartialEq)]
enum GivesUp {
    ByGoing,
    ByItsDeadline,
}

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let before = Leftovers::of(node)?;
            a_life(node, GivesUp::ByGoing)?;
            a_life(node, GivesUp::ByItsDeadline)?;
            before.are_all(node)
        });
}

/// A first client requests every step and gives up; a second client completes each step.
fn a_life(node: &Node, how: GivesUp) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let other = shim.connect()?;
    let request = bundle.request();
    give_up(node, &shim, how, "create", async |task, context| {
        task.create(context, &request).await.map(drop)
    })?;
    until_it_is(&other, Status::CREATED)?;

    let (id, exec_id) = ("web".to_owned(), "e".to_owned());
    let start = StartRequest {
        id: id.clone(),
        ..Default::default()
    };
    give_up(node, &shim, how, "start", async |task, context| {
        task.start(context, &start).await.map(drop)
    })?;
    until_it_is(&other, Status::RUNNING)?;

    other.exec(
        ExecProcessRequest {
            id: id.clone(),
            exec_id: exec_id.clone(),
            ..Default::default()
        },
        &["true"],
    )?;
    let start = StartRequest {
        id: id.clone(),
        exec_id,
        ..Default::default()
    };
    give_up(node, &shim, how, "exec", async |task, context| {
        task.start(context, &start).await.map(drop)
    })?;
    ensure!(other.wait("web", "e")? == 0);
    other.delete("web", "e")?;

    other.kill("web", "", 9)?;
    ensure!(other.wait("web", "")? == 137);
    let delete = DeleteRequest {
        id,
        ..Default::default()
    };
    give_up(node, &shim, how, "delete", async |task, context| {
        task.delete(context, &delete).await.map(drop)
    })?;
    until("the container is gone", || {
        Ok(other.state("web", "").is_err())
    })?;
    ensure!(code(other.state("web", ""))? == Code::NOT_FOUND);
    Ok(other.shut_down("web")?)
}

/// Stops the runtime in the middle of the call; meanwhile the shim answers further clients.
fn give_up(
    node: &Node,
    shim: &Shim,
    how: GivesUp,
    verb: &str,
    call: impl AsyncFnOnce(&TaskClient, Context) -> ttrpc::Result<()>,
) -> Result<()> {
    let gate = Gate::of(&node.programs());
    gate.close_before(verb)?;
    let impatient = shim.connect()?;
    match how {
        GivesUp::ByGoing => {
            ensure!(
                impatient.call_without_waiting(call, || gate.has_call()),
                "{verb} was not held back"
            )
        }
        GivesUp::ByItsDeadline => {
            let answer = impatient.call_within(Duration::from_millis(400), call);
            // the client's own word, or the server's, whichever is first
            let ended = answer.as_ref().err().map(ToString::to_string);
            ensure!(
                ended
                    .as_ref()
                    .is_some_and(|words| words.to_lowercase().contains("deadline")),
                "{verb} has another end: {ended:?}"
            );
        }
    }
    gate.wait_for_call()?;
    let state = shim.connect()?.state("no-such-container", "");
    ensure!(
        code(state)? == Code::NOT_FOUND,
        "the shim does not answer others"
    );
    gate.open()
}

fn until_it_is(client: &Client, status: Status) -> Result<()> {
    let is = || {
        Ok(client
            .state("web", "")
            .is_ok_and(|state| state.status.enum_value() == Ok(status)))
    };
    until(&format!("it is {status:?}"), is)
        .with_context(|| format!("{:?}", client.state("web", "")))
}

/// The way in which containerd gives a container up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Abandoned {
    /// It runs the shim's `delete`, which ends the container, and removes the bundle.
    Killed,
    /// It removes the bundle.
    Created,
    /// It removes the bundle after the end of the container's program.
    Ended,
}

#[test]
fn containerd_gives_up_a_create_and_removes_the_bundle() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let before = Leftovers::of(node)?;
            for how in [Abandoned::Killed, Abandoned::Created, Abandoned::Ended] {
                abandoned(node, how).with_context(|| format!("{how:?}"))?;
                before.are_all(node).with_context(|| format!("{how:?}"))?;
            }
            beside_another(node)?;
            before.are_all(node)
        });
}

/// The first requests come while the container is being created, so the shim knows no container.
fn abandoned(node: &Node, how: Abandoned) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    give_up_create(node, &shim, &bundle)?;
    abandon(node, &shim, &bundle, how)
}

fn give_up_create(node: &Node, shim: &Shim, bundle: &Bundle) -> Result<()> {
    let gate = Gate::of(&node.programs());
    gate.close_after("create")?;
    let (containerd, request) = (shim.connect()?, bundle.request());
    let create =
        async |task: &TaskClient, context: Context| task.create(context, &request).await.map(drop);
    ensure!(containerd.call_without_waiting(create, || gate.has_call()));
    let containerd = shim.connect()?;
    ensure!(code(containerd.delete(bundle.id(), ""))? == Code::NOT_FOUND);
    containerd.shut_down(bundle.id())?;
    gate.open()?;
    until("it is created", || {
        let state = containerd.state(bundle.id(), "");
        Ok(state.is_ok_and(|state| state.status.enum_value() == Ok(Status::CREATED)))
    })
}

fn abandon(node: &Node, shim: &Shim, bundle: &Bundle, how: Abandoned) -> Result<()> {
    match how {
        Abandoned::Killed => Shim::delete(node, bundle)?,
        Abandoned::Created => {}
        Abandoned::Ended => {
            let client = shim.connect()?;
            client.start(bundle.id(), "")?;
            client.kill(bundle.id(), "", 9)?;
            ensure!(client.wait(bundle.id(), "")? == 137);
            // A containerd that restarts slowly still fetches the status.
            stays(Duration::from_secs(15), "the status is kept", || {
                Ok(client
                    .wait(bundle.id(), "")
                    .is_ok_and(|status| status == 137))
            })?;
        }
    }
    let _ = umount2(&bundle.path().join("rootfs"), MntFlags::MNT_DETACH);
    fs::remove_dir_all(bundle.path()).context("remove the bundle")
}

/// The other container of the pod lives on, and the shim ends with it.
fn beside_another(node: &Node) -> Result<()> {
    let other = Bundle::create(node, "app", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &other, &Options::default())?;
    let client = shim.connect()?;
    client.create(&other.request())?;
    client.start("app", "")?;
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    give_up_create(node, &shim, &bundle)?;
    abandon(node, &shim, &bundle, Abandoned::Killed)?;
    until("the abandoned container is gone", || {
        Ok(client.state("web", "").is_err())
    })?;
    ensure!(client.state("app", "")?.status.enum_value() == Ok(Status::RUNNING));
    client.end("app")?;
    client.shut_down("app")?;
    Ok(())
}
