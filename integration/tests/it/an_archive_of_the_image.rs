//! The release image is an OCI archive, written without a container engine. containerd imports the
//! archive and runs the programs. Equal programs give equal bytes.

use bindguard_integration::doc_commands::repository;
use bindguard_integration::prelude::*;
use bindguard_integration::programs::binaries_under_test;

const NAME: &str = concat!(
    "registry.example.com/bindguard-node:",
    env!("CARGO_PKG_VERSION")
);
const REVISION: &str = "0123abcd";

#[test]
fn containerd_runs_it() {
    Setup::on(Generation::V1_7).story(|node| {
        let own = if cfg!(target_arch = "aarch64") {
            "arm64"
        } else {
            "amd64"
        };
        let archive = node.disk().join("bindguard-node.oci.tar");
        write(&[own], &archive)?;
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
        write(&[own], &again)?;
        ensure!(
            fs::read(&archive)? == fs::read(&again)?,
            "the same programs give other bytes"
        );
        Ok(())
    });
}

/// The image of a release is an index of both architectures. The labels of each image name the sources.
#[test]
fn the_index_has_both_architectures() {
    Setup::on(Generation::V1_7).story(|node| {
        let archive = node.disk().join("image.oci.tar");
        write(&["amd64", "arm64"], &archive)?;
        let blob = |name: &str| -> Result<Value> {
            let mut tar = Command::new("tar");
            tar.arg("xOf")
                .arg(&archive)
                .arg(name.replace("sha256:", "blobs/sha256/"));
            Ok(serde_json::from_str(&run(tar)?.success()?)?)
        };
        let digest =
            |descriptor: &Value| descriptor["digest"].as_str().unwrap_or_default().to_owned();
        let outer = blob("index.json")?;
        let index = blob(&digest(&outer["manifests"][0]))?;
        for (number, architecture) in ["amd64", "arm64"].into_iter().enumerate() {
            let image = &index["manifests"][number];
            ensure!(image["platform"]["architecture"] == architecture, "{index}");
            let config = blob(&digest(&blob(&digest(image))?["config"]))?;
            ensure!(config["architecture"] == architecture, "{config}");
            let labels = &config["config"]["Labels"];
            for (key, value) in [
                ("licenses", "Apache-2.0"),
                ("revision", REVISION),
                ("source", "https://github.com/bindguard/bindguard"),
                ("version", env!("CARGO_PKG_VERSION")),
            ] {
                ensure!(
                    labels[format!("org.opencontainers.image.{key}")] == value,
                    "{labels}"
                );
            }
            ensure!(index["annotations"] == *labels, "{index}");
        }
        Ok(())
    });
}

fn write(architectures: &[&str], archive: &Path) -> Result<()> {
    let programs = binaries_under_test().context("the programs")?;
    let mut command = Command::new("sh");
    command.arg(repository().join("config/image/archive.sh"));
    command.args([NAME, REVISION]).arg(archive);
    for architecture in architectures {
        command.arg(architecture).arg(&programs);
    }
    run(command)?.success().map(drop)
}
