//! `doctor` finds nothing on a good node. It finds each fault that is then made, and names the
//! command against the fault.

use bindguard_integration::node::HostRoot;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege::{has_program, skipped};
use bindguard_integration::programs::Matrix;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

fn containerd_alone(generation: Generation) {
    Setup::on(generation).cri().story(|node| {
        let point = Points::of(node)?.named("containerd")?;
        ensure!(point["status"] == "ok", "{point}");
        let text = point["message"].as_str().unwrap_or_default();
        let version = Matrix::locate()?.containerd_version(generation)?;
        ensure!(text.contains(&format!("containerd {version}")), "{text}");
        // As on k3s: a shell does not have containerd's folders on its PATH.
        let mut doctor = node.command(node.under_test().join("bindguard"))?;
        doctor
            .args(["doctor", "--json"])
            .env("PATH", "/usr/bin:/bin");
        let point = Points::said(&run(doctor)?)?.named("programs")?;
        let runc = node.programs().join("runc");
        ensure!(
            point["message"]
                .as_str()
                .is_some_and(|it| it.contains(&*runc.to_string_lossy())),
            "{point}"
        );
        Ok(())
    });
}

on_newest_and_older!(containerd_alone);

#[test]
fn of_a_node_that_breaks() {
    // The whole node must be healthy, so no process of a parallel story may be visible.
    let test = "doctor::of_a_node_that_breaks";
    Setup::on(Generation::V1_7).cri().story_alone(test, |node| {
        good_node(node)?;
        subpaths(node)?;
        fuse_daemon_of_the_kubelet(node)?;
        mount_helper(node)?;
        pinned(node)?;
        config(node)
    });
}

/// The default is rslave, so the point is no fault.
#[test]
fn of_a_read_only_host_root() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cri = node.cri()?;
        let root = |readonly| Mount {
            readonly,
            ..mount("/".as_ref(), "/host", PropagationPrivate)
        };
        let mut sandboxes = Vec::new();
        for (name, handler, mounts) in [
            ("exporter", "bindguard", &[root(true)][..]),
            ("writer", "bindguard", &[root(false)]),
            ("stock", "runc", &[root(true)]),
        ] {
            let sandbox = cri.run_pod(handler, name, &format!("uid-{name}"))?;
            cri.start_container(&sandbox, "app", &["sleep", "1000000"], mounts)?;
            sandboxes.push(sandbox);
        }
        let point = Points::of(node)?.named("read-only-binds")?;
        let message = point["message"].as_str().unwrap_or_default();
        ensure!(
            point["status"] == "ok" && message.contains("default/exporter"),
            "{point}"
        );
        ensure!(
            !message.contains("default/writer") && !message.contains("default/stock"),
            "{point}"
        );
        sandboxes
            .iter()
            .try_for_each(|sandbox| cri.remove_pod(sandbox))
    });
}

#[test]
fn of_a_node_whose_root_is_private() {
    Setup::on(Generation::NEWEST)
        .host_root(HostRoot::Private)
        .story(|node| {
            let point = Points::of(node)?.named("host-root")?;
            ensure!(point["status"] == "failed", "{point}");
            host([
                "sh",
                "-ec",
                point["command"].as_str().context("what to run")?,
            ])?;
            ensure!(Points::of(node)?.named("host-root")?["status"] == "ok");
            Ok(())
        });
}

/// The output of `doctor --json`.
struct Points(Vec<Value>);

impl Points {
    fn of(node: &Node) -> Result<Self> {
        Self::said(&node.bindguard(["doctor", "--json"])?)
    }

    fn said(ended: &Finished) -> Result<Self> {
        let report: Value =
            serde_json::from_str(&ended.stdout).with_context(|| format!("parse {ended:?}"))?;
        let points = report["points"].as_array().context("points")?.clone();
        let has = |state: &str| points.iter().any(|point| point["status"] == state);
        let code = if has("failed") {
            1
        } else {
            2 * i32::from(has("unknown"))
        };
        ensure!(
            ended.code() == code,
            "exit code {} for {points:?}",
            ended.code()
        );
        Ok(Self(points))
    }

    fn named(&self, name: &str) -> Result<Value> {
        self.0
            .iter()
            .find(|point| point["name"] == name)
            .cloned()
            .with_context(|| format!("{name} in {:?}", self.0))
    }
}

fn good_node(node: &Node) -> Result<()> {
    let points = Points::of(node)?;
    for name in [
        "kernel",
        "host-root",
        "detach-mounts",
        "mount-helpers",
        "fuse-daemons",
        "containerd",
    ] {
        ensure!(
            points.named(name)?["status"] == "ok",
            "{}",
            points.named(name)?
        );
    }
    for name in ["programs", "config", "subpaths"] {
        ensure!(
            points.named(name)?["status"] == "ok",
            "{}",
            points.named(name)?
        );
    }
    let text = node.bindguard(["doctor"])?;
    ensure!(
        text.stdout.contains("ok         host-root: / is shared"),
        "{text:?}"
    );
    Ok(())
}

