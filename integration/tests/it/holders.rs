//! "device or resource busy": a monitoring pod with the host's `/` keeps a disk mounted that the
//! host has unmounted. A namespace without processes does, too. `holders` names both, and the
//! printed commands release the disk.

use bindguard_integration::prelude::*;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::{PropagationHostToContainer, PropagationPrivate};

#[test]
fn of_a_disk_that_was_unmounted() {
    Setup::on(Generation::V1_7).cri().story(story);
}

fn story(node: &Node) -> Result<()> {
    let disk = node.disk().join("disk");
    fs::create_dir(&disk)?;
    let path = disk.to_string_lossy().into_owned();
    host(["mount", "-t", "tmpfs", "-o", "size=1m", "disk", &path])?;
    held_only_by_the_host(node, &path)?;

    let cri = node.cri()?;
    let sandbox = cri.run_pod("runc", "exporter", "uid-exporter")?;
    let root = [mount("/".as_ref(), "/host", PropagationPrivate)];
    cri.start_container(&sandbox, "exporter", &["sleep", "1000000"], &root)?;
    cri.start_container(&sandbox, "sidecar", &["sleep", "1000000"], &[])?;
    of_the_whole_node(node)?;
    let bind = Bind::new(&disk, "/data");
    node.ctr()
        .container("slave")
        .runtime(Runtime::Stock)
        .mount(bind)
        .start()?
        .success()?;
    let namespace = EmptyNamespace::with(node, "kept")?;
    let opener = Sleeper::with_a_namespace_open(node)?;

    let report = holders(node, &path)?;
    let pod = one(&report, |holder| holder["pod"]["name"] == "exporter")?;
    ensure!(
        pod["held_by"] == "process"
            && pod["process_name"] == "sleep"
            && pod["container"].is_string(),
        "{pod}"
    );
    ensure!(
        pod["mounts"][0]["mount_point"] == format!("/host{path}"),
        "{pod}"
    );
    ensure!(
        pod["mounts"][0]["propagation"] == "private"
            && pod["mounts"][0]["unmount_propagates"] == false,
        "{pod}"
    );
    ensure!(
        pod["release"][0]["command"] == "bindguard refresh --pod default/exporter --what host-root"
            && pod["release"][2]["command"] == "kubectl -n default delete pod exporter",
        "{pod}"
    );
    let plain = one(&report, |holder| holder["container"] == "slave")?;
    ensure!(plain["mounts"][0]["mount_point"] == "/data", "{plain}");
    let opened = one(&report, |holder| holder["held_by"] == "descriptor")?;
    ensure!(
        opened["pid"] == opener.0.id() && opened["processes"] == 0,
        "{opened}"
    );
    ensure!(
        opened["release"][0]["command"] == format!("kill {}", opener.0.id()),
        "{opened}"
    );
    drop(opener);
    let empty = one(&report, |holder| holder["held_by"] == "bind-mount")?;
    ensure!(
        empty["release"][0]["command"] == format!("umount {}", namespace.file),
        "{empty}"
    );

    // The host unmounts; the copies stay, and are found by the place that they cover, or by what
    // they show.
    node.ctr().remove("slave")?;
    host(["umount", &path])?;
    let report = holders(node, &path)?;
    ensure!(report["mounts"] == serde_json::json!([]), "{report}");
    for held_by in ["process", "bind-mount"] {
        let holder = one(&report, |holder| holder["held_by"] == held_by)?;
        let ways = holder["release"].as_array().context("what to run")?;
        let commands = ways.iter().filter_map(|way| way["command"].as_str());
        let mut by_other_programs = commands.filter(|run| !run.starts_with("bindguard"));
        let run = by_other_programs.next().context("what to run")?;
        host(["sh", "-ec", run])?;
    }
    let text = node.bindguard(["holders", &path])?;
    ensure!(
        text.code() == unless_closed(0)
            && text
                .stdout
                .contains("no mount namespace has anything mounted there"),
        "not freed: {text:?}"
    );
    drop(namespace);
    bad_input(node)?;
    cri.remove_pod(&sandbox)
}

