//! Configuration management takes bindguard's entry out of containerd's file, or an
//! operator deletes the shim. `status` and `doctor` say so, with the command, and change nothing.

use bindguard_integration::prelude::*;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let file = &node.containerd_drop_in();
        let main = node.containerd_config();
        let before = fs::read(main)?;
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        let edited = fs::read_to_string(file)?;
        told(node, None)?;

        // without the import the drop-in has no effect
        let importing = fs::read(main)?;
        fs::write(main, &before)?;
        told(node, Some("config.toml is not as install left it"))?;
        fs::write(main, importing)?;
        told(node, None)?;

        let other = edited.replace(
            "default_runtime_name = \"bindguard\"",
            "default_runtime_name = \"runc\"",
        );
        ensure!(other != edited, "no default in {edited}");
        fs::write(file, &other)?;
        told(node, Some("zz-bindguard.toml is not as install left it"))?;
        ensure!(fs::read_to_string(file)? == other, "it was repaired");
        fs::write(file, &edited)?;
        told(node, None)?;

        fs::remove_file("/usr/local/bin/containerd-shim-bindguard-v2")?;
        told(node, Some("containerd-shim-bindguard-v2 is gone"))?;
        let status = node.bindguard(["status"])?.stdout;
        ensure!(
            status.contains("broken") && !status.contains("for every new pod"),
            "{status}"
        );
        node.bindguard(["install", "--default"])?.success()?;
        told(node, None)?;

        // the shim creates containers without the guard
        fs::remove_file("/usr/local/bin/bindguard-runtime")?;
        told(node, Some("bindguard-runtime is gone: creates may go on"))?;
        let status = node.bindguard(["status"])?.stdout;
        ensure!(
            status.contains("unguarded") && !status.contains("broken"),
            "{status}"
        );
        node.bindguard(["install", "--default"])?.success()?;
        told(node, None)?;
        // containerd's own shim has no other runtime
        node.bindguard(["install", "--default", "--wrapper"])?
            .success()?;
        fs::remove_file("/usr/local/bin/bindguard-runtime")?;
        let status = node.bindguard(["status"])?.stdout;
        ensure!(
            status.contains("broken") && status.contains("a pod that needs it does not start"),
            "{status}"
        );
        node.bindguard(["install", "--default"])?.success()?;
        node.bindguard(["uninstall"])?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["uninstall"])?.success()?;
        Ok(())
    });
}

/// The record is lost with `/var`.
#[test]
fn the_record_is_lost() {
    Setup::on(Generation::V1_7).cri().bare().story(|node| {
        let file = node.containerd_config();
        let before = fs::read_to_string(file)?;
        // the name of the former default is lost with the record: containerd's own is runc
        let is_default = |line: &&str| {
            line.contains("default_runtime_name") || line.trim_end().ends_with(".containerd]")
        };
        let expected: String = before
            .split_inclusive('\n')
            .filter(|line| !is_default(line))
            .collect();
        node.bindguard(["install", "--default"])?.success()?;
        let installed = fs::read_to_string(file)?;
        let record = "/var/lib/bindguard/install.json";
        let bytes = fs::read(record)?;
        fs::write(record, &bytes[..bytes.len() / 2])?;
        for words in [&["install", "--default"][..], &["uninstall"], &["doctor"]] {
            let ended = node.bindguard(words)?;
            ensure!(
                ended.code() != 0
                    && format!("{}{}", ended.stdout, ended.stderr).contains("move the file away"),
                "{words:?}: {ended:?}"
            );
        }
        fs::rename(record, "/var/lib/bindguard/damaged.json")?;
        node.bindguard(["install", "--default"])?.success()?;
        ensure!(
            fs::read_to_string(file)? == installed,
            "another text than before"
        );
        told(node, None)?;
        fs::remove_dir_all("/var/lib/bindguard")?;
        let look = node.bindguard(["uninstall", "--dry-run"])?;
        ensure!(
            look.code() == 1 && look.stdout.contains("uninstall --by-content"),
            "{look:?}"
        );
        ensure!(
            !look.stdout.contains("nothing  no file"),
            "it contradicts itself: {look:?}"
        );
        let left = node.bindguard(["uninstall"])?;
        ensure!(
            left.code() == 1 && fs::read_to_string(file)? == installed,
            "{left:?}"
        );
        let done = node.bindguard(["uninstall", "--by-content"])?;
        ensure!(
            done.stdout.contains("systemctl restart containerd"),
            "{done:?}"
        );
        ensure!(
            fs::read_to_string(file)? == expected,
            "{}",
            fs::read_to_string(file)?
        );
        Ok(())
    });
}

fn told(node: &Node, what: Option<&str>) -> Result<()> {
    let (status, doctor) = (
        node.bindguard(["status"])?.stdout,
        node.bindguard(["doctor"])?.stdout,
    );
    match what {
        Some(what) => {
            ensure!(
                status.contains(what) && doctor.contains(what),
                "no {what}: {status}{doctor}"
            );
            ensure!(
                doctor.contains("bindguard install --default --dry-run"),
                "no command: {doctor}"
            );
        }
        None => ensure!(
            !status.contains("drift") && doctor.contains("no file has changed since"),
            "{status}{doctor}"
        ),
    }
    Ok(())
}
