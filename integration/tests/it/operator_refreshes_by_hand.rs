//! `bindguard refresh`: an operator shows a running container the current files, without the agent
//! and without an annotation.

use bindguard_integration::cgroup_hierarchy::tracking_hierarchy;
use bindguard_integration::mounts;
use bindguard_integration::prelude::*;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(story);
}

/// A CSI driver that was restarted has mounted its volume anew: the running container keeps the old
/// mount until it is refreshed. A restart of the container then finds nothing to do.
#[test]
fn a_volume_that_was_mounted_anew() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let (cri, pod) = (node.cri()?, node.kubelet().pod("uid-1")?);
        let volume = pod.volume(VolumeKind::EmptyDirMemory, "data", &[("file", "one")])?;
        let mounts = [mount(volume.path(), "/data", PropagationPrivate)];
        let sandbox = cri.run_pod("bindguard", "web", pod.uid())?;
        let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        let refresh =
            |what: &str| node.bindguard(["refresh", "--pod", "default/web", "--what", what]);
        for content in ["two", "three"] {
            host([
                "umount".as_ref(),
                "--lazy".as_ref(),
                volume.path().as_os_str(),
            ])?;
            tmpfs(volume.path(), "")?;
            fs::write(volume.path().join("file"), content)?;
            let before = mounts::table()?;
            ensure!(refresh("subpaths")?.code() == 0);
            ensure!(
                cri.read(&app, "/data/file")? != content,
                "it was refreshed by itself"
            );
            let done = refresh("volumes")?;
            ensure!(
                done.code() == 0
                    && done.stdout.contains("replaced")
                    && done.stdout.contains("/data of default/web/app"),
                "{done:?}"
            );
            ensure!(
                cri.read(&app, "/data/file")? == content,
                "it reads the old volume"
            );
            ensure!(mounts::table()? == before, "the host's mounts have changed");
        }
        let again = refresh("volumes")?;
        ensure!(
            again.code() == 0 && !again.stdout.contains("replaced"),
            "{again:?}"
        );
        cri.remove_pod(&sandbox)?;
        until("the kubelet deletes the pod", || {
            Ok(node.kubelet().pod("uid-1")?.delete().is_ok())
        })
    });
}

fn story(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let old = Process::start()?;
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(
        VolumeKind::ConfigMap,
        "conf",
        &[("app.conf", "one"), ("gone.conf", "one")],
    )?;
    let mounts = [
        mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            "/etc/app.conf",
            PropagationPrivate,
        ),
        mount(
            volume.subpath("app", 1, "gone.conf").bind()?,
            "/etc/gone.conf",
            PropagationPrivate,
        ),
    ];
    let sandbox = cri.run_pod("runc", "web", pod.uid())?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let refresh =
        |words: &[&str]| node.bindguard(["refresh", "--pod", "default/web"].iter().chain(words));

    let nothing = refresh(&[])?;
    ensure!(
        nothing.code() == 0 && nothing.stdout.contains("2 mounts"),
        "{nothing:?}"
    );

    volume.update(&[("app.conf", "two"), ("gone.conf", "two")])?;
    let dry_run = refresh(&["--dry-run"])?;
    ensure!(
        dry_run.code() == 1 && dry_run.stdout.contains("/etc/app.conf of default/web/app"),
        "{dry_run:?}"
    );
    ensure!(
        cri.read(&app, "/etc/app.conf")? == "one",
        "a dry run changed something"
    );

    let done = refresh(&[])?;
    ensure!(
        done.code() == 0 && done.stdout.matches("replaced").count() == 2,
        "{done:?}"
    );
    ensure!(
        cri.read(&app, "/etc/app.conf")? == "two",
        "the container reads the old file"
    );

    volume.update(&[("app.conf", "three")])?;
    let json = refresh(&["--json"])?;
    let report: Value = serde_json::from_str(&json.stdout)?;
    let outcomes: Vec<_> = report["files"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|file| file["outcome"]["result"].as_str())
        .collect();
    ensure!(
        json.code() == 1 && outcomes.contains(&Some("key-gone")),
        "{json:?}"
    );
    ensure!(
        cri.read(&app, "/etc/app.conf")? == "three" && cri.read(&app, "/etc/gone.conf")? == "two"
    );

    let journal = node.bindguard(["journal", "--pod", "default/web"])?;
    let found = [
        "refreshed while it runs, by an operator",
        "volume conf on the host, by an operator",
        "key-gone",
    ];
    ensure!(
        journal.code() == 1 && found.iter().all(|words| journal.stdout.contains(words)),
        "{journal:?}"
    );

    let by_id = node.bindguard(["refresh", "--container", &app[..12]])?;
    ensure!(by_id.code() == 1, "{by_id:?}");
    let unknown = node.bindguard(["refresh", "--pod", "default/no-such-pod"])?;
    ensure!(
        unknown.code() == 2 && unknown.stderr.contains("of a pod default/no-such-pod"),
        "{unknown:?}"
    );
    volume.update(&[("app.conf", "four")])?;
    without_a_record_and_without_the_cri(node, &app)?;
    ensure!(cri.read(&app, "/etc/app.conf")? == "three");
    without_a_record(node, &app, &old)?;
    ensure!(cri.read(&app, "/etc/app.conf")? == "four");
    cri.remove_pod(&sandbox)?;
    until("the kubelet deletes the pod", || {
        Ok(node.kubelet().pod("uid-1")?.delete().is_ok())
    })
}

