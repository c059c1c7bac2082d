//! The release image is an OCI archive, written without a container engine. containerd imports the
//! archive and runs the programs. Equal programs give equal bytes.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bindguard_integration::doc_commands::repository;
use bindguard_integration::process::run;
use bindguard_integration::programs::binaries_under_test;
use bindguard_integration::{Generation, Setup};
use serde_json::Value;

const NAME: &str = "registry.example.com/bindguard-node:0.1.0";

#[test]
fn containerd_runs_it() {
    Setup::on(Generation::V1_7).story(|node| {
        let own = if cfg!(target_arch = "aarch64") {
            "arm64"
        } else {
            "amd64"
        };
        let archive = node.disk().join("bindguard-node.oci.tar");
        write(own, &archive)?;
        node.ctr().import(&archive)?;
        let ended =
            run(node
                .ctr()
                .command(&["run", "--rm", NAME, "programs", "bindguard", "--version"]))?;
        ensure!(
            ended.success()?.contains(env!("CARGO_PKG_VERSION")),
            "the image has no bindguard that runs"
        );
        let again = node.disk().join("again.oci.tar");
        write(own, &again)?;
        ensure!(
            fs::read(&archive)? == fs::read(&again)?,
            "the same programs give other bytes"
        );
        Ok(())
    });
}

/// A release also has an archive for a foreign architecture: the index names the architecture.
#[test]
fn the_index_names_the_architecture() {
    Setup::on(Generation::V1_7).story(|node| {
        let archive = node.disk().join("image.oci.tar");
        write("arm64", &archive)?;
        let mut tar = Command::new("tar");
        tar.arg("xOf").arg(&archive).arg("index.json");
        let index: Value = serde_json::from_str(&run(tar)?.success()?)?;
        ensure!(
            index["manifests"][0]["platform"]["architecture"] == "arm64",
            "{index}"
        );
        Ok(())
    });
}

fn write(architecture: &str, archive: &Path) -> Result<()> {
    let mut command = Command::new("sh");
    command
        .arg(repository().join("config/image/archive.sh"))
        .arg(architecture)
        .arg(binaries_under_test().context("the programs")?)
        .args([NAME, &archive.display().to_string()]);
    run(command)?.success().map(drop)
}
