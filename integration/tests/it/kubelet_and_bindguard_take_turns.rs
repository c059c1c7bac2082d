//! A kubelet since 1.19 repairs stale subpaths itself when it restarts a container. Sometimes the
//! kubelet is first, sometimes bindguard: the leftovers of the first disturb no later repair.

use bindguard_integration::kubelet::Behaviour;
use bindguard_integration::prelude::*;

#[test]
fn either_may_be_first() {
    Setup::on(Generation::NEWEST).story(|node| {
        for kind in VolumeKind::KUBELET_WRITTEN {
            take_turns(node, kind)?;
        }
        Ok(())
    });
}

fn take_turns(node: &Node, kind: VolumeKind) -> Result<()> {
    let pod = node.kubelet().pod("turns")?;
    let volume = pod.volume(kind, "conf", &[("turn", "start")])?;
    let subpath = volume.subpath("app", 0, "turn");
    let source = subpath.bind()?;
    let container = |id| {
        node.ctr()
            .container(id)
            .mount(Bind::new(source, "/etc/turn"))
            .runs(&["cat", "/etc/turn"])
            .run_to_end()?
            .success()
    };
    for turn in ["kubelet", "bindguard", "bindguard again", "kubelet again"] {
        volume.update(&[("turn", turn)])?;
        if turn.starts_with("kubelet") {
            subpath.bind_again(Behaviour::Since1_19)?;
        }
        let read = container("app")?;
        ensure!(
            read == turn,
            "{kind:?}: in the turn of {turn} the container reads {read:?}"
        );
        only_a_current_mount(&subpath)?;
    }
    pod.delete()
}
