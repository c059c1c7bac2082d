//! CVE-2017-1002101: a container plants symlinks in its volume and waits for a restart. Nothing
//! outside of the volume is ever bound, whatever the links say and however fast they change.
//!
//! A repair that resolved links with realpath showed a host's /etc in a container.

use bindguard_integration::prelude::*;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use bindguard_integration::Pod;
use bindguard_integration::kubelet::Subpath;

const SECRET: &str = "the host's secret";

/// An emptyDir whose containers mount `folder/file` of it, and a host's folder of the same shape.
struct Stage {
    outside: PathBuf,
    volume: Volume,
    subpath: Subpath,
}

impl Stage {
    fn set(node: &Node, pod: &Pod, kind: VolumeKind) -> Result<Self> {
        let outside = node.disk().join("outside");
        write(&outside.join("folder/file"), SECRET)?;
        let volume = pod.empty_volume(kind, &format!("{kind:?}").to_lowercase())?;
        let subpath = volume.subpath("app", 0, "folder/file");
        let stage = Self {
            outside,
            volume,
            subpath,
        };
        write(&stage.inside("folder/file"), "inside")?;
        stage.subpath.bind()?;
        Ok(stage)
    }

    fn inside(&self, path: &str) -> PathBuf {
        self.volume.path().join(path)
    }

    /// The content that a new container reads, if it starts.
    fn restart(&self, node: &Node) -> Result<Option<String>> {
        let bind = Bind::new(self.subpath.target(), "/etc/file");
        let ended = node
            .ctr()
            .container("victim")
            .mount(bind)
            .runs(&["cat", "/etc/file"])
            .run_to_end()?;
        // `--rm` does not remove a container whose create failed
        if !ended.status.success() {
            let _ = node.ctr().forget("victim");
        }
        ensure!(
            !ended.stdout.contains(SECRET),
            "the container reads the host's file"
        );
        let bound = self.subpath.mounts()?;
        ensure!(
            !bound.iter().any(|mount| mount.root.contains("outside")),
            "the host's folder is bound: {bound:?}"
        );
        Ok(ended.status.success().then_some(ended.stdout))
    }
}

#[test]
fn planted_links() {
    Setup::on(Generation::V1_7).story(|node| {
        for kind in [VolumeKind::EmptyDir, VolumeKind::EmptyDirMemory] {
            let pod = node.kubelet().pod(&format!("{kind:?}"))?;
            let stage = Stage::set(node, &pod, kind)?;
            plant_each_link(node, &stage)?;
            pod.delete()?;
        }
        Ok(())
    });
}

fn plant_each_link(node: &Node, stage: &Stage) -> Result<()> {
    let up = "../".repeat(32);
    let relative =
        |path: &str| PathBuf::from(format!("{up}{}", stage.outside.join(path).display()));
    let links = [
        ("folder/file", stage.outside.join("folder/file")),
        ("folder/file", relative("folder/file")),
        ("folder", stage.outside.join("folder")),
        ("folder", relative("folder")),
        (
            "folder/file",
            PathBuf::from("/proc/self/root")
                .join(stage.outside.join("folder/file").strip_prefix("/")?),
        ),
    ];
    for (place, target) in links {
        clear(&stage.inside("folder"))?;
        fs::create_dir_all(stage.inside("folder")).context("make the volume's folder")?;
        clear(&stage.inside(place))?;
        symlink(&target, stage.inside(place))
            .with_context(|| format!("plant {place} -> {}", target.display()))?;
        let started = stage.restart(node)?;
        ensure!(
            started.is_none(),
            "a container started on {place} -> {}: reads {started:?}",
            target.display()
        );

        // The link is the reason: with a real file in its place the same subpath is re-bound.
        clear(&stage.inside("folder"))?;
        write(&stage.inside("folder/file"), "inside")?;
        ensure!(
            stage.restart(node)?.as_deref() == Some("inside"),
            "no restart after {place} -> {}",
            target.display()
        );
    }
    Ok(())
}

#[test]
fn links_swapped_in_a_loop() {
    Setup::on(Generation::V1_7).story(|node| {
        let pod = node.kubelet().pod("loop")?;
        let stage = Stage::set(node, &pod, VolumeKind::EmptyDir)?;
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let attacker = scope.spawn(|| swap(&stage, &over));
            let restarts = (0..40).try_for_each(|_| stage.restart(node).map(drop));
            over.store(true, Ordering::Relaxed);
            attacker
                .join()
                .map_err(|_| anyhow!("the attacker's thread panicked"))?
                .context("swap links")?;
            restarts
        })?;
        // the attacker left a real file behind: a fair restart works again
        ensure!(stage.restart(node)?.as_deref() == Some("inside"));
        pod.delete()
    });
}

/// Now a real folder with a real file, now a link out of the volume, each put in place by a rename.
fn swap(stage: &Stage, over: &AtomicBool) -> Result<()> {
    let (folder, moved, link) = (
        stage.inside("folder"),
        stage.inside("moved"),
        stage.inside("link"),
    );
    while !over.load(Ordering::Relaxed) {
        fs::rename(&folder, &moved).context("move the folder")?;
        symlink(&stage.outside, &link).context("make a link")?;
        fs::rename(&link, &folder).context("put the link in place")?;
        fs::remove_file(&folder).context("remove the link")?;
        fs::rename(&moved, &folder).context("put the folder back")?;
        // a new file: the mount of the old file is stale from now on
        write(&folder.join("new"), "inside")?;
        match fs::rename(folder.join("new"), folder.join("file")) {
            // this attacker lives in the host's namespace, where the file may be a mount point for
            // the time of a swap
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
            done => done.context("replace the file")?,
        }
    }
    Ok(())
}

fn write(file: &Path, content: &str) -> Result<()> {
    let folder = file.parent().context("a file has a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    fs::write(file, content).with_context(|| format!("write {}", file.display()))
}

fn clear(path: &Path) -> Result<()> {
    let Ok(kind) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    let removed = if kind.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    removed.with_context(|| format!("remove {}", path.display()))
}