/// The mounts of a CSI driver and of a pod that uses them, and a disk in another pod's emptyDir. No
/// command unmounts a volume of a living pod, and none has the kubelet erase the disk
/// (kubernetes#129550).
#[test]
fn of_volumes_of_living_pods() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let root = node.kubelet().root().to_path_buf();
        let staging = root.join("plugins/kubernetes.io/csi/driver/1/globalmount");
        let database = node.kubelet().pod("0c1d0000-0000-0000-0000-000000000001")?;
        let worker = node.kubelet().pod("0c1d0000-0000-0000-0000-000000000002")?;
        let volume = database.path().join("volumes/kubernetes.io~csi/pvc/mount");
        let work = worker
            .path()
            .join("volumes/kubernetes.io~empty-dir/scratch");
        let (disk, in_work) = (node.disk().join("disk"), work.join("disk"));
        for folder in [&staging, &volume, &disk, &in_work] {
            fs::create_dir_all(folder)?;
        }
        for place in [&staging, &disk] {
            tmpfs(place, "size=1m")?;
        }
        fs::write(disk.join("kept"), "data")?;
        let bind = |from: &Path, to: &Path| {
            host([
                "mount",
                "--bind",
                &from.display().to_string(),
                &to.display().to_string(),
            ])
        };
        bind(&staging, &volume)?;
        bind(&disk, &in_work)?;
        let cri = node.cri()?;
        let mut sandboxes = Vec::new();
        for (name, pod, source) in [("database", &database, &volume), ("worker", &worker, &work)] {
            let sandbox = cri.run_pod("runc", name, pod.uid())?;
            let propagation = PropagationHostToContainer;
            let mounts = [mount(source.as_path(), "/data", propagation)];
            cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
            sandboxes.push(sandbox);
        }

        let busy = commands(&holders(node, &staging.display().to_string())?);
        ensure!(
            busy.iter()
                .all(|run| run == "kubectl -n default delete pod database"),
            "for a staging mount: {busy:?}"
        );
        let umount = format!("umount {}", in_work.display());
        let busy = commands(&holders(node, &disk.display().to_string())?);
        ensure!(
            !busy.is_empty() && busy.iter().all(|run| *run == umount),
            "for the disk: {busy:?}"
        );
        host(["sh", "-ec", &umount])?;
        let left = holders_of_any_code(node, &disk.display().to_string())?;
        ensure!(
            commands(&left).is_empty(),
            "it does not reach the pod: {left:#}"
        );
        ensure!(fs::read_to_string(disk.join("kept"))? == "data");
        for sandbox in &sandboxes {
            cri.remove_pod(sandbox)?;
        }
        for place in [&volume, &staging, &disk] {
            unmount(place)?;
        }
        database.delete()?;
        worker.delete()
    });
}

/// A privileged pod of the stock shim: a refresh of its bind would be refused, as the container may
/// have made the mounts itself.
#[test]
fn a_refresh_that_would_be_refused_is_not_advised() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let disk = node.disk().join("disk");
        fs::create_dir(&disk)?;
        tmpfs(&disk, "size=1m")?;
        let cri = node.cri()?;
        let sandbox = cri.run_pod("runc", "agent", "uid-agent")?;
        let root = mount("/".as_ref(), "/host", PropagationPrivate);
        let recursive = Mount {
            readonly: true,
            recursive_read_only: true,
            ..root
        };
        cri.start_container(&sandbox, "app", &["sleep", "1000000"], &[recursive])?;
        unmount(&disk)?;
        let path = disk.display().to_string();
        let advised = commands(&holders(node, &path)?);
        let words = "bindguard refresh --pod default/agent --what host-root";
        let done = node.bindguard(["refresh", "--pod", "default/agent", "--what", "host-root"])?;
        ensure!(
            !done.stdout.contains("replaced"),
            "it is not refused: {done:?}"
        );
        ensure!(!advised.iter().any(|run| run == words), "{advised:?}");
        let diagnosed = node
            .bindguard(["diagnose", "--pod", "default/agent"])?
            .stdout;
        ensure!(
            diagnosed.contains("pinned") && !diagnosed.contains(words),
            "{diagnosed}"
        );
        ensure!(
            diagnosed.contains(&format!("run: bindguard holders {path}")),
            "{diagnosed}"
        );
        cri.remove_pod(&sandbox)
    });
}

