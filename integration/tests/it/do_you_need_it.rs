//! README's "Do you need it?": on a node with nothing of bindguard's, one command from the folder of
//! the unpacked programs finds each of the four faults, with the pod's name.

use bindguard_integration::kubelet::Behaviour;
use bindguard_integration::prelude::*;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

fn story(generation: Generation) {
    Setup::on(generation).bare().cri().story(|node| {
        let said = diagnose(node)?;
        ensure!(said.code() == 0, "{said:?}");

        // A ConfigMap that changes while a pod starts.
        let starting = node.kubelet().pod("uid-starting")?;
        let volume = starting.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        volume.subpath("app", 0, "app.conf").bind()?;
        volume.update(&[("app.conf", "two")])?;
        let starting = node.cri()?.run_pod("runc", "starting", "uid-starting")?;

        // A running container with a subPath.
        let pod = node.kubelet().pod("uid-reader")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        let reader = running(
            node,
            "reader",
            mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate),
        )?;
        volume.update(&[("app.conf", "two")])?;
        // The kubelet's own repair, at a restart of another container.
        subpath.bind_again(Behaviour::Since1_19)?;

        // A pod with the host's root, and a disk that the host has given up.
        let disk = node.disk().join("mnt");
        fs::create_dir(&disk)?;
        tmpfs(&disk, "mode=755")?;
        let exporter = running(
            node,
            "exporter",
            mount("/".as_ref(), "/host", PropagationPrivate),
        )?;
        unmount(&disk)?;

        // A volume that is not mounted.
        let writer = node.kubelet().pod("uid-writer")?;
        let nfs = writer.path().join("volumes/kubernetes.io~nfs/data");
        fs::create_dir_all(&nfs)?;
        let writer = running(node, "writer", mount(&nfs, "/data", PropagationPrivate))?;

        let said = diagnose(node)?;
        ensure!(said.code() == 1 && said.stderr.is_empty(), "{said:?}");
        for (word, pod) in [
            ("stale ", "default/starting"),
            ("old files ", "default/reader"),
            ("pinned ", "default/exporter"),
            ("private ", "default/exporter"),
            ("unmounted ", "default/writer"),
        ] {
            let paragraph = said.stdout.split_inclusive("\n").collect::<Vec<_>>();
            let at = paragraph.iter().position(|line| line.starts_with(word));
            let at = at.with_context(|| format!("no {word}: {said:?}"))?;
            let rest = &paragraph[at + 1..];
            let end = rest.iter().position(|line| !line.starts_with(' '));
            let found = [&paragraph[at..=at], &rest[..end.unwrap_or(rest.len())]].concat();
            ensure!(found.concat().contains(pod), "{word}: {said:?}");
        }
        let cri = node.cri()?;
        [starting, reader, exporter, writer]
            .iter()
            .try_for_each(|pod| cri.remove_pod(pod))
    });
}

on_newest_and_older!(story);

/// The running containerd says where its root is: no list has that folder.
#[test]
fn a_bind_of_the_root_of_a_moved_containerd() {
    Setup::on(Generation::NEWEST).bare().cri().story(|node| {
        let root = node.disk().join("containerd");
        let bind = mount(&root, "/data", PropagationPrivate);
        let pod = running(node, "backup", bind)?;
        let said = diagnose(node)?;
        ensure!(
            said.stdout.contains("private ") && said.stdout.contains("default/backup"),
            "{said:?}"
        );
        node.cri()?.remove_pod(&pod)
    });
}

fn running(node: &Node, name: &str, mount: Mount) -> Result<Sandbox> {
    let cri = node.cri()?;
    let sandbox = cri.run_pod("runc", name, &format!("uid-{name}"))?;
    cri.start_container(&sandbox, "app", &SLEEP, &[mount])?;
    Ok(sandbox)
}

/// README's command.
fn diagnose(node: &Node) -> Result<Finished> {
    let mut command = node.command("./bindguard")?;
    command.args(["diagnose", "--all"]);
    command.current_dir(node.under_test());
    run(command)
}
