//! A claim with `volumeMode: Block` is a device of the container and none of its mounts: there is
//! nothing to judge, and nothing to break. The spec stays as it is, the container reads the device,
//! `diagnose` has nothing to say, and the nothing blocks the kubelet's clean-up.

use bindguard_integration::prelude::*;
use std::fs::File;
use std::io::Write;

use bindguard_integration::bundle::Bundle;
use bindguard_integration::journal::lines;
use bindguard_integration::privilege;

const CONTENT: &str = "what the claim holds";

#[test]
fn story() {
    Setup::on(Generation::NEWEST).story(|node| {
        let Some(device) = LoopDevice::of(&node.disk().join("disk.img"))? else {
            return Ok(());
        };
        let mapped = node.kubelet().block_volume("uid-1", "pvc-1", &device.0)?;
        is_foreign_wherever_it_is_bound(node, &device.0, &[mapped.link(), mapped.node_path()])?;
        is_read_by_a_container(node, mapped.link())?;
        let report = node.bindguard(["diagnose"])?;
        ensure!(
            report.status.success(),
            "diagnose has something to say: {report:?}"
        );
        mapped.unmap()
    });
}

/// As in the spec of a pod, and as in a foreign spec: bound by its link, or from the global folder.
fn is_foreign_wherever_it_is_bound(node: &Node, device: &Path, paths: &[&Path]) -> Result<()> {
    let binds: Vec<_> = paths
        .iter()
        .map(|path| Bundle::bind(path, "/dev/xvda"))
        .collect();
    let mut spec = Bundle::spec(&binds);
    spec["linux"]["devices"] = json!([{"path": "/dev/xvda", "type": "b", "major": 7, "minor": 0}]);
    spec["annotations"] = json!({"device": device});
    let bundle = Bundle::create(node, "block", spec.to_string().as_bytes())?;
    run(bundle.admit(node)?)?.success()?;
    ensure!(
        bundle.seen()? == spec.to_string().as_bytes(),
        "the spec was edited"
    );
    let line = lines(JOURNAL)?.pop().context("the journal is empty")?;
    let is_all_foreign =
        line["foreign"] == paths.len() && line["binds"].as_array().is_some_and(Vec::is_empty);
    ensure!(is_all_foreign, "not all are foreign: {line}");
    Ok(())
}

/// The CRI follows the kubelet's link, and so does this in its place: `ctr` takes devices only.
fn is_read_by_a_container(node: &Node, link: &Path) -> Result<()> {
    let device = fs::read_link(link).context("follow the link")?;
    let device = device.to_str().context("a device's path is UTF-8")?;
    for runtime in [Runtime::Stock, Runtime::Bindguard, Runtime::Wrapper] {
        let ctr = node.ctr();
        let container = ctr
            .container("block")
            .runtime(runtime)
            .argument("--device")
            .argument(device);
        let count = CONTENT.len().to_string();
        let read = container
            .runs(&["head", "-c", &count, device])
            .run_to_end()?
            .success()?;
        ensure!(read == CONTENT, "{runtime:?}: the container reads {read:?}");
    }
    Ok(())
}

/// A loop device of a file, given back when the story ends.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn of(image: &Path) -> Result<Option<Self>> {
        if !Path::new("/dev/loop-control").exists() || !privilege::has_program("losetup") {
            privilege::skipped("no loop devices");
            return Ok(None);
        }
        let mut file = File::create(image).context("create the image")?;
        file.write_all(CONTENT.as_bytes())
            .and_then(|()| file.set_len(1 << 20))
            .context("fill the image")?;
        let image = image.to_str().context("the image's path is UTF-8")?;
        let device = host(["losetup", "--find", "--show", image])?;
        Ok(Some(Self(device.trim().into())))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = host(["losetup".as_ref(), "--detach".as_ref(), self.0.as_os_str()]);
    }
}
