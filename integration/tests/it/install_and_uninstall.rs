//! An operator puts bindguard onto a node with pods on it, previews the changes first, and takes it
//! off again: nothing that runs is harmed, containerd's own view of its files says what changed,
//! and afterwards every byte is as it was.

use bindguard_integration::prelude::*;
use std::os::unix::fs::PermissionsExt;

use bindguard_integration::on_every_generation;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const PREFIX: &str = "/usr/local/bin";
const INSTALLED_SHIM: &str = concat!(
    "/usr/local/lib/bindguard/",
    env!("CARGO_PKG_VERSION"),
    "/containerd-shim-bindguard-v2"
);

fn by_runtime_class(generation: Generation) {
    Setup::on(generation)
        .cri()
        .bare()
        .story(install_run_uninstall);
}

on_every_generation!(by_runtime_class);

/// containerd 2.3 and newer write `version = 4`. containerd 2.1 writes `version = 3`.
mod with_a_file_as_containerd_writes_it {
    use super::*;

    #[test]
    fn story() {
        Setup::on(Generation::NEWEST).cri().bare().story(|node| {
            let file = node.containerd_config();
            let mut migrate = node.command(node.containerd())?;
            migrate
                .arg("--config")
                .arg(file)
                .args(["config", "migrate"]);
            let text = run(migrate)?.success()?;
            let version = node.newest_config_version()?;
            ensure!(text.lines().any(|line| line == version), "{text}");
            fs::write(file, text)?;
            node.restart_containerd(Signal::SIGTERM)?;
            install_run_uninstall(node)
        });
    }
}

fn install_run_uninstall(node: &Node) -> Result<()> {
    let before = State::of(node)?;
    let old_pod = Pod::run(node, "", "uid-old")?;

    let look = node.bindguard(["install", "--dry-run"])?;
    ensure!(
        look.code() == 1 && look.stdout.contains("+++ /etc/containerd/"),
        "{look:?}"
    );
    ensure!(State::of(node)? == before, "looking changed something");
    let done = node.bindguard(["install"])?.success()?;
    ensure!(
        done.contains("run      systemctl restart containerd"),
        "{done}"
    );
    let again = node.bindguard(["install"])?.success()?;
    ensure!(
        again.contains("no file has to change"),
        "not idempotent: {again}"
    );

    node.restart_containerd(Signal::SIGTERM)?;
    let old_pod = old_pod.restarted(node)?;
    let pod = Pod::run(node, "bindguard", "uid-new")?;
    ensure!(
        node.shims_of(Path::new(INSTALLED_SHIM))? == 1,
        "the pod does not run under the installed shim"
    );
    let pod = pod.restarted_after_an_update(node)?;

    // the installation stays active for the pod's containers, which restart
    let held = node.bindguard(["uninstall"])?;
    ensure!(
        held.code() == 1 && held.stdout.contains("handler bindguard kept for 1 pod"),
        "{held:?}"
    );
    ensure!(
        !held.stdout.contains("nothing"),
        "it contradicts itself: {held:?}"
    );
    ensure!(
        Path::new(INSTALLED_SHIM).exists(),
        "the pod's shim is gone from under it"
    );
    node.restart_containerd(Signal::SIGTERM)?;
    pod.restarted(node)?.remove(node)?;
    let held = node.bindguard(["uninstall"])?;
    ensure!(
        held.code() == 1 && held.stdout.contains("until a restarted service"),
        "{held:?}"
    );
    node.restart_containerd(Signal::SIGTERM)?;
    old_pod.restarted(node)?.remove(node)?;
    uninstall_at_last(node)?;
    let again = uninstall_at_last(node)?;
    ensure!(
        again.contains("no file has to change"),
        "not idempotent: {again}"
    );
    State::of(node)?.is(&before)
}

mod for_all_pods {
    use super::*;

    fn story(generation: Generation) {
        Setup::on(generation).cri().bare().story(|node| {
            let before = State::of(node)?;
            let old_pod = Pod::run(node, "", "uid-old")?;
            let done = node.bindguard(["install", "--default"])?.success()?;
            ensure!(done.contains("default_runtime_name"), "{done}");
            ensure!(
                node.bindguard(["install", "--default"])?
                    .success()?
                    .contains("no file has to change"),
                "not idempotent"
            );
            node.restart_containerd(Signal::SIGTERM)?;
            // a container of a pod that is older than bindguard
            let old_pod = old_pod.restarted(node)?;
            let pod = Pod::run(node, "", "uid-new")?.restarted_after_an_update(node)?;
            // a pod may outlive bindguard on its node
            node.bindguard(["uninstall"])?;
            node.restart_containerd(Signal::SIGTERM)?;
            pod.restarted(node)?.remove(node)?;
            old_pod.restarted(node)?.remove(node)?;
            uninstall_at_last(node)?;
            State::of(node)?.is(&before)
        });
    }

