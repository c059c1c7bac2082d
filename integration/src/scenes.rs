//! Scenes that several stories play with different data.
//!
//! A scene is a sequence of steps whose every outcome is checked; what a story varies is data.

use std::thread;

use anyhow::{Result, anyhow, ensure};

use crate::ctr::{Bind, Runtime};
use crate::kubelet::{Subpath, VolumeKind};
use crate::mounts;
use crate::node::Node;
use crate::process::Finished;
use crate::runtime::Gate;
use crate::waiting::until;

/// The type of file that a `subPath` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A key of the volume.
    File,
    /// A folder of the volume.
    Directory,
    /// A key inside of a folder (`items[].path` with a slash).
    NestedKey,
}

impl Shape {
    /// Every shape.
    pub const ALL: [Self; 3] = [Self::File, Self::Directory, Self::NestedKey];

    fn key(self) -> &'static str {
        match self {
            Self::File => "app.conf",
            Self::Directory | Self::NestedKey => "folder/app.conf",
        }
    }

    fn sub_path(self) -> &'static str {
        match self {
            Self::File => "app.conf",
            Self::Directory => "folder",
            Self::NestedKey => "folder/app.conf",
        }
    }

    /// The path that the container reads, if the subpath is mounted on `/etc/app`.
    fn file(self) -> &'static str {
        match self {
            Self::File | Self::NestedKey => "/etc/app",
            Self::Directory => "/etc/app/app.conf",
        }
    }
}

/// A volume changes and its container restarts, twice; then the kubelet deletes the pod.
#[derive(Clone, Copy, Debug)]
pub struct UpdateThenRestart {
    pub kind: VolumeKind,
    /// The mounted part of it.
    pub shape: Shape,
    /// The door through which the container is created.
    pub runtime: Runtime,
}

impl UpdateThenRestart {
    /// Plays it on a node.
    pub fn play(self, node: &Node) -> Result<()> {
        let before = mounts::table()?.len();
        let (key, ctr) = (self.shape.key(), node.ctr());
        let pod = node.kubelet().pod("a0c1")?;
        let volume = pod.volume(self.kind, "conf", &[(key, "one"), ("other", "")])?;
        let subpath = volume.subpath("app", 0, self.shape.sub_path());
        subpath.bind()?;
        self.restart(node, &subpath, "first", "one")?;
        for (previous, id, content) in [("first", "second", "two"), ("second", "third", "three")] {
            let old = ctr.read(previous, self.shape.file())?;
            volume.update(&[(key, content), ("other", "")])?;
            // a bound directory is emptied by the update, a bound file lives on
            if self.shape != Shape::Directory {
                let still = ctr.read(previous, self.shape.file())?;
                ensure!(
                    still == old,
                    "{previous} of {self:?} was started with {old:?}, and now reads {still:?}"
                );
            }
            ctr.remove(previous)?;
            self.restart(node, &subpath, id, content)?;
        }
        ctr.remove("third")?;
        ensure!(
            volume.timestamp_directories()? == 1,
            "a timestamp directory was stranded"
        );
        pod.delete()?;
        let after = mounts::table()?.len();
        ensure!(before == after, "{before} mounts before, {after} after");
        Ok(())
    }

    fn restart(self, node: &Node, subpath: &Subpath, id: &str, content: &str) -> Result<()> {
        let ctr = node.ctr();
        ctr.container(id)
            .runtime(self.runtime)
            .mount(Bind::new(subpath.target(), "/etc/app"))
            .start()?
            .success()?;
        let read = ctr.read(id, self.shape.file())?;
        ensure!(
            read == content,
            "{id} of {self:?} reads {read:?}, not {content:?}"
        );
        only_a_current_mount(subpath)
    }
}

/// Checks that a subpath has exactly one mount, whose file is not deleted.
pub fn only_a_current_mount(subpath: &Subpath) -> Result<()> {
    let mounts = subpath.mounts()?;
    ensure!(
        mounts.len() == 1 && !mounts[0].is_deleted(),
        "not one current mount on {}: {mounts:?}",
        subpath.target().display()
    );
    Ok(())
}

/// Deletes a pod as the kubelet does. It tries again when a check of the agent has a mount open.
pub fn delete_pod(node: &Node, uid: &str) -> Result<()> {
    let mut last = Ok(());
    until("the kubelet deletes the pod", || {
        last = node.kubelet().pod(uid)?.delete();
        Ok(last.is_ok())
    })?;
    last
}

/// True if a runtime's error says that a file is missing. crun begins with a capital letter.
pub fn says_no_such_file(error: &str) -> bool {
    error.contains("o such file or directory")
}

/// kubernetes#127602 on a node with an obedient runtime: the configMap of the container `racer`
/// changes from `one` to `two` when all checks are made, just before the runtime mounts.
pub fn create_with_an_update_in_between(node: &Node, runtime: Runtime) -> Result<Finished> {
    let pod = node.kubelet().pod(&format!("{runtime:?}"))?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let (ctr, gate) = (node.ctr(), Gate::of(&node.programs()));
    let container = ctr
        .container("racer")
        .runtime(runtime)
        .mount(Bind::new(subpath.bind()?, "/etc/app.conf"));

    gate.close()?;
    let created = thread::scope(|scope| {
        let create = scope.spawn(|| container.start());
        let update = gate
            .wait_for_call()
            .and_then(|()| volume.update(&[("app.conf", "two")]));
        gate.open()?;
        let created = create
            .join()
            .map_err(|_| anyhow!("the creating thread panicked"))?;
        update.and(created)
    })?;
    if created.status.success() {
        only_a_current_mount(&subpath)?;
    }
    Ok(created)
}
