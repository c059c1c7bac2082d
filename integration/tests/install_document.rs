//! docs/install.md, command by command, on a node that has nothing of bindguard yet.

use std::fs;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result, ensure};
use bindguard_integration::doc_commands::Rehearsal;
use bindguard_integration::process::host;
use bindguard_integration::programs::CLI;
use bindguard_integration::{Generation, Setup};

#[test]
fn as_it_says() {
    Setup::on(Generation::V2_1).bare().cri().story(|node| {
        symlink(node.disk().join("dist").join(CLI), node.programs().join(CLI)).context("put bindguard on PATH")?;
        let image = node.disk().join("image");
        fs::create_dir(&image)?;
        host(["mount", "--rbind", "/", &image.display().to_string()])?;
        let before = fs::read(node.containerd_config())?;
        let said = Rehearsal::on(node)
            .instead_of("kubectl ", ": kubectl ")
            .instead_of("make ", ": make ")
            .instead_of("docker ", ": docker ")
            .with("IMAGE", &image.display().to_string())
            .play("docs/install.md")?;
        ensure!(said.iter().any(|one| one.stdout.contains("+++ /etc/containerd/config.toml")), "no diff: {said:?}");
        ensure!(fs::read(node.containerd_config())? == before, "not the bytes that were there");
        gone("/usr/local/bin/bindguard-runtime")?;
        gone("/etc/containers/containers.conf.d/50-bindguard.conf")?;
        gone("/etc/crio/crio.conf.d/50-bindguard.conf")?;
        gone("/var/lib/bindguard")
    });
}

fn gone(path: &str) -> Result<()> {
    ensure!(!std::path::Path::new(path).exists(), "{path} is left");
    Ok(())
}