    on_every_generation!(story);
}

/// A shim, and the call by which containerd cleans up after it, end a moment after the last
/// container. Returns what the last call printed.
fn uninstall_at_last(node: &Node) -> Result<String> {
    let mut printed = String::new();
    until("nothing needs the programs", || {
        let done = node.bindguard(["uninstall"])?;
        ensure!(
            done.code() == 0 || done.stdout.contains("run this again later"),
            "{done:?}"
        );
        printed = done.stdout.clone();
        Ok(done.code() == 0)
    })?;
    Ok(printed)
}

/// A pod with a container that reads a subPath of a configMap.
struct Pod {
    pod: bindguard_integration::Pod,
    volume: Volume,
    mounts: Vec<Mount>,
    sandbox: Sandbox,
    container: String,
}

impl Pod {
    fn run(node: &Node, handler: &str, uid: &str) -> Result<Self> {
        let pod = node.kubelet().pod(uid)?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        let mounts = vec![mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
        let sandbox = node.cri()?.run_pod(handler, uid, uid)?;
        let container = node
            .cri()?
            .start_container(&sandbox, "app", &SLEEP, &mounts)?;
        Ok(Self {
            pod,
            volume,
            mounts,
            sandbox,
            container,
        })
    }

    fn restarted(mut self, node: &Node) -> Result<Self> {
        let (cri, doing) = (node.cri()?, || {
            format!("restart the container of {}", self.pod.uid())
        });
        cri.stop(&self.container, 0).with_context(doing)?;
        cri.remove(&self.container).with_context(doing)?;
        self.container = cri
            .start_container(&self.sandbox, "app", &SLEEP, &self.mounts)
            .with_context(doing)?;
        ensure!(
            cri.exec(&self.container, &["true"])?.code == 0,
            "nothing can be run in it"
        );
        Ok(self)
    }

    fn restarted_after_an_update(self, node: &Node) -> Result<Self> {
        self.volume.update(&[("app.conf", "two")])?;
        let pod = self.restarted(node)?;
        ensure!(
            node.cri()?.read(&pod.container, "/etc/app.conf")? == "two",
            "the guard was not there"
        );
        Ok(pod)
    }

    fn remove(self, node: &Node) -> Result<()> {
        node.cri()?.remove_pod(&self.sandbox)?;
        self.pod.delete()
    }
}

/// Every file that an installation may touch, and its folder, with its mode.
#[derive(Debug, PartialEq)]
struct State(Vec<(String, u32, Vec<u8>)>);

impl State {
    fn of(node: &Node) -> Result<Self> {
        let mut files = vec![node.containerd_config().to_path_buf()];
        let store = "/usr/local/lib/bindguard";
        for folder in [
            "/etc/bindguard",
            "/var/lib/bindguard",
            PREFIX,
            store,
            "/etc/containerd",
            // the default of containerd 2.2 and newer imports it
            "/etc/containerd/conf.d",
            "/etc/docker",
        ] {
            let Ok(entries) = Path::new(folder).read_dir() else {
                continue;
            };
            let is_meant = |path: &PathBuf| {
                path.is_file() && (folder != PREFIX || path.to_string_lossy().contains("bindguard"))
            };
            files.push(folder.into());
            files.extend(entries.flatten().map(|entry| entry.path()).filter(is_meant));
        }
        files.sort();
        files.dedup();
        let seen = |path: &PathBuf| {
            let mode = fs::metadata(path)
                .with_context(|| format!("open {}", path.display()))?
                .permissions()
                .mode();
            let bytes = if path.is_dir() {
                Vec::new()
            } else {
                fs::read(path)?
            };
            Ok((path.display().to_string(), mode, bytes))
        };
        Ok(Self(files.iter().map(seen).collect::<Result<_>>()?))
    }

    fn is(&self, before: &Self) -> Result<()> {
        let beyond = |these: &Self, those: &Self| {
            let only = these.0.iter().filter(|file| !those.0.contains(file));
            only.map(|(name, mode, bytes)| format!("{name} {mode:o}, {} bytes", bytes.len()))
                .collect::<Vec<_>>()
        };
        let (gone, new) = (beyond(before, self), beyond(self, before));
        ensure!(
            gone.is_empty() && new.is_empty(),
            "not as it was\nbefore: {gone:?}\nafter: {new:?}"
        );
        Ok(())
    }
}
