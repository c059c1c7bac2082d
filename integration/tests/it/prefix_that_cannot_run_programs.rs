//! Issue 16: a folder from which nothing can be run, or to which nothing can be written, is refused
//! before any file is changed, with the option that helps.

use bindguard_integration::prelude::*;

#[test]
fn story() {
    Setup::on(Generation::V1_7).bare().cri().story(|node| {
        let config = fs::read(node.containerd_config())?;
        for (options, why) in [
            ("mode=755", "noexec"),
            ("mode=755,ro", "Read-only file system"),
        ] {
            let folder = node.disk().join(why);
            fs::create_dir(&folder)?;
            tmpfs(&folder, options)?;
            if why == "noexec" {
                host([
                    "mount",
                    "-o",
                    "remount,noexec",
                    &folder.display().to_string(),
                ])?;
            }
            for words in [&["install"][..], &["install", "--dry-run"]] {
                let prefix = folder.join("bin").display().to_string();
                let done = node.bindguard([words, &["--prefix", &prefix]].concat())?;
                ensure!(
                    done.code() == 2,
                    "{words:?} in a folder that is {why}: {done:?}"
                );
                let line = &done.stderr;
                ensure!(
                    line.contains(why) && line.contains("--prefix") && line.lines().count() == 1,
                    "{line}"
                );
            }
            is_untouched(node.containerd_config(), &config)?;
        }
        doctor_notices(node)
    });
}

/// The programs are written before containerd's file. A file that cannot be written is
/// found before both.
#[test]
fn a_read_only_etc() {
    Setup::on(Generation::V1_7).bare().cri().story(|node| {
        let config = fs::read(node.containerd_config())?;
        let folder = node.containerd_config().parent().context("its folder")?;
        let folder = folder.display().to_string();
        host(["mount", "--bind", &folder, &folder])?;
        host(["mount", "-o", "remount,bind,ro", &folder])?;
        let done = node.bindguard(["install"])?;
        host(["umount", &folder])?;
        ensure!(
            done.code() == 2
                && done.stderr.contains("Read-only file system")
                && done.stderr.contains("nothing was changed"),
            "{done:?}"
        );
        ensure!(
            !Path::new("/usr/local/lib/bindguard").exists(),
            "programs are left"
        );
        is_untouched(node.containerd_config(), &config)
    });
}

/// A file system that is mounted noexec later: the node is not fine, although every file is there.
fn doctor_notices(node: &Node) -> Result<()> {
    let folder = node.disk().join("later");
    fs::create_dir(&folder)?;
    tmpfs(&folder, "mode=755")?;
    let (mounted, prefix) = (
        folder.display().to_string(),
        folder.join("bin").display().to_string(),
    );
    node.bindguard(["install", "--prefix", &prefix])?
        .success()?;
    node.restart_containerd(Signal::SIGTERM)?;
    node.cri()?;
    host(["mount", "-o", "remount,noexec", &mounted])?;
    let doctor = node.bindguard(["doctor"])?;
    ensure!(
        doctor.stdout.contains("failed     containerd") && doctor.stdout.contains(&prefix),
        "{doctor:?}"
    );
    host(["mount", "-o", "remount,exec", &mounted])?;
    let doctor = node.bindguard(["doctor"])?;
    ensure!(
        doctor.stdout.contains("ok         containerd"),
        "{doctor:?}"
    );
    Ok(())
}

fn is_untouched(config: &Path, before: &[u8]) -> Result<()> {
    ensure!(fs::read(config)? == before, "containerd's file was changed");
    ensure!(
        !Path::new("/var/lib/bindguard").exists(),
        "a record is left"
    );
    Ok(())
}