/// containerd has its state elsewhere, and a user of the node has named a delegated cgroup after
/// the container. The oldest process in a cgroup of that name is the user's process: the CRI names
/// the right process.
fn without_a_record(node: &Node, id: &str, old: &Process) -> Result<()> {
    let hierarchy = tracking_hierarchy().context("find a cgroup hierarchy")?;
    let user = hierarchy.join(format!("bindguard-user-{}", old.0.id()));
    let cgroup = user.join(id);
    fs::create_dir_all(&cgroup)?;
    fs::write(cgroup.join("cgroup.procs"), old.0.id().to_string())?;
    let script = "for folder in /run/containerd/io.containerd.runtime.v2.task /run/containerd/runc; do \
        mount -t tmpfs none $folder || exit 9; done; exec \"$@\"";
    let mut command = node.command("unshare")?;
    command.args(["--mount", "sh", "-c", script, "sh"]);
    command.arg(node.under_test().join(CLI));
    command.args(["refresh", "--pod", "default/web"]);
    let done = run(command)?;
    fs::write(hierarchy.join("cgroup.procs"), old.0.id().to_string())?;
    fs::remove_dir(cgroup)?;
    fs::remove_dir(user)?;
    ensure!(
        done.stdout.contains("replaced") && done.stdout.contains("/etc/app.conf"),
        "{done:?}"
    );
    Ok(())
}

/// Nothing names the init but the cgroup, which a user of the node can choose: nothing is entered.
fn without_a_record_and_without_the_cri(node: &Node, id: &str) -> Result<()> {
    let record = Path::new("/run/containerd/io.containerd.runtime.v2.task/k8s.io")
        .join(id)
        .join("init.pid");
    let pid = fs::read(&record).with_context(|| format!("read {}", record.display()))?;
    fs::remove_file(&record)?;
    let refused = node.bindguard([
        "refresh",
        "--pod",
        "default/web",
        "--cri",
        "/run/no-such.sock",
    ])?;
    fs::write(&record, pid)?;
    ensure!(
        refused.code() == 2
            && refused.stdout.contains(
                "neither its runtime's record nor the CRI names its process; name the socket with --cri"
            )
            && !refused.stdout.contains("/etc/app.conf of"),
        "{refused:?}"
    );
    Ok(())
}

/// A process that is older than the container.
struct Process(Child);

impl Process {
    fn start() -> Result<Self> {
        let sleep = Command::new("sleep").arg("1000000").spawn();
        Ok(Self(sleep.context("start a process")?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
