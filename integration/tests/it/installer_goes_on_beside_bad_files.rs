//! A bad file stops neither `install` nor `uninstall` for ever: what cannot be read is named, and the
//! rest is done.

use bindguard_integration::prelude::*;
use bindguard_integration::process::run_with_input;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

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

/// A program is no text: one that lay in the place of bindguard's own comes back, a damaged one is
/// repaired by the next `install` and left alone by `uninstall`.
#[test]
fn programs_that_others_wrote() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let link = Path::new("/usr/local/bin/bindguard-runtime");
        let (of_the_image, damaged) = (b"\x7fELF\xff of the image", b"\x7fELF\xff damaged");
        fs::create_dir_all("/usr/local/bin")?;
        fs::write(link, of_the_image)?;
        bindguard(node, &["install", "podman"])?.success()?;
        let ours = fs::read(link)?;
        ensure!(ours != of_the_image, "it is no link to bindguard's");
        fs::write(fs::canonicalize(link)?, damaged)?;
        bindguard(node, &["install", "podman"])?.success()?;
        ensure!(fs::read(link)? == ours, "the damaged program stays");
        let program = fs::canonicalize(link)?;
        fs::write(&program, damaged)?;
        let done = bindguard(node, &["uninstall", "--forget-name"])?;
        let stays = "was changed since the install: it stays";
        ensure!(
            done.code() == 0 && done.stdout.contains(stays) && fs::read(&program)? == damaged,
            "{done:?}"
        );
        ensure!(fs::read(link)? == of_the_image, "it did not come back");
        ensure!(!fs::exists(RECORD)?, "the record is left: {done:?}");
        Ok(())
    });
}

/// The agent or a later call would finish the removal, and take the new installation away.
#[test]
fn an_install_that_fails_withdraws_the_removal_before_it() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        fs::create_dir_all("/etc/bindguard")?;
        fs::write("/etc/bindguard/config.toml", "[guard]\ndeadline-ms = 900\n")?;
        bindguard(node, &["install", "podman"])?.success()?;
        let mut record: Value = serde_json::from_str(&fs::read_to_string(RECORD)?)?;
        record["removal"] = json!({"handler_kept_for_pods": 0, "programs_kept_for_pods": 1});
        fs::write(RECORD, record.to_string())?;
        // the last valid config cannot be kept
        let kept = Path::new("/var/lib/bindguard/config.toml");
        if kept.exists() {
            fs::remove_file(kept)?;
        }
        fs::create_dir(kept)?;
        let failed = bindguard(node, &["install", "podman", "docker"])?;
        ensure!(failed.code() == 2, "{failed:?}");
        let record: Value = serde_json::from_str(&fs::read_to_string(RECORD)?)?;
        ensure!(record["removal"].is_null(), "still pending: {record}");
        Ok(())
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
