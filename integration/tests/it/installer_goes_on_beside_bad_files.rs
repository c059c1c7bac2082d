//! A bad file stops neither `install` nor `uninstall` for ever: what cannot be read is named, and the
//! rest is done.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bindguard_integration::process::{Finished, run_with_input};
use bindguard_integration::{Generation, Node, Setup};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

const RECORD: &str = "/var/lib/bindguard/install.json";
const PODMAN: &str = "/etc/containers/containers.conf.d/zz-bindguard.conf";

/// Fails, and does not hang.
fn bindguard(node: &Node, words: &[&str]) -> Result<Finished> {
    let mut command = node.command(node.under_test().join("bindguard"))?;
    command.args(words);
    run_with_input(command, "", Duration::from_secs(60))
}

#[test]
fn one_bad_entry_of_the_record() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        fs::create_dir_all("/etc/docker")?;
        let docker = "{\n  \"debug\": true\n}\n";
        fs::write("/etc/docker/daemon.json", docker)?;
        let before = fs::read(node.containerd_config())?;
        let install = || {
            bindguard(node, &["install", "docker", "podman", "containerd"])?
                .success()
                .map(drop)
        };
        install()?;
        // the former file of an entry is gone
        let record: Value = serde_json::from_str(&fs::read_to_string(RECORD)?)?;
        let files = record["files"].as_array().context("files")?;
        let entry = files.iter().find(|entry| entry["owner"] == "docker");
        let original = entry.and_then(|entry| entry["original"].as_str());
        let original = Path::new("/var/lib/bindguard/originals").join(original.context("a hash")?);
        fs::remove_file(&original)?;
        // a folder lies in the place of another
        fs::remove_file(PODMAN)?;
        fs::create_dir(PODMAN)?;

        let done = bindguard(node, &["uninstall", "--restart"])?;
        ensure!(
            done.code() == 1
                && done.stdout.contains(&original.display().to_string())
                && done.stdout.contains(PODMAN),
            "{done:?}"
        );
        ensure!(
            fs::read(node.containerd_config())? == before,
            "containerd's file was not restored: {done:?}"
        );
        let status = bindguard(node, &["status"])?;
        ensure!(
            status.code() != 0 && status.stdout.contains("findings"),
            "{status:?}"
        );
        fs::remove_dir(PODMAN)?;
        // the operator restores the file
        fs::write(&original, docker)?;
        bindguard(node, &["uninstall", "--restart"])?.success()?;
        ensure!(fs::read_to_string("/etc/docker/daemon.json")? == docker);
        ensure!(
            !fs::exists("/usr/local/lib/bindguard")?,
            "programs are left"
        );
        ensure!(!fs::exists("/var/lib/bindguard")?, "the record is left");
        Ok(())
    });
}

/// A runtime's file that an editor broke keeps neither the others nor `status`.
#[test]
fn a_runtimes_file_that_does_not_parse() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let before = fs::read(node.containerd_config())?;
        bindguard(node, &["install", "docker", "containerd"])?.success()?;
        fs::write("/etc/docker/daemon.json", "{ \"runtimes\": ")?;
        let status = bindguard(node, &["status"])?;
        ensure!(
            status.stdout.contains("/etc/docker/daemon.json") && status.stdout.contains("pods"),
            "{status:?}"
        );
        let done = bindguard(node, &["uninstall", "--restart"])?;
        ensure!(
            done.code() == 1 && done.stdout.contains("/etc/docker/daemon.json"),
            "{done:?}"
        );
        ensure!(
            fs::read(node.containerd_config())? == before,
            "containerd's file was not restored: {done:?}"
        );
        fs::write("/etc/docker/daemon.json", "{}\n")?;
        bindguard(node, &["uninstall", "--restart"])?
            .success()
            .map(drop)
    });
}

#[test]
fn fifos_and_devices() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let fifo = node.disk().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU)?;
        let refused = |words: &[&str], said: &str| {
            let refused = bindguard(node, words)?;
            ensure!(
                refused.code() == 2 && refused.stderr.contains(said),
                "{words:?}: {refused:?}"
            );
            ensure!(!fs::exists(RECORD)?, "half of it was done");
            Ok(())
        };
        let named = fifo.display().to_string();
        refused(
            &["install", "--node-config", &named],
            "fifo is no regular file",
        )?;
        refused(
            &["install", "--node-config", "/dev/zero"],
            "/dev/zero is no regular file",
        )?;
        refused(
            &["install", "--containerd-config", &named],
            "fifo is no regular file",
        )?;
        let text = fs::read_to_string(node.containerd_config())?;
        fs::write(
            node.containerd_config(),
            format!("imports = [\"/etc/containerd/conf.d/*.toml\"]\n{text}"),
        )?;
        fs::create_dir("/etc/containerd/conf.d")?;
        mkfifo("/etc/containerd/conf.d/10-fifo.toml", Mode::S_IRWXU)?;
        refused(&["install"], "10-fifo.toml is no regular file")?;
        fs::remove_dir_all("/etc/containerd/conf.d")?;
        fs::create_dir_all("/etc/bindguard")?;
        mkfifo("/etc/bindguard/config.toml", Mode::S_IRWXU)?;
        refused(&["install", "docker"], "config.toml is no regular file")
    });
}
