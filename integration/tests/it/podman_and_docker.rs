//! Both faults and both repairs under Podman and Docker, with runc and with crun. The guard runs
//! through the runtime of `bindguard install`, and under Podman also through the precreate hook.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::engines::{Docker, Podman, Storage, missing, program};
use bindguard_integration::privilege;

#[test]
fn podman() {
    story(|node| {
        let podman = Podman::on(node)?;
        node.bindguard(["install", "podman"])?.success()?;
        for runtime in ["runc", "crun"] {
            set_runtime(node, runtime)?;
            both_faults(node, |binds, words| {
                podman.run(&["--runtime", "bindguard"], binds, words)
            })?;
        }
        let ended = podman
            .run(&["--runtime", "crun"], &["-v", "/:/host"], &HOST)?
            .success()?;
        ensure!(
            !ended.contains("master:"),
            "without bindguard the fault is gone: {ended}"
        );
        node.bindguard(["install", "podman", "--default"])?
            .success()?;
        both_faults(node, |binds, words| podman.run(&[], binds, words))?;
        node.bindguard(["uninstall"])?.success()?;
        let by_name = || podman.run(&["--runtime", "bindguard"], &[], &["true"]);
        by_name()?.success()?;
        node.bindguard(["uninstall", "--forget-name"])?.success()?;
        let ended = by_name()?.failure()?;
        ensure!(ended.contains("bindguard"), "{ended}");
        Ok(())
    });
}

/// Podman prefers crun to runc, and gives a runtime by its name what the runtime can do.
#[test]
fn podman_keeps_its_default_and_the_abilities_of_its_runtime() {
    story(|node| {
        let _podman = Podman::on(node)?;
        let crun = node.programs().join("crun").display().to_string();
        // Podman itself refuses --cgroups=disabled with the cgroup's parent that the stories name.
        let without_cgroup = || -> Result<()> {
            let mut command = node.command(program("podman"))?;
            command.args(["run", "--rm", "--network=host", "--cgroups=disabled"]);
            command.args([
                "--ulimit=nofile=1024:1024",
                "--ulimit=nproc=1000:1000",
                "--volume=/:/host",
                "--rootfs",
            ]);
            command.arg(node.disk().join("podman-rootfs")).arg("true");
            run(command)?.success().map(drop)
        };
        without_cgroup()?;
        node.bindguard(["install", "podman", "--default"])?
            .success()?;
        let config = fs::read_to_string("/etc/bindguard/config.toml")?;
        ensure!(config.contains(&format!("path = {crun:?}")), "{config}");
        without_cgroup()?;
        let journal = fs::read_to_string("/run/bindguard/journal.jsonl")?;
        ensure!(!journal.is_empty(), "the guard did not run");
        let drop_in = "/etc/containers/containers.conf.d/zz-bindguard.conf";
        let lists = fs::read_to_string(drop_in)?;
        ensure!(
            lists.contains("\"ocijail\", \"bindguard\"]") && !lists.contains("supports_kvm"),
            "{lists}"
        );
        node.bindguard(["uninstall", "--forget-name"])?.success()?;

        let other = "/etc/containers/containers.conf.d/10-other.conf";
        let text = "[engine]\nruntime = \"runc\"\nruntime_supports_json = [\"runc\", \"mine\"]\nruntime_supports_nocgroup = [\"crun\"]\n";
        fs::create_dir_all("/etc/containers/containers.conf.d")?;
        fs::write(other, text)?;
        node.bindguard(["install", "podman", "--default"])?
            .success()?;
        let (config, lists) = (
            fs::read_to_string("/etc/bindguard/config.toml")?,
            fs::read_to_string(drop_in)?,
        );
        ensure!(!config.contains(&crun), "{config}");
        ensure!(
            lists.contains("[\"runc\", \"mine\", \"bindguard\"]") && !lists.contains("nocgroup"),
            "{lists}"
        );
        node.bindguard(["uninstall", "--forget-name"])?.success()?;
        Ok(fs::remove_file(other)?)
    });
}

