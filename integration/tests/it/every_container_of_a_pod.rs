//! An init container, a sidecar and two containers of a pod share a configMap.
//! `volume-subpaths/VOLUME/CONTAINER/INDEX` has the index in *the container's* `volumeMounts`,
//! including mounts without a `subPath`: the repair affects only the created container's subpath.
//! The API forbids a `subPath` in an ephemeral container, which gets the whole volume.

use bindguard_integration::kubelet::Subpath;
use bindguard_integration::mounts::Mount;
use bindguard_integration::prelude::*;

/// Container, index and sub path. `init` mounts something else first; `app` does so in between.
const MOUNTS: [(&str, u32, &str); 5] = [
    ("init", 1, "a.conf"),
    ("sidecar", 0, "b.conf"),
    ("app", 0, "b.conf"),
    ("app", 2, "a.conf"),
    ("other", 10, "deep/c.conf"),
];

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        let pod = node.kubelet().pod("uid-1")?;
        let volume = pod.empty_volume(VolumeKind::ConfigMap, "conf")?;
        update(&volume, "at first")?;
        let subpaths: Vec<_> = MOUNTS
            .iter()
            .map(|(name, index, path)| volume.subpath(name, *index, path))
            .collect();
        for subpath in &subpaths {
            subpath.bind()?;
        }
        for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
            update(&volume, &format!("{runtime:?}"))?;
            for container in ["init", "sidecar", "app", "other"] {
                restarts(node, runtime, container, &subpaths)
                    .with_context(|| format!("{container} with {runtime:?}"))?;
            }
            let ctr = node.ctr();
            let debugger = ctr
                .container("debugger")
                .runtime(runtime)
                .mount(Bind::new(volume.path(), "/conf"));
            let read = debugger
                .runs(&["cat", "/conf/a.conf"])
                .run_to_end()?
                .success()?;
            ensure!(
                read == format!("a {runtime:?}"),
                "the ephemeral container reads {read:?}"
            );
        }
        let folder = volume
            .path()
            .ancestors()
            .nth(3)
            .context("the pod's folder")?
            .join("volume-subpaths/conf");
        ensure!(
            names_in(&folder)? == ["app", "init", "other", "sidecar"],
            "folders of the containers"
        );
        ensure!(
            names_in(&folder.join("app"))? == ["0", "2"],
            "indices of app"
        );
        pod.delete()
    });
}

on_newest_and_older!(story);

/// The kubelet writes a new payload with all files.
fn update(volume: &Volume, version: &str) -> Result<()> {
    let [a, b, c] = ["a", "b", "c"].map(|name| format!("{name} {version}"));
    volume.update(&[("a.conf", &a), ("b.conf", &b), ("deep/c.conf", &c)])
}

/// The container gets the current content of each of its own, and the mounts of those that come
/// later stay as they are.
fn restarts(node: &Node, runtime: Runtime, container: &str, subpaths: &[Subpath]) -> Result<()> {
    let ctr = node.ctr();
    let is_own = |(name, _, _): &(&str, u32, &str)| *name == container;
    let others: Vec<_> = MOUNTS
        .iter()
        .zip(subpaths)
        .filter(|(mount, _)| !is_own(mount))
        .map(|(_, s)| s)
        .collect();
    let before = tables(&others)?;
    let mut created = ctr.container(container).runtime(runtime);
    let mut expected = Vec::new();
    for ((_, index, path), subpath) in MOUNTS
        .iter()
        .zip(subpaths)
        .filter(|(mount, _)| is_own(mount))
    {
        created = created.mount(Bind::new(subpath.target(), &format!("/etc/{index}")));
        let name = Path::new(path)
            .file_stem()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        expected.push(format!("{name} {runtime:?}"));
    }
    let read = created
        .runs(&[
            "sh",
            "-c",
            "for file in /etc/[0-9]*; do cat $file; echo; done",
        ])
        .run_to_end()?
        .success()?;
    ensure!(
        read.lines().eq(expected.iter().map(String::as_str)),
        "it reads {read:?}, and not {expected:?}"
    );
    for (_, subpath) in MOUNTS
        .iter()
        .zip(subpaths)
        .filter(|(mount, _)| is_own(mount))
    {
        only_a_current_mount(subpath)?;
    }
    ensure!(
        tables(&others)? == before,
        "another container's mount was touched"
    );
    Ok(())
}

fn tables(subpaths: &[&Subpath]) -> Result<Vec<String>> {
    let shown = |mounts: Vec<Mount>| format!("{mounts:?}");
    subpaths
        .iter()
        .map(|subpath| subpath.mounts().map(shown))
        .collect()
}

fn names_in(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    let mut names: Vec<_> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}
