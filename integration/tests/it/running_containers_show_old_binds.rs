//! `bindguard diagnose` shows the binds of running containers that differ from the host, with the
//! command that cures each: a volume that was mounted anew, a replaced file and socket, a private
//! bind of the host's root. `diagnose` enters no container and changes nothing.

use bindguard_integration::prelude::*;
use std::os::unix::net::UnixListener;

use bindguard_integration::fuse_daemon::FuseDaemon;
use bindguard_integration::mount_calls::bind;
use bindguard_integration::mounts;
use bindguard_integration::privilege::skipped;
use bindguard_integration::scenes::delete_pod;
use bindguard_integration::stopped::is_stopped;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

/// The time that a probe of a silent source and the rest of a survey may take on a busy machine.
const SILENT_TIMEOUT: Duration = Duration::from_secs(20);

fn story(generation: Generation) {
    Setup::on(generation).cri().story(|node| {
        for runtime in ["runc", "bindguard"] {
            a_volume_a_file_and_a_socket(node, runtime)
                .with_context(|| format!("with {runtime}"))?;
        }
        Ok(())
    });
}

on_newest_and_older!(story);

fn a_volume_a_file_and_a_socket(node: &Node, runtime: &str) -> Result<()> {
    let cri = node.cri()?;
    let volume = volume(node, runtime)?;
    let mut host_files = HostFiles::made(node, runtime)?;
    let mounts = [
        mount(&volume, "/data", PropagationPrivate),
        mount(
            &host_files.folder.join("file"),
            "/etc/file",
            PropagationPrivate,
        ),
        mount(
            &host_files.folder.join("socket"),
            "/socket",
            PropagationPrivate,
        ),
    ];
    let uid = format!("uid-{runtime}");
    let sandbox = cri.run_pod(runtime, runtime, &uid)?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let pod = format!("default/{runtime}");
    let fresh = diagnose(node, &["--pod", &pod], 0)?;
    ensure!(fresh.get("old_binds").is_none(), "{fresh}");

    host_files.replace()?;
    let files = diagnose(node, &["--pod", &pod], 0)?;
    ensure!(found(&files) == [("host-files", 2)], "{files}");
    unmount_lazily(&volume)?;
    tmpfs(&volume, "")?;
    fs::write(volume.join("file"), "two")?;
    let before = mounts::table()?;
    let report = diagnose(node, &["--pod", &pod], 1)?;
    ensure!(
        found(&report) == [("volumes", 1), ("host-files", 2)],
        "{report}"
    );
    let old = &report["old_binds"][0];
    ensure!(
        old["container"]["id"] == app.as_str()
            && old["opted_in"] == false
            && old["mounts"][0]
                == json!({
                    "destination": "/data",
                    "source": volume.display().to_string(),
                    "outcome": { "result": "stale" },
                }),
        "{report}"
    );
    let text = node.bindguard(["diagnose", "--pod", &pod])?;
    for kind in ["volumes", "host-files"] {
        for words in [
            format!("not opted in (bindguard.io/refresh-binds: {kind})"),
            format!("run: bindguard refresh --pod {pod} --what {kind}"),
        ] {
            ensure!(
                text.code() == 1 && text.stdout.contains(&words),
                "no {words:?} in {text:?}"
            );
        }
    }
    ensure!(
        cri.read(&app, "/data/file")? == "one" && mounts::table()? == before,
        "diagnose changed something"
    );
    cures(node, &report)?;
    ensure!(cri.read(&app, "/data/file")? == "two");
    let done = diagnose(node, &["--pod", &pod], 0)?;
    ensure!(done.get("old_binds").is_none(), "{done}");
    cri.remove_pod(&sandbox)?;
    delete_pod(node, &uid)
}

/// Runs each command of the report.
fn cures(node: &Node, report: &Value) -> Result<()> {
    let old = report["old_binds"].as_array().context("no old binds")?;
    for old in old {
        let command = old["command"].as_str().context("no command")?;
        let words = command.strip_prefix("bindguard ");
        let words = words.with_context(|| format!("another program in {command:?}"))?;
        node.bindguard(words.split(' '))?.success()?;
    }
    Ok(())
}

