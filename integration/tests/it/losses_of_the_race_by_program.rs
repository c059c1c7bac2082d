//! kubernetes#127602 in figures: the kubelet binds a subpath, the volume changes at some moment of
//! the create, and the runtime mounts. The same updates meet the stock shim, the agent, the agent
//! as an NRI plugin, and the shim.
//!
//! The moments are spread over a whole create, so a loss is likelier than on a node. A lost create
//! fails, or its container reads content that was old before the create began.

use bindguard_integration::prelude::*;
use std::fmt;

use bindguard_integration::kubelet::Behaviour;
use bindguard_testing::rounds;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// The number of creates.
fn creates() -> u32 {
    rounds(20, 360)
}

/// The programs that act, and the pods' handler.
#[derive(Clone, Copy, Debug)]
struct Programs {
    handler: &'static str,
    /// Lines of the agent's config; `None` if there is no agent.
    agent: Option<&'static str>,
}

const STOCK: Programs = Programs {
    handler: "runc",
    agent: None,
};
const AGENT: Programs = Programs {
    agent: Some(""),
    ..STOCK
};
const PLUGIN: Programs = Programs {
    agent: Some("agent.nri.enabled = true\n"),
    ..STOCK
};
const SHIM: Programs = Programs {
    handler: "bindguard",
    agent: None,
};

mod older {
    use super::*;

    #[test]
    fn containerd_1_7() {
        Setup::on(Generation::V1_7).nri().story(story);
    }
}

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).nri().story(story);
}

fn story(node: &Node) -> Result<()> {
    let [stock, agent, plugin, shim] =
        [STOCK, AGENT, PLUGIN, SHIM].map(|programs| losses(node, programs));
    let (stock, agent, plugin, shim) = (stock?, agent?, plugin?, shim?);
    let creates = creates();
    eprintln!(
        "lost of {creates} creates: stock {stock}, agent {agent}, agent and plugin {plugin}, shim {shim}"
    );
    ensure!(stock.lost() > 0, "no update met a create: nothing is shown");
    ensure!(agent.lost() < stock.lost(), "the agent saved no create");
    ensure!(plugin.lost() < stock.lost(), "the plugin saved no create");
    // A create that the runtime fails is retried by the shim alone.
    ensure!(plugin.old == 0, "a container started with old content");
    ensure!(shim.lost() == 0, "the shim lost creates");
    Ok(())
}

#[derive(Default)]
struct Losses {
    failed: u32,
    old: u32,
}

impl Losses {
    fn lost(&self) -> u32 {
        self.failed + self.old
    }
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({} failed, {} old)",
            self.lost(),
            self.failed,
            self.old
        )
    }
}

fn losses(node: &Node, programs: Programs) -> Result<Losses> {
    let agent = programs
        .agent
        .map(|config| Agent::start(node, config))
        .transpose()?;
    let pod = node.kubelet().pod("uid-race")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("count", "0")])?;
    let subpath = volume.subpath("app", 0, "count");
    subpath.bind()?;
    let mounts = [mount(subpath.target(), "/etc/count", PropagationPrivate)];
    let cri = node.cri()?;
    let sandbox = cri.run_pod(programs.handler, "race", pod.uid())?;
    let words = ["sleep", "1000000"];
    // The first create measures the duration of a create here.
    let start = Instant::now();
    let first = cri.start_container(&sandbox, "first", &words, &mounts)?;
    let whole = start.elapsed();
    remove(&cri, &first)?;
    let mut losses = Losses::default();
    let creates = creates();
    for number in 1..=creates {
        subpath.bind_again(Behaviour::Since1_19)?;
        let (created, updated) = thread::scope(|scope| {
            let update = scope.spawn(|| update_after(whole * number / creates, &volume, number));
            (
                cri.start_container(&sandbox, "app", &words, &mounts),
                update.join(),
            )
        });
        ensure!(
            matches!(updated, Ok(Ok(()))),
            "the update failed: {updated:?}"
        );
        match created {
            Err(_) => losses.failed += 1,
            Ok(id) => {
                // The update's own content, or that of the update before: it was current when the
                // create began.
                let count: u32 = cri
                    .read(&id, "/etc/count")
                    .unwrap_or_default()
                    .parse()
                    .unwrap_or_default();
                losses.old += u32::from(count + 1 < number);
                remove(&cri, &id)?;
            }
        }
    }
    cri.remove_pod(&sandbox)?;
    drop(agent);
    pod.delete()?;
    Ok(losses)
}

fn update_after(delay: Duration, volume: &Volume, number: u32) -> Result<()> {
    thread::sleep(delay);
    match volume.update(&[("count", &number.to_string())]) {
        // The update is in place; only the removal of the old directory met a mount on its file.
        Err(error) if is_busy(&error) => Ok(()),
        updated => updated,
    }
}

fn is_busy(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::ResourceBusy)
}

fn remove(cri: &Cri, id: &str) -> Result<()> {
    cri.stop(id, 0)?;
    cri.remove(id)
}