/// A configMap that changes under a running container: the message has the cure.
fn subpaths(node: &Node) -> Result<()> {
    for (handler, said) in [
        (
            "bindguard",
            "the guard repairs it when its container is created next",
        ),
        ("runc", "its pod runs under another shim"),
    ] {
        let pod = node.kubelet().pod(&format!("uid-{handler}"))?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let mounts = [mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            "/etc/app.conf",
            PropagationPrivate,
        )];
        let cri = node.cri()?;
        let sandbox = cri.run_pod(handler, handler, pod.uid())?;
        cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        volume.update(&[("app.conf", "two")])?;
        let point = Points::of(node)?.named("subpaths")?;
        ensure!(
            point["status"] == "failed"
                && point["message"]
                    .as_str()
                    .is_some_and(|text| text.contains(said)),
            "{point}"
        );
        for verb in [&["diagnose"][..], &["repair", "--all"]] {
            let ended = node.bindguard(verb)?;
            ensure!(
                ended
                    .stdout
                    .contains("1 running container keeps the old content until it restarts"),
                "{ended:?}"
            );
        }
        let point = Points::of(node)?.named("subpaths")?;
        ensure!(
            point["status"] == "ok" && !point.to_string().contains("stale"),
            "{point}"
        );
        cri.remove_pod(&sandbox)?;
        pod.delete()?;
    }
    of_a_pod_that_no_runtime_knows(node)
}

fn of_a_pod_that_no_runtime_knows(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("sick")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    volume.subpath("app", 0, "app.conf").bind()?;
    volume.update(&[("app.conf", "two")])?;
    let point = Points::of(node)?.named("subpaths")?;
    ensure!(
        point["status"] == "failed" && point["command"] == "bindguard diagnose",
        "{point}"
    );
    pod.delete()
}

/// A process that has /dev/fuse open, in the cgroup of a process named kubelet.
fn fuse_daemon_of_the_kubelet(node: &Node) -> Result<()> {
    let kubelet = node.disk().join("daemon/kubelet");
    fs::create_dir(node.disk().join("daemon"))?;
    // cp is a separate process: while any child of this process has the file open for writing,
    // execve(2) of the file fails
    host(["cp".as_ref(), "/bin/sleep".as_ref(), kubelet.as_os_str()])?;
    let kubelet = Running::start(node, &[&kubelet.to_string_lossy(), "1000000"], "kubelet")?;
    let daemon = Running::start(
        node,
        &["sh", "-c", "exec 3<>/dev/fuse; exec sleep 1000000"],
        "sleep",
    )?;
    let point = Points::of(node)?.named("fuse-daemons")?;
    // the command is for the first daemon, which may belong to a test in parallel
    let has = |key: &str, text: &str| point[key].as_str().is_some_and(|it| it.contains(text));
    ensure!(
        point["status"] == "failed"
            && has("message", &format!("({})", daemon.0.id()))
            && has("command", "StartTransientUnit"),
        "{point}"
    );
    is_a_call_of_systemd(node, point["command"].as_str().unwrap_or_default())?;
    drop(kubelet);
    ensure!(Points::of(node)?.named("fuse-daemons")?["status"] == "ok");
    Ok(())
}

/// There is no systemd on a node; but busctl puts the message together, by its signature, and hands
/// it to a bus.
fn is_a_call_of_systemd(node: &Node, line: &str) -> Result<()> {
    if !has_program("busctl") || !has_program("dbus-daemon") {
        skipped("no busctl or no dbus-daemon");
        return Ok(());
    }
    let address = format!("unix:path={}", node.disk().join("bus").display());
    let _bus = Running::start(
        node,
        &[
            "dbus-daemon",
            "--session",
            "--nofork",
            "--address",
            &address,
        ],
        "dbus-daemon",
    )?;
    let call = |line: &str| {
        let mut command = node.command("sh")?;
        command
            .args(["-c", line])
            .env("DBUS_SYSTEM_BUS_ADDRESS", &address);
        run(command)
    };
    until("the bus listens", || Ok(node.disk().join("bus").exists()))?;
    let ended = call(line)?.failure()?;
    ensure!(
        ended.contains("org.freedesktop.systemd1"),
        "{line}: {ended}"
    );
    let ended = call(&line.replace("fail 1 PIDs", "fail 2 PIDs"))?.failure()?;
    ensure!(
        !ended.contains("org.freedesktop.systemd1"),
        "busctl does not look at the words: {ended}"
    );
    Ok(())
}