/// Nothing is wrong until the host unmounts something, so only `--all` lists the bind. A pod that
/// opted in expects the cure.
#[test]
fn a_private_bind_of_the_hosts_root() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let cri = node.cri()?;
        let opted_in = [("bindguard.io/refresh-binds", "host-root")];
        for (name, annotations, code) in [("out", &[][..], 0), ("in", &opted_in[..], 1)] {
            let uid = format!("uid-{name}");
            node.kubelet().pod(&uid)?;
            let sandbox = cri.run_annotated_pod("runc", name, &uid, annotations)?;
            let mounts = [mount(Path::new("/"), "/host", PropagationPrivate)];
            cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
            let pod = format!("default/{name}");
            let report = diagnose(node, &["--pod", &pod], code)?;
            ensure!(found(&report).is_empty() == (code == 0), "{report}");
            let all = diagnose(node, &["--pod", &pod, "--all"], code)?;
            ensure!(found(&all) == [("host-root", 1)], "{all}");
            cures(node, &all)?;
            let done = diagnose(node, &["--pod", &pod, "--all"], 0)?;
            ensure!(found(&done).is_empty(), "{done}");
            cri.remove_pod(&sandbox)?;
            delete_pod(node, &uid)?;
        }
        Ok(())
    });
}

/// The host's mount of now does not answer: `diagnose` returns, and no command would help.
#[test]
fn the_new_mount_is_silent() {
    if let Some(why) = FuseDaemon::missing() {
        return skipped(why);
    }
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let (folder, place) = (node.disk().join("bucket"), node.disk().join("served"));
        [&folder, &place].into_iter().try_for_each(fs::create_dir)?;
        fs::write(folder.join("file"), "two")?;
        let daemon = FuseDaemon::mounted(node, &folder, &place)?;
        let (cri, volume) = (node.cri()?, volume(node, "silent")?);
        let sandbox = cri.run_pod("runc", "silent", "uid-silent")?;
        let mounts = [
            mount(&volume, "/data", PropagationPrivate),
            mount(&place.join("file"), "/etc/file", PropagationPrivate),
        ];
        cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        daemon.signal(Signal::SIGSTOP)?;
        until("bindfs is stopped", || is_stopped(daemon.pid()))?;
        unmount_lazily(&volume)?;
        bind(&place, &volume)?;
        let began = Instant::now();
        let report = diagnose(node, &["--pod", "default/silent"], 2);
        let took = began.elapsed();
        daemon.signal(Signal::SIGCONT)?;
        let report = report?;
        ensure!(took < SILENT_TIMEOUT, "it took {took:?}");
        let old = &report["old_binds"][0];
        let outcome = &old["mounts"][0]["outcome"];
        ensure!(
            found(&report) == [("volumes", 1)]
                && old.get("command").is_none()
                && outcome["reason"] == "source-is-dead"
                && outcome["error"].is_string()
                && report["problems"][0].as_str().is_some_and(|problem| {
                    problem.contains("/served/file is not compared with running containers")
                }),
            "{report}"
        );
        cri.remove_pod(&sandbox)?;
        delete_pod(node, "uid-silent")?;
        unmount(&place)
    });
}

/// The kinds of old binds, each with the number of mounts.
fn found(report: &Value) -> Vec<(&str, usize)> {
    let old = report["old_binds"].as_array().into_iter().flatten();
    let kind = |old: &'_ Value| old["mounts"].as_array().map_or(0, Vec::len);
    old.map(|old| (old["what"].as_str().unwrap_or_default(), kind(old)))
        .collect()
}

fn diagnose(node: &Node, words: &[&str], code: i32) -> Result<Value> {
    let done = node.bindguard([&["diagnose", "--json"], words].concat())?;
    ensure!(done.code() == code, "{done:?}");
    serde_json::from_str(&done.stdout).with_context(|| format!("read {}", done.stdout))
}

/// A volume of a CSI driver, which is a tmpfs as with secrets-store.
fn volume(node: &Node, pod: &str) -> Result<PathBuf> {
    let pod = node.kubelet().pod(&format!("uid-{pod}"))?;
    let volume = pod.path().join("volumes/kubernetes.io~csi/pv/mount");
    fs::create_dir_all(&volume)?;
    tmpfs(&volume, "")?;
    fs::write(volume.join("file"), "one")?;
    Ok(volume)
}

fn unmount_lazily(path: &Path) -> Result<()> {
    host(["umount".as_ref(), "--lazy".as_ref(), path.as_os_str()])?;
    Ok(())
}

/// A file and a socket of a daemon of the host.
struct HostFiles {
    folder: PathBuf,
    listener: UnixListener,
}

impl HostFiles {
    fn made(node: &Node, name: &str) -> Result<Self> {
        let folder = node.disk().join(format!("daemon-{name}"));
        fs::create_dir(&folder)?;
        fs::write(folder.join("file"), "one")?;
        let listener = UnixListener::bind(folder.join("socket")).context("make the socket")?;
        Ok(Self { folder, listener })
    }

    /// The steps of a daemon that is restarted.
    fn replace(&mut self) -> Result<()> {
        fs::write(self.folder.join("new"), "two")?;
        fs::rename(self.folder.join("new"), self.folder.join("file"))?;
        fs::remove_file(self.folder.join("socket"))?;
        self.listener = UnixListener::bind(self.folder.join("socket"))?;
        Ok(())
    }
}
