//! Nodes that are hard to check: a file server that does not answer, more subpaths than a shell may
//! open files, a user without permission. Also the output on a terminal.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use bindguard_integration::privilege;
use bindguard_integration::process::run_on_a_terminal;
use bindguard_integration::{Pod, SilentServer};

#[test]
fn says_what_it_can() {
    Setup::on(Generation::V1_7).story(|node| {
        servers_that_do_not_answer(node)?;
        many_servers_that_do_not_answer(node)?;
        nothing_that_is_named_answers(node)?;
        more_subpaths_than_descriptors(node)?;
        on_a_terminal(node)?;
        without_permission(node)
    });
}

/// The daemon of a CSI volume is dead, and a second volume's daemon never answers. The command
/// still judges all remaining volumes.
fn servers_that_do_not_answer(node: &Node) -> Result<()> {
    if !SilentServer::is_possible() {
        privilege::skipped("no /dev/fuse here");
        return Ok(());
    }
    let pod = node.kubelet().pod("uid-csi")?;
    let mut volumes = [
        SilentServer::mounted(&csi(&pod, "a-silent"))?,
        SilentServer::mounted(&csi(&pod, "b-dead"))?,
    ];
    volumes[1].die();
    fs::create_dir_all(csi(&pod, "c-unmounted"))?;
    let ended = node.bindguard(["diagnose", "--pod", "uid-csi", "--json"])?;
    let report: Value =
        serde_json::from_str(&ended.stdout).with_context(|| format!("parse {ended:?}"))?;
    let of = |index: usize| {
        let bind = &report["binds"][index];
        (
            bind["verdict"].as_str().unwrap_or_default(),
            bind["reason"].as_str().unwrap_or_default(),
        )
    };
    ensure!(ended.code() == 1, "{ended:?}");
    ensure!(
        of(0) == ("dead", "it did not answer within 700 ms"),
        "{report}"
    );
    ensure!(
        of(1).0 == "dead" && of(1).1.starts_with("it answers: "),
        "{report}"
    );
    ensure!(of(2).0 == "unmounted", "{report}");

    let path = volumes[0].path().display().to_string();
    let held = node.bindguard(["holders", &path])?;
    ensure!(
        held.stdout.contains(&format!("mounted    {path} (fuse")),
        "{held:?}"
    );
    ensure!(
        node.bindguard(["doctor"])?
            .stdout
            .contains("failed     subpaths: ")
    );
    drop(volumes);
    pod.delete()
}

/// Fifty servers that do not answer are probed side by side, and all are reported as dead. Within
/// the time limit, probes in sequence would reach only a dozen.
fn many_servers_that_do_not_answer(node: &Node) -> Result<()> {
    if !SilentServer::is_possible() {
        return Ok(());
    }
    let pod = node.kubelet().pod("uid-dead")?;
    let volumes = (0..50)
        .map(|n| SilentServer::mounted(&csi(&pod, &format!("silent-{n}"))))
        .collect::<Result<Vec<_>>>()?;
    let ended = node.bindguard(["diagnose", "--pod", "uid-dead", "--json"])?;
    let report: Value =
        serde_json::from_str(&ended.stdout).with_context(|| format!("parse {ended:?}"))?;
    let dead = report["binds"]
        .as_array()
        .context("binds")?
        .iter()
        .filter(|bind| bind["verdict"] == "dead")
        .count();
    ensure!(
        dead == volumes.len(),
        "{dead} of {} are reported dead: {report}",
        volumes.len()
    );
    drop(volumes);
    pod.delete()
}

