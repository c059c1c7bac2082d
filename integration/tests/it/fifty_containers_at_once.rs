//! Fifty containers start at the same moment, in separate shims and in a single pod. All containers
//! run, and each exit has the right status. Afterwards nothing is left, and the pod's shim has
//! returned the memory.

use bindguard_integration::footprint::Footprint;
use bindguard_integration::prelude::*;

const CONTAINERS: usize = 50;

#[test]
fn each_in_a_shim_of_its_own() {
    Setup::on(Generation::NEWEST).story(|node| storm(node, None));
}

#[test]
fn in_one_pod() {
    Setup::on(Generation::V1_7).story(|node| storm(node, Some("pod")));
}

const GROUP: &str = "io.containerd.runc.v2.group";

fn storm(node: &Node, pod: Option<&str>) -> Result<()> {
    let before = Leftovers::of(node)?;
    // as a pod's sandbox does, it keeps the shim while its containers come and go
    let mut alone = None;
    if let Some(pod) = pod {
        node.ctr()
            .container("sandbox")
            .annotation(GROUP, pod)
            .start()?
            .success()?;
        let shim = *node.shims()?.first().context("find the shim")?;
        alone = Some((shim, Footprint::at_rest(shim)?));
    }
    let start = |number: usize| -> Result<Child> {
        let (id, script) = (format!("c{number}"), format!("exit {}", number + 1));
        let ctr = node.ctr();
        let container = ctr.container(&id).runs(&["sh", "-c", &script]);
        let container = match pod {
            Some(pod) => container.annotation(GROUP, pod),
            None => container,
        };
        container
            .command(&["--rm"])
            .spawn()
            .with_context(|| format!("start {id}"))
    };
    let running: Vec<Child> = (0..CONTAINERS).map(start).collect::<Result<_>>()?;
    for (number, mut container) in running.into_iter().enumerate() {
        let code = container.wait()?.code();
        ensure!(
            code == i32::try_from(number + 1).ok(),
            "container {number} ended with {code:?}"
        );
    }
    if let Some((shim, alone)) = alone {
        ensure!(
            node.shims()? == [shim],
            "shims of one pod: {:?}",
            node.shims()?
        );
        let mut after = Footprint::of(shim)?;
        // tables have grown, and their pages hold a little of something; the burst itself took five
        // times as much
        let given_back = until("the shim has given back the burst's memory", || {
            after = Footprint::of(shim)?;
            Ok(after.anonymous_kib * 2 <= alone.anonymous_kib * 5)
        });
        eprintln!("{alone:?}, then {after:?}");
        given_back.with_context(|| format!("{alone:?}, then {after:?}"))?;
        node.ctr().remove("sandbox")?;
    }
    before.are_all(node)
}