fn mount_helper(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("shares")?;
    fs::create_dir_all(pod.path().join("volumes/kubernetes.io~nfs/data"))?;
    let points = Points::of(node)?;
    let point = points.named("mount-helpers")?;
    let expected = if has_program("mount.nfs") {
        "ok"
    } else {
        "failed"
    };
    ensure!(
        point["status"] == expected
            && point["message"]
                .as_str()
                .is_some_and(|text| text.contains("mount.nfs")),
        "{point}"
    );
    if expected == "failed" {
        of_other_distributions(node)?;
        is_a_package(node, point["command"].as_str().unwrap_or_default())?;
    }
    // An NFS volume that is not mounted is a finding of its own.
    ensure!(
        points.named("subpaths")?["message"]
            .as_str()
            .is_some_and(|text| text.ends_with("is unmounted"))
    );
    pod.delete()
}

fn of_other_distributions(node: &Node) -> Result<()> {
    let file = node.disk().join("os-release");
    for (text, run, said) in [
        (
            "ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n",
            Some("yum install nfs-utils"),
            "mount.nfs",
        ),
        (
            "ID=bottlerocket\nPRETTY_NAME=\"Bottlerocket OS 1.20\"\n",
            None,
            "the image of Bottlerocket OS 1.20",
        ),
    ] {
        fs::write(&file, text)?;
        host([
            "mount".as_ref(),
            "--bind".as_ref(),
            file.as_os_str(),
            "/etc/os-release".as_ref(),
        ])?;
        let point = Points::of(node)?.named("mount-helpers");
        host(["umount", "/etc/os-release"])?;
        let point = point?;
        let text = point["message"].as_str().unwrap_or_default();
        ensure!(
            point["command"].as_str() == run && text.contains(said),
            "{point}"
        );
    }
    Ok(())
}

/// apt's own simulation shows that the package exists.
fn is_a_package(node: &Node, line: &str) -> Result<()> {
    let shell = |line: &str| {
        let mut command = node.command("sh")?;
        command.args(["-ec", line]);
        run(command)
    };
    if !shell("apt-cache show nfs-common")?.status.success() {
        skipped("apt has no lists of packages here");
        return Ok(());
    }
    let simulated = line.replace("apt-get install", "apt-get --simulate install");
    ensure!(
        simulated != line && shell(&simulated)?.success()?.contains("Inst nfs-common"),
        "{line}"
    );
    Ok(())
}

/// A network namespace, and a disk mounted anywhere. The host has unmounted both; a monitoring
/// container has not.
fn pinned(node: &Node) -> Result<()> {
    let disk = node.disk().join("a").display().to_string();
    for (place, make) in [
        (
            "/run/netns/cni-1",
            "mkdir -p /run/netns && touch $0 && mount --bind /proc/self/ns/net $0",
        ),
        (&disk, "mkdir $0 && mount -t tmpfs a $0"),
    ] {
        host(["sh", "-ec", make, place])?;
        let ctr = node.ctr();
        let container = ctr
            .container("exporter")
            .runtime(Runtime::Stock)
            .mount(Bind::new(Path::new("/"), "/host"));
        container.start()?.success()?;
        host(["umount", place])?;
        let point = Points::of(node)?.named("pinned")?;
        ensure!(
            point["status"] == "failed" && names(&point, place),
            "{point}"
        );
        ensure!(
            point["command"]
                .as_str()
                .is_some_and(|run| run.starts_with("bindguard holders /")),
            "{point}"
        );
        let held = node.bindguard(["holders", place])?;
        let (mount, container) = (format!("has /host{place} "), "container exporter");
        ensure!(
            held.stdout.contains(&mount) && held.stdout.contains(container),
            "{held:?}"
        );
        ctr.remove("exporter")?;
        let point = Points::of(node)?.named("pinned")?;
        ensure!(!names(&point, place), "{point}");
    }
    Ok(())
}

/// Parallel nodes of this machine may have pinned mounts, too.
fn names(point: &Value, place: &str) -> bool {
    point["message"]
        .as_str()
        .is_some_and(|text| text.split([' ', ',']).any(|word| word == place))
}

fn config(node: &Node) -> Result<()> {
    let file = node.disk().join("bindguard.toml");
    fs::write(&file, "[kubelet\n")?;
    let point = Points::of(node)?.named("config")?;
    ensure!(
        point["status"] == "failed" && point["command"] == "bindguard config check",
        "{point}"
    );
    let check = node.bindguard(["config", "check"])?;
    ensure!(
        check.code() == 2 && check.stderr.contains("line 1"),
        "{check:?}"
    );
    Ok(())
}

struct Running(Child);

impl Running {
    /// Starts a process of the node, and waits until it has become what it is to be.
    fn start(node: &Node, words: &[&str], name: &str) -> Result<Self> {
        let mut command = node.command(words[0])?;
        command
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let running = Self(command.spawn().with_context(|| format!("start {name}"))?);
        let comm = format!("/proc/{}/comm", running.0.id());
        until(&format!("{name} runs"), || {
            Ok(fs::read_to_string(&comm)?.trim() == name)
        })?;
        Ok(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
