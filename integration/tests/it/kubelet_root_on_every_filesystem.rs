//! The kubelet's root on ext4, xfs, a btrfs with subvolumes, an overlay and a tmpfs: deleted files,
//! link counts and device numbers look different on each filesystem, but the verdict and the repair
//! are equal.

use bindguard_integration::KubeletRoot;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::{Shape, UpdateThenRestart};
use bindguard_integration::stale::StaleBundle;

fn story(root: KubeletRoot) {
    Setup::on(Generation::NEWEST)
        .kubelet_root(root)
        .story(|node| {
            let (kind, runtime) = (VolumeKind::ConfigMap, Runtime::Bindguard);
            UpdateThenRestart {
                kind,
                shape: Shape::NestedKey,
                runtime,
            }
            .play(node)?;
            replaced_then_restarted(node, VolumeKind::EmptyDir)?;
            replaced_then_restarted(node, VolumeKind::EmptyDirMemory)?;
            let mut stale = StaleBundle::lay_out(node, "stale")?;
            for _ in 0..5 {
                stale.begin_anew()?;
                stale.next_create()?;
            }
            stale.delete()
        });
}

#[test]
fn ext4() {
    story(KubeletRoot::OwnFilesystem);
}

#[test]
fn xfs() {
    story(KubeletRoot::Xfs);
}

#[test]
fn btrfs_subvolume() {
    story(KubeletRoot::BtrfsSubvolume);
}

#[test]
fn overlay() {
    story(KubeletRoot::Overlay);
}

#[test]
fn tmpfs() {
    story(KubeletRoot::Tmpfs);
}

/// A container writes a new file beside the old file, renames the new file over the old file, as
/// editors and agents do, and restarts.
fn replaced_then_restarted(node: &Node, kind: VolumeKind) -> Result<()> {
    let pod = node.kubelet().pod("writes")?;
    let volume = pod.empty_volume(kind, "cache")?;
    let file = volume.path().join("folder/state");
    fs::create_dir(volume.path().join("folder")).context("make the volume's folder")?;
    fs::write(&file, "start").context("write the volume's file")?;
    let subpath = volume.subpath("app", 0, "folder/state");
    let bind = Bind::new(subpath.bind()?, "/state");
    for content in ["one", "two", "three"] {
        let new = volume.path().join("folder/new");
        fs::write(&new, content)
            .and_then(|()| fs::rename(&new, &file))
            .context("replace the volume's file")?;
        let read = node
            .ctr()
            .container("writer")
            .mount(bind.clone())
            .runs(&["cat", "/state"])
            .run_to_end()?
            .success()?;
        ensure!(
            read == content,
            "{kind:?}: the container reads {read:?} and not {content:?}"
        );
        only_a_current_mount(&subpath)?;
    }
    pod.delete()
}
