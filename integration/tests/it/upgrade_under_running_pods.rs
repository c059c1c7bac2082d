//! Issue 16: an upgrade, a downgrade and a removal under running pods. A pod keeps the shim and the
//! guard of the version under which it was created; a new pod gets the selected version; a version
//! goes when nothing needs it.

use bindguard_integration::prelude::*;
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;

use bindguard_integration::on_every_generation;
use bindguard_integration::programs::SHIM;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");
/// Of the same length.
const OTHER_VERSION: &str = "7.8.9";
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
        each_pod_is_named_with_its_version(node)?;
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

/// The programs with a different version: a version of the same length replaces the version in the
/// bytes.
fn another_build(node: &Node) -> Result<PathBuf> {
    let folder = node.disk().join("another build");
    fs::create_dir(&folder)?;
    for program in [SHIM, GUARD] {
        let from = node.disk().join("dist").join(program);
        let mut bytes = fs::read(&from).with_context(|| format!("read {program}"))?;
        let (own, other) = (OWN_VERSION.as_bytes(), OTHER_VERSION.as_bytes());
        for at in 0..=bytes.len() - own.len() {
            if bytes[at..].starts_with(own) {
                bytes[at..at + own.len()].copy_from_slice(other);
            }
        }
        fs::write(folder.join(program), bytes)?;
        let mode = fs::metadata(&from)?.permissions();
        fs::set_permissions(folder.join(program), mode)?;
    }
    fs::copy(node.disk().join("dist").join(CLI), folder.join(CLI))?;
    // bytes after the end of an ELF file mean nothing
    OpenOptions::new()
        .append(true)
        .open(folder.join(CLI))?
        .write_all(b"another build")?;
    Ok(folder)
}

/// After a security fix an operator needs the pods that still run the old version. The first pod
/// has `OWN_VERSION`, and the second pod `OTHER_VERSION`, whatever the link selects.
fn each_pod_is_named_with_its_version(node: &Node) -> Result<()> {
    let json = |verb: &str| -> Result<Value> {
        let words = [verb, "--json"];
        let done = bindguard(node, &node.disk().join("dist"), &words)?;
        serde_json::from_str(&done.stdout).with_context(|| done.stderr)
    };
    let status = json("status")?;
    let named = |version: &str| {
        let versions = status["pods"]["versions"].as_array();
        let of_version = versions
            .into_iter()
            .flatten()
            .find(|it| it["version"] == version);
        of_version.map_or_else(String::new, |it| it["pods"].to_string())
    };
    ensure!(
        named(OWN_VERSION).contains("uid-first") && named(OTHER_VERSION).contains("uid-second"),
        "{status}"
    );
    ensure!(
        !named(OWN_VERSION).contains("uid-second") && !named(OTHER_VERSION).contains("uid-first"),
        "{status}"
    );
    let text = bindguard(node, &node.disk().join("dist"), &["status"])?.stdout;
    ensure!(
        text.contains(&format!("1 under {OTHER_VERSION}: default/uid-second")),
        "{text}"
    );
    let doctor = json("doctor")?;
    let points = doctor["points"].as_array().context("points")?;
    let programs = points
        .iter()
        .find(|point| point["name"] == "programs")
        .context("the point")?["message"]
        .to_string();
    ensure!(
        programs.contains(&format!("1 under {OTHER_VERSION}: default/uid-second"))
            && programs.contains(&format!("1 under {OWN_VERSION}")),
        "{programs}"
    );
    let journal = json("journal")?;
    let versions: BTreeSet<&str> = journal["admissions"]
        .as_array()
        .context("admissions")?
        .iter()
        .filter_map(|line| line["bindguard"].as_str())
        .collect();
    ensure!(
        versions == BTreeSet::from([OWN_VERSION, OTHER_VERSION]),
        "{journal}"
    );
    let text = bindguard(node, &node.disk().join("dist"), &["journal", "--all"])?.stdout;
    ensure!(
        text.contains(&format!(", bindguard {OTHER_VERSION})")),
        "{text}"
    );
    Ok(())
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

/// A pod with a container that reads a subPath of a configMap.
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
        let shim = Path::new(STORE).join(version).join(SHIM);
        ensure!(
            node.shims_of(&shim)? == 1,
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
