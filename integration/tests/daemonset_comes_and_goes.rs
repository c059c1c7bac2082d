//! The programs of the pod of `config/daemonset.yaml`, in its order: the init container installs into the node's root and has
//! containerd restarted, the other one waits, and takes everything off when the pod is ended.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Stdio};

use anyhow::{Context, Result, ensure};
use bindguard_integration::process::host;
use bindguard_integration::{Generation, Node, Setup};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn story() {
    Setup::on(Generation::V1_7).bare().cri().story(|node| {
        let [install, uninstall] = commands(node)?;
        let before = fs::read(node.containerd_config())?;
        let mut first = node.command(&install[0])?;
        run_words(first.args(&install[1..]))?;
        ensure!(fs::read_to_string(node.containerd_config())?.contains("runtimes.bindguard"), "nothing was installed");
        let asked = fs::read_to_string(node.programs().join("systemctl.log"))?;
        ensure!(asked == "restart containerd\n", "asked of systemd: {asked}");
        node.restart_containerd(Signal::SIGTERM)?;

        let mut second = node.command(&uninstall[0])?;
        let mut waiting = second
            .args(&uninstall[1..])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("start the container")?;
        let mut said = wait_until_it_waits(&mut waiting)?;
        ensure!(Path::new("/usr/local/bin/bindguard-runtime").exists(), "it did not wait");
        kill(Pid::from_raw(waiting.id().try_into()?), Signal::SIGTERM)?;
        let mut words = String::new();
        said.read_to_string(&mut words)?;
        let ended = waiting.wait()?;
        ensure!(ended.success(), "it ended with {ended}: {words}");
        ensure!(fs::read(node.containerd_config())? == before, "not the bytes that were there");
        ensure!(!Path::new("/usr/local/bin/bindguard-runtime").exists(), "a program is left");
        Ok(())
    });
}

/// The manifest's two command lines, with the node's root where the manifest has it mounted.
fn commands(node: &Node) -> Result<[Vec<String>; 2]> {
    let root = node.disk().join("host");
    fs::create_dir(&root)?;
    host(["mount", "--rbind", "/", &root.display().to_string()])?;
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/daemonset.yaml");
    let text = fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
    let lines = text.lines().filter_map(|line| line.trim_start().strip_prefix("command: "));
    let mut commands = Vec::new();
    for line in lines {
        let words: Vec<String> = serde_json::from_str(line).with_context(|| format!("understand {line}"))?;
        let here = |word: String| match word.as_str() {
            "/host" => root.display().to_string(),
            "bindguard" => node.disk().join("dist/bindguard").display().to_string(),
            _ => word,
        };
        commands.push(words.into_iter().map(here).collect());
    }
    <[_; 2]>::try_from(commands).map_err(|commands| anyhow::anyhow!("not two commands: {commands:?}"))
}

fn run_words(command: &mut std::process::Command) -> Result<()> {
    let done = command.output().context("run the init container")?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// It says so once no signal can be lost.
fn wait_until_it_waits(process: &mut Child) -> Result<BufReader<ChildStderr>> {
    let mut line = String::new();
    let mut said = BufReader::new(process.stderr.take().context("the container's stderr")?);
    said.read_line(&mut line).context("read what the container says")?;
    ensure!(line.contains("until this process gets SIGTERM"), "it does not wait: {line:?}");
    Ok(said)
}
