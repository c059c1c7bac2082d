//! Issue 16: an upgrade, a downgrade and a removal under running pods. A pod keeps the shim and the
//! guard of the version under which it was created; a new pod gets the selected version; a version
//! goes when nothing needs it.

use std::fs;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bindguard_integration::cri::{Sandbox, mount};
use bindguard_integration::process::{Finished, run};
use bindguard_integration::programs::{CLI, GUARD, SHIM};
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Setup, Volume, VolumeKind, on_every_generation};
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use nix::sys::signal::Signal;

const STORE: &str = "/usr/local/lib/bindguard";

fn story(generation: Generation) {
    Setup::on(generation).cri().bare().story(|node| {
        let (old, new) = (node.disk().join("dist"), another_build(node)?);
        let words = ["install", "--default"];
        bindguard(node, &old, &words)?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        let first_version = selected()?;
        let first = Pod::run(node, "uid-first")?;

        let upgraded = bindguard(node, &new, &words)?.success()?;
        ensure!(
            !upgraded.contains("systemctl"),
            "an upgrade needs no restart of containerd: {upgraded}"
        );
        let second_version = selected()?;
        ensure!(
            second_version != first_version,
            "the new build is not selected"
        );
        ensure!(
            versions()?.len() == 2,
            "the version of a running pod is gone: {:?}",
            versions()?
        );
        let first = first.works(node, &first_version)?;
        let second = Pod::run(node, "uid-second")?.works(node, &second_version)?;
        first.remove(node)?;
        until("the version that nothing needs goes", || {
            bindguard(node, &new, &words)?.success()?;
            Ok(versions()? == [second_version.clone()])
        })?;

        bindguard(node, &old, &words)?.success()?;
        ensure!(
            selected()? == first_version,
            "the old version is not selected again"
        );
        let second = second.works(node, &second_version)?;
        let third = Pod::run(node, "uid-third")?.works(node, &first_version)?;
        ensure!(
            bindguard(node, &old, &["uninstall"])?.code() == 1,
            "the running containerd names the programs"
        );
        node.restart_containerd(Signal::SIGTERM)?;
        let second = second.works(node, &second_version)?;
        let third = third.works(node, &first_version)?;
        ensure!(
            bindguard(node, &old, &["uninstall"])?.code() == 1,
            "two pods need the programs"
        );
        second.remove(node)?;
        third.remove(node)?;
        until("nothing needs the programs", || {
            Ok(bindguard(node, &old, &["uninstall"])?.code() == 0)
        })?;
        ensure!(!Path::new(STORE).exists(), "a version is left");
        for program in [SHIM, GUARD, CLI] {
            let link = Path::new("/usr/local/bin").join(program);
            ensure!(
                link.symlink_metadata().is_err(),
                "{} is left",
                link.display()
            );
        }
        Ok(())
    });
}

on_every_generation!(story);

/// The same programs with another hash: bytes after the end of an ELF file mean nothing.
fn another_build(node: &Node) -> Result<PathBuf> {
    let folder = node.disk().join("another build");
    fs::create_dir(&folder)?;
    for program in [SHIM, GUARD, CLI] {
        let path = folder.join(program);
        fs::copy(node.disk().join("dist").join(program), &path)
            .with_context(|| format!("copy {program}"))?;
        OpenOptions::new()
            .append(true)
            .open(&path)?
            .write_all(b"another build")?;
    }
    Ok(folder)
}

fn bindguard(node: &Node, build: &Path, words: &[&str]) -> Result<Finished> {
    let mut command = node.command(build.join(CLI))?;
    command.args(words);
    run(command)
}

fn selected() -> Result<String> {
    let link = fs::read_link(Path::new(STORE).join("current"))
        .context("read the link that selects a version")?;
    Ok(link.display().to_string())
}

fn versions() -> Result<Vec<String>> {
    let names = fs::read_dir(STORE)?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names.filter(|name| name != "current").collect())
}

/// A pod with one container that reads a subPath of a configMap.
struct Pod {
    pod: bindguard_integration::Pod,
    volume: Volume,
    content: u32,
    mounts: Vec<Mount>,
    sandbox: Sandbox,
    container: String,
}

impl Pod {
    fn run(node: &Node, uid: &str) -> Result<Self> {
        let pod = node.kubelet().pod(uid)?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "0")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        let mounts = vec![mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
        let sandbox = node.cri()?.run_pod("", uid, uid)?;
        let container =
            node.cri()?
                .start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        Ok(Self {
            pod,
            volume,
            content: 0,
            mounts,
            sandbox,
            container,
        })
    }

    /// An exec, and a restart after an update of the volume. A shim of this version is there.
    fn works(mut self, node: &Node, version: &str) -> Result<Self> {
        let cri = node.cri()?;
        ensure!(
            cri.exec(&self.container, &["true"])?.code == 0,
            "nothing can be run in {}",
            self.pod.uid()
        );
        self.content += 1;
        self.volume
            .update(&[("app.conf", &self.content.to_string())])?;
        cri.stop(&self.container, 0)?;
        cri.remove(&self.container)?;
        self.container =
            cri.start_container(&self.sandbox, "app", &["sleep", "1000000"], &self.mounts)?;
        let read = cri.read(&self.container, "/etc/app.conf")?;
        ensure!(
            read == self.content.to_string(),
            "the guard of {} was not there: {read:?}",
            self.pod.uid()
        );
        let guards = node.generation() != Generation::V1_6;
        let shim = Path::new(STORE).join(version).join(SHIM);
        ensure!(
            !guards || node.shims_of(&shim)? == 1,
            "{} does not run under {}",
            self.pod.uid(),
            shim.display()
        );
        Ok(self)
    }

    fn remove(self, node: &Node) -> Result<()> {
        node.cri()?.remove_pod(&self.sandbox)?;
        self.pod.delete()
    }
}