/// A kubelet's root, a bundle, a journal, a config on a server that hangs: no verb waits for it.
fn nothing_that_is_named_answers(node: &Node) -> Result<()> {
    if !SilentServer::is_possible() {
        return Ok(());
    }
    let pod = node.kubelet().pod("uid-hung")?;
    let mut hung = SilentServer::mounted(&csi(&pod, "silent"))?;
    hung.take_request()?;
    let at = hung.path().display().to_string();
    let config = node.disk().join("hung.toml");
    fs::write(
        &config,
        format!("[kubelet]\nroots = [{at:?}]\n[journal]\npath = \"{at}/journal.jsonl\"\n"),
    )?;
    let (config, below) = (config.display().to_string(), format!("{at}/config.toml"));
    for words in [
        &["--config", &config, "diagnose"][..],
        &["--config", &config, "repair", "--all"],
        &["--config", &config, "journal"],
        &["check", &at],
        &["holders", &below],
        &["config", "check", &below],
        &["--config", &below, "config", "show"],
        &["--config", &below, "diagnose"],
    ] {
        let ended = node.bindguard(words)?;
        let words_of_both = [ended.stdout.as_str(), &ended.stderr].concat();
        ensure!(
            ended.code() == 2 && words_of_both.contains("did not answer within 700 ms"),
            "{words:?}: {ended:?}"
        );
    }
    ensure!(
        node.bindguard(["--config", &config, "doctor"])?
            .stdout
            .contains("did not answer within 700 ms")
    );
    drop(hung);
    pod.delete()
}

fn more_subpaths_than_descriptors(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("uid-many")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    for index in 0..150 {
        volume.subpath("app", index, "app.conf").bind()?;
    }
    let mut few = node.command("sh")?;
    few.args([
        "-ec",
        "ulimit -n 256; exec bindguard diagnose --pod uid-many",
    ]);
    let ended = run(few)?;
    ensure!(
        ended.code() == 0 && ended.stdout == "151 checked, 0 with findings\n",
        "{ended:?}"
    );
    pod.delete()
}

fn on_a_terminal(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("uid-seen")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    volume.subpath("app", 0, "app.conf").bind()?;
    volume.update(&[("app.conf", "two")])?;
    let on_terminal = |words: &[&str]| -> Result<Finished> {
        let mut command = node.command("env")?;
        command.args(["-u", "NO_COLOR", "TERM=xterm"]).args(words);
        command
            .arg(node.programs().join("bindguard"))
            .arg("diagnose");
        run_on_a_terminal(&command)
    };
    let is_coloured = |ended: &Finished| ended.stdout.contains("\u{1b}[");
    let coloured = on_terminal(&[&environment(node)])?;
    ensure!(
        is_coloured(&coloured) && coloured.stdout.contains("stale"),
        "{coloured:?}"
    );
    let plain = on_terminal(&[&environment(node), "NO_COLOR=1"])?;
    ensure!(
        !is_coloured(&plain) && plain.stdout.contains("stale"),
        "{plain:?}"
    );
    let piped = node.bindguard(["diagnose"])?;
    ensure!(
        !is_coloured(&piped) && piped.stdout.contains("run: bindguard repair /"),
        "{piped:?}"
    );
    pod.delete()
}

/// script(1) hands on the environment of the test, not of the command.
fn environment(node: &Node) -> String {
    format!(
        "BINDGUARD_CONFIG={}",
        node.disk().join("bindguard.toml").display()
    )
}

fn without_permission(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("uid-closed")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let source = subpath.bind()?.display().to_string();
    volume.update(&[("app.conf", "two")])?;
    let before = subpath.mounts()?;
    // The real kubelet's folder is 0750.
    fs::set_permissions(
        node.kubelet().root().join("pods"),
        Permissions::from_mode(0o750),
    )?;
    for words in [
        &["diagnose"][..],
        &["repair", "--all"],
        &["repair", &source],
        &["doctor"],
        &["holders", "/"],
    ] {
        let mut command = node.command("setpriv")?;
        command
            .args([
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "bindguard",
            ])
            .args(words);
        let ended = run(command)?;
        let one_line = ended
            .stderr
            .lines()
            .filter(|line| line.contains("run it as root"))
            .count()
            == 1;
        ensure!(
            (ended.code() == 2 || words == ["doctor"]) && one_line,
            "{words:?}: {ended:?}"
        );
    }
    ensure!(
        subpath.mounts()? == before,
        "a user without permission changed the mounts"
    );
    pod.delete()
}

fn csi(pod: &Pod, name: &str) -> PathBuf {
    pod.path()
        .join("volumes/kubernetes.io~csi")
        .join(name)
        .join("mount")
}