#[test]
fn podman_with_the_precreate_hook() {
    story(|node| {
        let podman = Podman::on(node)?;
        node.bindguard(["install", "podman"])?.success()?;
        set_runtime(node, "runc")?;
        let hooks = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../config/oci-hooks")
            .display()
            .to_string();
        let through_the_hook = |binds: &[&str], words: &[&str]| {
            podman.run(&["--runtime", "crun", "--hooks-dir", &hooks], binds, words)
        };
        both_faults(node, through_the_hook)?;
        // only a policy that refuses makes the hook fail
        let config = format!(
            "{}[checks]\nunmounted-volumes = \"refuse\"\n",
            fs::read_to_string("/etc/bindguard/config.toml")?
        );
        fs::write("/etc/bindguard/config.toml", config)?;
        let pod = node.kubelet().pod("unmounted")?;
        let volume = pod.path().join("volumes/kubernetes.io~nfs/data");
        fs::create_dir_all(&volume)?;
        let bind = format!("{}:/data", volume.display());
        through_the_hook(&["-v", &bind], &["true"])?.failure()?;
        // Podman does not show what a hook says
        let journal = fs::read_to_string("/run/bindguard/journal.jsonl")?;
        let last = journal.lines().last().unwrap_or_default();
        ensure!(
            last.contains("\"refused\"") && last.contains("not mounted"),
            "{last}"
        );
        pod.delete()
    });
}

#[test]
fn docker() {
    story(|node| {
        fs::create_dir_all("/etc/docker")?;
        fs::write("/etc/docker/daemon.json", DAEMON_JSON)?;
        let docker = Docker::start_with(node, Storage::Overlay)?;
        ensure!(
            docker
                .run(&["--runtime", "bindguard"], &["true"])?
                .status
                .code()
                != Some(0),
            "it knows bindguard already"
        );
        node.bindguard(["install", "docker"])?.success()?;
        docker.reload()?;
        for runtime in ["runc", "crun"] {
            set_runtime(node, runtime)?;
            both_faults(node, |binds, words| {
                docker.run(&[&["--runtime", "bindguard"], binds].concat(), words)
            })?;
        }
        set_runtime(node, "runc")?;
        node.bindguard(["install", "docker", "--default"])?
            .success()?;
        docker.reload()?;
        both_faults(node, |binds, words| docker.run(binds, words))?;
        let said = node.bindguard(["uninstall"])?;
        ensure!(
            said.code() == 1 && said.stdout.contains("run      systemctl restart docker"),
            "{said:?}"
        );
        // dockerd keeps a default that its file no longer names, until it is restarted; the name is
        // that of the real runtime
        docker.reload()?;
        docker.run(&[], &["true"])?.success()?;
        drop(docker);
        let docker = Docker::start_with(node, Storage::Overlay)?;
        // a shim ends a moment after its container
        until("nothing needs the programs", || {
            Ok(node.bindguard(["uninstall"])?.code() == 0)
        })?;
        ensure!(
            fs::read_to_string("/etc/docker/daemon.json")? == DAEMON_JSON,
            "not the bytes that were there"
        );
        docker.run(&[], &["true"])?.success().map(drop)
    });
}

const CRUN: Generation = Generation::V1_7;
const DAEMON_JSON: &str = "{\n\t\"max-concurrent-downloads\": 3,\n\t\"labels\": [ \"a=b\" ]\n}\n";
const HOST: [&str; 3] = ["grep", " /host ", "/proc/self/mountinfo"];

fn story(story: impl FnOnce(&Node) -> Result<()>) {
    if let Some(why) = missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V1_7).bare().story(|node| {
        let crun = bindguard_integration::programs::Matrix::locate()?.program(CRUN, "crun");
        symlink(crun, node.programs().join("crun")).context("put crun beside runc")?;
        story(node)
    });
}

/// The runtime that bindguard-runtime becomes: these engines do not hand on containerd's
/// environment.
fn set_runtime(node: &Node, runtime: &str) -> Result<()> {
    let text = format!(
        "[runtime]\npath = {:?}\n[kubelet]\nroots = [{:?}]\n",
        node.programs().join(runtime),
        node.kubelet().root()
    );
    fs::create_dir_all("/etc/bindguard")
        .and_then(|()| fs::write("/etc/bindguard/config.toml", text))
        .context("write bindguard's config")
}

/// A subPath whose file was replaced, and a container that would hold the host's mounts.
fn both_faults(node: &Node, run: impl Fn(&[&str], &[&str]) -> Result<Finished>) -> Result<()> {
    let pod = node.kubelet().pod("door")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let bind = format!("{}:/etc/app.conf:ro", subpath.bind()?.display());
    for content in ["one", "two", "three"] {
        volume.update(&[("app.conf", content)])?;
        let read = run(&["-v", &bind], &["cat", "/etc/app.conf"])?.success()?;
        ensure!(
            read == content,
            "the container reads {read:?}, not {content:?}"
        );
        only_a_current_mount(&subpath)?;
    }
    let ended = run(&["-v", "/:/host"], &HOST)?.success()?;
    ensure!(
        ended.contains("master:"),
        "the host's umounts do not reach the container: {ended}"
    );
    pod.delete()
}
