//! States and options that `ctr` does not show or send: PAUSING while the runtime freezes, the
//! parent of a checkpoint, criu's log in the error.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, Gate, ObedientRuntime};
use bindguard_integration::shim::{Bundle, Shim};
use containerd_shim_protos::api::{CheckpointTaskRequest, ExecProcessRequest, Status};
use containerd_shim_protos::shim::oci::Options;
use protobuf::well_known_types::any::Any;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let before = Leftovers::of(node)?;
            let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
            let shim = Shim::start(node, &bundle, &Options::default())?;
            let client = shim.connect()?;
            client.create(&bundle.request())?;
            client.start("web", "")?;
            pausing(node, &shim)?;
            checkpoint(node, &shim, &bundle)?;
            ensure!(client.end("web")?.exit_status == 137);
            client.shut_down("web")?;
            drop(bundle);
            before.are_all(node)
        });
}

fn pausing(node: &Node, shim: &Shim) -> Result<()> {
    let (client, gate) = (shim.connect()?, Gate::of(&node.programs()));
    let (id, exec_id) = ("web".to_owned(), "e".to_owned());
    client.exec(
        ExecProcessRequest {
            id,
            exec_id,
            ..Default::default()
        },
        &["sleep", "1000000"],
    )?;
    client.start("web", "e")?;
    let is = |exec_id: &str, status: Status| -> Result<()> {
        let state = client.state("web", exec_id)?.status.enum_value();
        ensure!(
            state == Ok(status),
            "{exec_id:?} is {state:?} and not {status:?}"
        );
        Ok(())
    };
    for fails in [true, false] {
        gate.close_before("pause")?;
        let asking = shim.connect()?;
        let pausing = thread::spawn(move || asking.pause("web"));
        gate.wait_for_call()?;
        is("", Status::PAUSING)?;
        is("e", Status::PAUSING)?;
        match fails {
            true => gate.send_back()?,
            false => gate.open()?,
        }
        let paused = pausing.join().ok().context("join the client that pauses")?;
        ensure!(paused.is_err() == fails, "{paused:?}");
        is(
            "",
            if fails {
                Status::RUNNING
            } else {
                Status::PAUSED
            },
        )?;
    }
    is("e", Status::PAUSED)?;
    client.resume("web")?;
    is("e", Status::RUNNING)?;
    client.kill("web", "e", 9)?;
    client.wait("web", "e")?;
    client.delete("web", "e")?;
    Ok(())
}

fn checkpoint(node: &Node, shim: &Shim, bundle: &Bundle) -> Result<()> {
    let (client, runtime) = (shim.connect()?, ObedientRuntime::of(&node.programs()));
    let path = node.disk().join("images").display().to_string();
    // field 10 of containerd 2's CheckpointOptions
    let options = Any {
        type_url: "containerd.runc.v1.CheckpointOptions".to_owned(),
        value: b"\x52\x09../before".to_vec(),
        ..Default::default()
    };
    let request = CheckpointTaskRequest {
        id: "web".to_owned(),
        path,
        options: Some(options).into(),
        ..Default::default()
    };
    runtime.next("checkpoint", Fault::OnlyRecord)?;
    let refused =
        client.call(async |task, context| task.checkpoint(context, &request).await.map(drop));
    let error = refused.err().context("a checkpoint was made")?.to_string();
    let log = bundle.path().join("criu-dump.log");
    ensure!(error.contains("OCI runtime checkpoint failed: "), "{error}");
    ensure!(
        error.contains(&format!("path= {}", log.display())),
        "{error}"
    );
    let call = runtime.last_call("checkpoint")?;
    ensure!(
        call.contains(" --parent-path ../before ") && call.contains(" --leave-running "),
        "{call}"
    );
    Ok(())
}
