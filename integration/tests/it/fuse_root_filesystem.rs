//! A root filesystem that a program serves, as lazy-pulling snapshotters have: `fuse3.NAME`, by way
//! of mount.fuse3. It runs as long as the container, and ends with it.

use bindguard_integration::mounts;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege::{has_program, skipped};
use bindguard_integration::shim::{Bundle, Shim};
use containerd_shim_protos::shim::oci::Options;

#[test]
fn newest_containerd() {
    if !has_program("bindfs") || !has_program("mount.fuse3") || !Path::new("/dev/fuse").exists() {
        return skipped(
            "no /dev/fuse, or no bindfs and mount.fuse3 (Debian packages bindfs, fuse3)",
        );
    }
    Setup::on(Generation::NEWEST).story(|node| {
        let before = Leftovers::of(node)?;
        served(node)?;
        program_that_fails(node)?;
        before.are_all(node)
    });
}

fn served(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "served", &["sleep", "1000000"])?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    let mut request = bundle.request();
    request.rootfs[0].type_ = "fuse3.bindfs".to_owned();
    request.rootfs[0].options = vec!["dev".to_owned(), "suid".to_owned()];
    client.create(&request)?;
    client.start("served", "")?;
    let mounted = mounts::on(&bundle.path().join("rootfs"))?;
    ensure!(
        mounted.len() == 1 && mounted[0].filesystem.starts_with("fuse"),
        "{mounted:?}"
    );
    ensure!(
        node.processes()?
            .iter()
            .any(|name| name.starts_with("bindfs")),
        "{:?}",
        node.processes()?
    );
    ensure!(client.end("served")?.exit_status == 137);
    Ok(client.shut_down("served")?)
}

fn program_that_fails(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "failing", &["true"])?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    for kind in ["fuse3.bindfs", "fuse3.no-such-program"] {
        let mut request = bundle.request();
        request.rootfs[0].type_ = kind.to_owned();
        request.rootfs[0].source = "/no/such/folder".to_owned();
        request.rootfs[0].options.clear();
        let error = client
            .create(&request)
            .err()
            .context("it was created")?
            .to_string();
        ensure!(
            error.contains("failed to mount rootfs component: mount fuse3."),
            "{error}"
        );
        ensure!(error.contains("mount.fuse3 "), "{error}");
    }
    Ok(client.shut_down("failing")?)
}