fn commands(report: &Value) -> Vec<String> {
    let holders = report["holders"].as_array().into_iter().flatten();
    let ways = holders.flat_map(|holder| holder["release"].as_array().into_iter().flatten());
    ways.filter_map(|way| Some(way["command"].as_str()?.to_owned()))
        .collect()
}

/// The command advises no release of the host's mounts or of the roots of containers.
fn of_the_whole_node(node: &Node) -> Result<()> {
    let ended = node.bindguard(["holders", "/", "--json"])?;
    let report: Value =
        serde_json::from_str(&ended.stdout).with_context(|| format!("parse {ended:?}"))?;
    let holders = report["holders"].as_array().context("holders")?;
    ensure!(
        holders
            .iter()
            .filter(|holder| holder["pod"]["name"] == "exporter")
            .count()
            > 1,
        "{report:#}"
    );
    let ways = holders
        .iter()
        .flat_map(|holder| holder["release"].as_array().into_iter().flatten());
    let ways: Vec<&Value> = ways.collect();
    ensure!(ways.is_empty(), "{ways:?}");
    let text = node.bindguard(["holders", "/"])?.stdout;
    let of_pod: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("pod default/exporter"))
        .collect();
    ensure!(
        of_pod.len() == 1 && of_pod[0].contains("3 mount namespaces"),
        "{text}"
    );
    ensure!(
        text.contains("/ holds system mounts") && text.lines().count() < 30 + 3 * holders.len(),
        "{text}"
    );
    Ok(())
}

fn held_only_by_the_host(node: &Node, path: &str) -> Result<()> {
    let text = node.bindguard(["holders", path])?;
    // Parallel namespaces of this machine have nothing to do with the node's disk.
    ensure!(
        text.code() == unless_closed(0)
            && text
                .stdout
                .contains("only this mount namespace has it mounted"),
        "{text:?}"
    );
    ensure!(text.stdout.contains(": shared"), "{text:?}");
    Ok(())
}

/// Some machines do not let even root inspect process 1: then the answer is incomplete, and its
/// exit code says so.
fn unless_closed(code: i32) -> i32 {
    if fs::metadata("/proc/1/ns/mnt").is_ok() {
        code
    } else {
        2
    }
}

fn holders(node: &Node, path: &str) -> Result<Value> {
    let report = holders_of_any_code(node, path)?;
    ensure!(report["holders"] != serde_json::json!([]), "{report:#}");
    Ok(report)
}

fn holders_of_any_code(node: &Node, path: &str) -> Result<Value> {
    let ended = node.bindguard(["holders", path, "--json"])?;
    serde_json::from_str(&ended.stdout).with_context(|| format!("parse {ended:?}"))
}

fn one(report: &Value, is_wanted: impl Fn(&Value) -> bool) -> Result<&Value> {
    let holders = report["holders"].as_array().context("holders")?;
    let mut found = holders.iter().filter(|holder| is_wanted(holder));
    match (found.next(), found.next()) {
        (Some(holder), None) => Ok(holder),
        (None, _) => bail!("no such holder in {report:#}"),
        (Some(_), Some(_)) => bail!("more than one like that in {report:#}"),
    }
}

