//! The pod of `config/daemonset.yaml` installs into the node's root and restarts nothing. The pod's
//! end, and its replacement, change nothing on the node. Removal is a separate command.
//!
//! As in the image, the programs are in `/usr/local/bin`, which is also the node's prefix, and
//! `PATH` has nothing else.

use bindguard_integration::prelude::*;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;

use bindguard_integration::programs::SHIM;

const PROGRAM: &str = "/usr/local/bin/bindguard-runtime";

#[test]
fn story() {
    Setup::on(Generation::V1_7).bare().cri().story(|node| {
        let install = command(node)?;
        symlink(
            node.programs().join("systemctl"),
            "/usr/local/sbin/systemctl",
        )
        .context("link systemctl")?;
        fs::create_dir(image(node))?;
        for name in [SHIM, GUARD, CLI] {
            fs::copy(node.under_test().join(name), image(node).join(name))
                .with_context(|| format!("copy {name}"))?;
        }
        let before = fs::read(node.containerd_config())?;
        let first = Pod::start(node, &install)?;
        let installed = fs::read_to_string(node.containerd_config())?;
        ensure!(
            node.containerd_files()?.contains("runtimes.bindguard"),
            "nothing was installed"
        );
        is_not_restarted(node)?;
        node.restart_containerd(Signal::SIGTERM)?;
        guarded_pod_runs(node, "first")?;

        first.evicted()?;
        ensure!(
            fs::read_to_string(node.containerd_config())? == installed,
            "the end of the pod changed the node"
        );
        ensure!(
            Path::new(PROGRAM).exists(),
            "the end of the pod removed a program"
        );
        guarded_pod_runs(node, "second")?;
        Pod::start(node, &install)?.evicted()?;
        is_not_restarted(node)?;

        let remove: Vec<String> = install
            .iter()
            .map(|word| {
                if word == "install" {
                    "uninstall".to_owned()
                } else {
                    word.clone()
                }
            })
            .collect();
        let mut removing = Pod::spawn(node, &remove)?;
        until("the handler is gone from containerd's file", || {
            Ok(fs::read(node.containerd_config())? == before)
        })?;
        ensure!(
            Path::new(PROGRAM).exists(),
            "the running containerd's programs are gone"
        );
        node.restart_containerd(Signal::SIGTERM)?;
        removing.wait_until_done()?;
        ensure!(
            fs::read(node.containerd_config())? == before,
            "not the bytes that were there"
        );
        ensure!(!Path::new(PROGRAM).exists(), "a program is left");
        is_not_restarted(node)?;
        removing.evicted()
    });
}

/// The only container of a pod.
struct Pod {
    process: Child,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Pod {
    fn start(node: &Node, words: &[String]) -> Result<Self> {
        let mut pod = Self::spawn(node, words)?;
        pod.wait_until_done()?;
        Ok(pod)
    }

    fn spawn(node: &Node, words: &[String]) -> Result<Self> {
        let mut command = node.command("unshare")?;
        let script =
            "mount --bind \"$0\" /usr/local/bin && export PATH=/usr/local/bin && exec \"$@\"";
        command
            .args(["--mount", "--propagation", "slave", "sh", "-ec", script])
            .arg(image(node))
            .args(words);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().context("start the container")?;
        let stderr = BufReader::new(process.stderr.take().context("the container's stderr")?);
        Ok(Self { process, stderr })
    }

    fn wait_until_done(&mut self) -> Result<()> {
        let mut line = String::new();
        self.stderr
            .read_line(&mut line)
            .context("read what the container says")?;
        ensure!(
            line.contains("waiting for SIGTERM"),
            "it does not wait: {line:?}"
        );
        Ok(())
    }

    fn evicted(mut self) -> Result<()> {
        kill(
            Pid::from_raw(self.process.id().try_into()?),
            Signal::SIGTERM,
        )?;
        let ended = self.process.wait()?;
        ensure!(ended.success(), "it ended with {ended}");
        Ok(())
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The folder with the image's programs.
fn image(node: &Node) -> PathBuf {
    node.disk().join("image")
}

/// The manifest's command line, with the node's root where the manifest has it mounted.
fn command(node: &Node) -> Result<Vec<String>> {
    let root = node.disk().join("host");
    fs::create_dir(&root)?;
    host(["mount", "--rbind", "/", &root.display().to_string()])?;
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/daemonset.yaml");
    let text =
        fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
    let line = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix("command: "))
        .context("find the command")?;
    let words: Vec<String> = serde_json::from_str(line).with_context(|| format!("parse {line}"))?;
    let here = |word: String| {
        if word == "/host" {
            root.display().to_string()
        } else {
            word
        }
    };
    Ok(words.into_iter().map(here).collect())
}

/// systemctl's stand-in records each call.
fn is_not_restarted(node: &Node) -> Result<()> {
    let log = node.programs().join("systemctl.log");
    let calls = fs::read_to_string(log).unwrap_or_default();
    ensure!(calls.is_empty(), "calls of systemctl: {calls}");
    Ok(())
}

fn guarded_pod_runs(node: &Node, name: &str) -> Result<()> {
    let sandbox = node.cri()?.run_pod("bindguard", name, name)?;
    node.cri()?
        .start_container(&sandbox, "app", &["sleep", "1000000"], &[])?;
    node.cri()?.remove_pod(&sandbox)
}
