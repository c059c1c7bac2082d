//! A mistake in `config.toml` changes only the key that has it, or keeps bindguard from repairs. A
//! key of a newer version, after a rollback, loses no policy; a broken file loses no runtime.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use bindguard_integration::journal;
use bindguard_integration::mounts;
use bindguard_integration::scenes::says_no_such_file;

const CONFIG: &str = "/etc/bindguard/config.toml";

/// A node of a newer version was set to report, and is rolled back. The operator misspelt a key and
/// a word.
#[test]
fn a_reporting_node_goes_on_reporting() {
    let policy =
        "[checks]\nstale-subpath = \"report\"\nhost-root = \"repot\"\nof-a-newer-version = 5\n";
    Setup::on(Generation::V1_7).policy(policy).story(|node| {
        let pod = node.kubelet().pod("look")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        let bind = Bind::new(subpath.bind()?, "/etc/app.conf");
        volume.update(&[("app.conf", "two")])?;
        for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
            let words = node
                .ctr()
                .container("app")
                .runtime(runtime)
                .mount(bind.clone())
                .start()?
                .failure()?;
            ensure!(
                says_no_such_file(&words),
                "{runtime:?}: not runc's error: {words}"
            );
            node.ctr().forget("app")?;
        }
        ensure!(
            subpath.mounts()?.iter().all(mounts::Mount::is_deleted),
            "repaired: {:?}",
            subpath.mounts()?
        );
        let problems: Vec<String> = journal::lines(JOURNAL)?
            .iter()
            .map(|line| line["problems"].to_string())
            .collect();
        ensure!(problems.len() >= 2, "no line for each create: {problems:?}");
        for said in [
            "bindguard.toml, line 4: unknown key `checks.stale-subpath`",
            "line 5: `checks.host-root`",
            "line 6: unknown key `checks.of-a-newer-version` is skipped",
        ] {
            let lines = problems.iter().filter(|line| line.contains(said));
            ensure!(
                problems[0].contains(said) && lines.count() == 1,
                "the journal does not say {said} once: {problems:?}"
            );
            node.wait_for_log(said, |line| line.contains(said))?;
            let doctor = node.bindguard(["doctor"])?;
            ensure!(doctor.stdout.contains(said), "{doctor:?}");
            let check = node.bindguard(["config", "check"])?;
            ensure!(
                check.code() == 1 && check.stdout.contains(said),
                "{check:?}"
            );
        }
        // another version of the file, with the same mistakes
        let file = node.disk().join("bindguard.toml");
        fs::write(&file, fs::read_to_string(&file)? + "# edited\n")?;
        node.ctr().container("app").mount(bind).start()?.failure()?;
        let lines = journal::lines(JOURNAL)?;
        let said = |line: &&Value| {
            line["problems"]
                .to_string()
                .contains("checks.stale-subpath")
        };
        ensure!(lines.iter().filter(said).count() == 2, "{lines:?}");
        pod.delete()
    });
}

/// An editor saved half of the file: creates go on with what the installer kept, the runtime
/// included. Nothing is repaired: the broken file may say `report`.
#[test]
fn a_broken_file_repairs_nothing() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        fs::create_dir_all("/etc/bindguard")?;
        fs::write(CONFIG, "[checks]\ndead-sources = \"off\"\n[runtime]\npath = \"/etc/bindguard/runtime\"\n")?;
        write_runtime(Path::new("/etc/bindguard/runtime"), "the configured runtime")?;
        bindguard(node, &["install"])?.success()?;
        let shown = bindguard(node, &["config", "show"])?.success()?;
        fs::write(CONFIG, "[checks]\nruntime.path = \"/etc/bindguard/runtime\"\nstale-subpaths = report\n[runtime\n")?;
        ensure!(wrapper(node)?.contains("the configured runtime"), "another runtime");
        let now = bindguard(node, &["config", "show"])?;
        ensure!(now.code() == 1 && now.stderr.contains("config.toml, line "), "{now:?}");
        let mut kept = values(&shown);
        for value in &mut kept {
            *value = value.replace("\"repair\"", "\"report\"").replace("refresh.mode = \"annotated\"", "refresh.mode = \"off\"");
        }
        ensure!(values(&now.stdout) == kept, "{} became {}", shown, now.stdout);
        let refused = bindguard(node, &["install"])?;
        ensure!(refused.code() == 2 && refused.stderr.contains("config.toml, line "), "{refused:?}");

        // Without a copy nothing is repaired, and the runtime is the runtime that the file names.
        fs::remove_file("/var/lib/bindguard/config.toml")?;
        fs::write(CONFIG, "[runtime]\npath = \"/etc/bindguard/runtime\"\n[checks]\nhost-root = repair\n")?;
        let now = bindguard(node, &["config", "show"])?;
        for line in ["checks.stale-subpaths = \"report\"", "checks.host-root = \"report\"", "refresh.mode = \"off\""] {
            ensure!(values(&now.stdout).iter().any(|value| value == line), "no {line}: {now:?}");
        }
        ensure!(wrapper(node)?.contains("the configured runtime"), "another runtime");
        fs::remove_file(CONFIG)?;
        bindguard(node, &["uninstall"])?;
        Ok(())
    });
}

/// Programs of the node's services have no `BINDGUARD_CONFIG`.
fn bindguard(node: &Node, words: &[&str]) -> Result<Finished> {
    let mut command = node.command(node.under_test().join("bindguard"))?;
    command.args(words).env_remove("BINDGUARD_CONFIG");
    run(command)
}

fn wrapper(node: &Node) -> Result<String> {
    let mut command = node.command("/usr/local/bin/bindguard-runtime")?;
    command.arg("--version").env_remove("BINDGUARD_CONFIG");
    run(command)?.success()
}

fn write_runtime(path: &Path, says: &str) -> Result<()> {
    fs::write(path, format!("#!/bin/sh\necho {says}\n")).context("write a runtime")?;
    fs::set_permissions(path, Permissions::from_mode(0o755)).context("make it a program")
}

/// The keys and values of `config show`, without their origin.
fn values(shown: &str) -> Vec<String> {
    let words = |line: &str| {
        line.split("  #")
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    shown.lines().map(words).collect()
}