fn bad_input(node: &Node) -> Result<()> {
    let proc = node.disk().join("proc");
    fs::create_dir_all(proc.join("1/ns"))?;
    fs::write(proc.join("1/ns/mnt"), "")?;
    let mountinfo = fs::read("/proc/thread-self/mountinfo")?;
    fs::write(proc.join("1/mountinfo"), &mountinfo[..mountinfo.len() / 2])?;
    for (words, said) in [
        (
            &["holders", "/nowhere/at/all"][..],
            "No such file or directory",
        ),
        (
            &["holders", "/", "--proc", &proc.to_string_lossy()],
            "1/mountinfo",
        ),
        (&["holders", "/", "--proc", "/etc"], "/etc/1/ns/mnt"),
    ] {
        let ended = node.bindguard(words)?;
        let one_line = ended.stderr.lines().count() == 1;
        ensure!(
            ended.code() == 2 && one_line && ended.stderr.contains(said),
            "{words:?}: {ended:?}"
        );
    }
    Ok(())
}

/// A mount namespace without processes, kept by a bind mount in the node's `/run`.
struct EmptyNamespace {
    file: String,
    folder: String,
}

impl EmptyNamespace {
    fn with(node: &Node, name: &str) -> Result<Self> {
        // A namespace may only be bound on a mount that does not spread: it would hold itself.
        let folder = format!("/run/{name}");
        let file = format!("{folder}/ns");
        let made = format!(
            "mkdir {folder} && mount -t tmpfs t {folder} && mount --make-private {folder} && touch {file}"
        );
        host(["sh", "-ec", &made])?;
        // A mount namespace can be bound only in a mount namespace with a smaller number, and newer
        // kernels assign numbers per processor: on the processor that made the node's namespace,
        // the next number is larger.
        let processors = thread::available_parallelism()?.get();
        let bind = |processor: usize| -> Result<()> {
            let sleeper = Sleeper::in_a_namespace(node, processor)?;
            host([
                "mount",
                "--bind",
                &format!("/proc/{}/ns/mnt", sleeper.0.id()),
                &file,
            ])
            .map(drop)
        };
        let mut tried = (0..processors).map(bind);
        let first_failure = match tried.next() {
            Some(Err(error)) => error,
            _ => return Ok(Self { file, folder }),
        };
        if tried.any(|bound| bound.is_ok()) {
            Ok(Self { file, folder })
        } else {
            Err(first_failure)
        }
    }
}

impl Drop for EmptyNamespace {
    fn drop(&mut self) {
        let _ = host(["umount", "--lazy", &self.file]);
        let _ = host(["umount", "--lazy", &self.folder]);
    }
}

struct Sleeper(Child);

impl Sleeper {
    fn in_a_namespace(node: &Node, processor: usize) -> Result<Self> {
        let mut command = node.command("taskset")?;
        command.args(["--cpu-list", &processor.to_string(), "unshare"]);
        command.args(["--mount", "--propagation", "private", "sleep", "1000000"]);
        Self::start(command)
    }

    /// A process whose namespace a second process keeps open; the first process ends.
    fn with_a_namespace_open(node: &Node) -> Result<Self> {
        let sleeper = Self::in_a_namespace(node, 0)?;
        let mut command = node.command("sh")?;
        command.args([
            "-ec",
            &format!("exec 3</proc/{}/ns/mnt; exec sleep 1000000", sleeper.0.id()),
        ]);
        Self::start(command)
    }

    fn start(mut command: Command) -> Result<Self> {
        let sleeper = Self(command.spawn().context("start a sleeper")?);
        sleeper.wait_until_it_sleeps()?;
        Ok(sleeper)
    }

    /// `sh` and `unshare` become `sleep` in turn, and unshare does it only after it has its
    /// namespace.
    fn wait_until_it_sleeps(&self) -> Result<()> {
        let comm = format!("/proc/{}/comm", self.0.id());
        until("it sleeps", || {
            Ok(fs::read_to_string(&comm)?.trim() == "sleep")
        })
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
