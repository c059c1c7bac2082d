//! A container is written down, its configMap changes, and it is restored: its subPath is bound
//! anew, and without the guard that fails as a create does. By `bindguard-runtime restore`, as
//! Podman calls it, and by containerd.

use bindguard_integration::image;
use bindguard_integration::mount_calls::bind;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::says_no_such_file;
use bindguard_integration::shim::spec;

#[test]
fn by_the_runtime_wrapper() {
    Setup::on(Generation::NEWEST).story_with_criu(wrapper);
}

#[test]
fn by_containerd() {
    Setup::on(Generation::NEWEST).story_with_criu(|node| {
        [Runtime::Stock, Runtime::Bindguard]
            .into_iter()
            .try_for_each(|runtime| containerd(node, runtime))
    });
}

fn containerd(node: &Node, runtime: Runtime) -> Result<()> {
    let pod = node.kubelet().pod(&format!("saved-{runtime:?}"))?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let ctr = node.ctr();
    let words = |words: &[&str]| run(ctr.command(words));
    let first = ctr
        .container("first")
        .runtime(runtime)
        .mount(Bind::new(subpath.bind()?, "/etc/app.conf"));
    first
        .argument("--net-host")
        .runs(&["sleep", "1000000"])
        .start()?
        .success()?;
    words(&[
        "containers",
        "checkpoint",
        "--task",
        "--rw",
        "--image",
        "first",
        "saved",
    ])?
    .success()?;
    ctr.remove("first")?;
    volume.update(&[("app.conf", "two")])?;
    let restored = words(&["containers", "restore", "--live", "--rw", "second", "saved"])?;
    if runtime == Runtime::Stock {
        let ended = restored.failure()?;
        // runc 1.5 names criu's log instead of its words.
        ensure!(
            says_no_such_file(&ended) || ended.contains("criu failed: type RESTORE"),
            "without bindguard it fails for another reason: {ended}"
        );
        ctr.forget("second")?;
    } else {
        restored.success()?;
        let read = ctr.read("second", "/etc/app.conf")?;
        ensure!(read == "two", "the container reads {read:?}");
        only_a_current_mount(&subpath)?;
        ctr.remove("second")?;
    }
    words(&["image", "rm", "saved"])?.success()?;
    pod.delete()
}

fn wrapper(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("saved")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let saved = Saved::create(node, subpath.bind()?)?;
    let images = saved.bundle.join("images").display().to_string();
    saved
        .call("runc", &["run", "--detach", "saved"])?
        .success()?;
    saved
        .call("runc", &["checkpoint", "--image-path", &images, "saved"])?
        .success()?;
    volume.update(&[("app.conf", "two")])?;

    let restore = ["restore", "--detach", "--image-path", &images, "saved"];
    let ended = saved.call("runc", &restore)?.failure()?;
    ensure!(
        says_no_such_file(&ended),
        "without bindguard it fails for another reason: {ended}"
    );
    saved.call("bindguard-runtime", &restore)?.success()?;
    let read = saved
        .call("runc", &["exec", "saved", "cat", "/etc/app.conf"])?
        .success()?;
    ensure!(read == "two", "the container reads {read:?}");
    only_a_current_mount(&subpath)?;
    saved
        .call("runc", &["delete", "--force", "saved"])?
        .success()?;
    pod.delete()
}

/// A bundle with a container, and a folder for criu's files.
struct Saved<'n> {
    node: &'n Node,
    bundle: PathBuf,
}

impl<'n> Saved<'n> {
    fn create(node: &'n Node, source: &Path) -> Result<Self> {
        let bundle = node.disk().join("saved");
        let rootfs = bundle.join("rootfs");
        fs::create_dir_all(&rootfs).with_context(|| format!("create {}", rootfs.display()))?;
        image::lay_out(&rootfs)?;
        // criu dumps mounts, so the root filesystem has to be a mount
        bind(&rootfs, &rootfs)?;
        let mut spec = spec(node, "saved", &["sleep", "1000000"]);
        let subpath = json!({"destination": "/etc/app.conf", "type": "bind", "source": source, "options": ["rbind", "ro"]});
        spec["mounts"]
            .as_array_mut()
            .context("the spec has mounts")?
            .push(subpath);
        fs::write(bundle.join("config.json"), spec.to_string()).context("write the spec")?;
        Ok(Self { node, bundle })
    }

    fn call(&self, program: &str, words: &[&str]) -> Result<Finished> {
        // a container that goes on would hold a pipe open, and criu does not write down a file that
        // lies outside of it
        let streams = if words.contains(&"--detach") {
            "> /dev/null 2>&1"
        } else {
            ""
        };
        let log = self.bundle.join("log");
        let mut command = self.node.command("sh")?;
        command
            .args(["-c", &format!("exec \"$@\" {streams}"), "sh"])
            .arg(self.node.programs().join(program));
        command.arg("--log").arg(&log).args(words);
        command
            .env("BINDGUARD_RUNTIME", self.node.programs().join("runc"))
            .current_dir(&self.bundle);
        let mut finished = run(command)?;
        finished.stderr += &fs::read_to_string(&log).unwrap_or_default();
        Ok(finished)
    }
}
