//! A running container gets the new file of its subPath (kubernetes#50345): only where its pod
//! opted in, and with the flags of the old mount.

use bindguard_integration::journal;
use bindguard_integration::kubelet::Subpath;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;
use bindguard_integration::{PollingReader, on_every_generation};
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const REFRESHED: &str = "bindguard_refreshes_total{outcome=\"replaced\"}";

fn with_runc(generation: Generation) {
    Setup::on(generation).cri().story(refresh_story);
}

fn with_crun(generation: Generation) {
    Setup::on(generation)
        .oci(Oci::Crun(generation))
        .cri()
        .story(refresh_story);
}

#[test]
fn runc_1_4() {
    Setup::on(Generation::NEWEST)
        .oci(Oci::Runc(Generation::V2_3))
        .cri()
        .story(refresh_story);
}

mod runc {
    use super::*;
    on_every_generation!(with_runc);
}

mod crun {
    use super::*;
    on_newest_and_older!(with_crun);
}

fn refresh_story(node: &Node) -> Result<()> {
    let agent = Agent::start(node, "")?;
    for kind in [VolumeKind::ConfigMap, VolumeKind::Secret] {
        update_reaches_only_containers_that_opted_in(node, &agent, kind)?;
    }
    a_signal_follows_the_new_file(node)?;
    a_signal_reaches_a_program_that_is_not_the_init(node)?;
    three_readers_never_see_anything_bad(node, &agent, 150)
}

/// The runtime does not change the agent's work, so a single runtime is enough here.
#[test]
fn many_updates() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let agent = Agent::start(node, "")?;
        three_readers_never_see_anything_bad(node, &agent, 1500)
    });
}

/// A volume folder and a subPath that appear after the pod's start (kubernetes/enhancements#6395).
#[test]
fn a_volume_of_a_running_pod() {
    Setup::on(Generation::NEWEST)
        .cri()
        .story(a_volume_is_added_to_a_running_pod);
}

fn a_volume_is_added_to_a_running_pod(node: &Node) -> Result<()> {
    let agent = Agent::start(node, "")?;
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-late")?;
    let opted_in = [("bindguard.io/refresh", "true")];
    let sandbox = cri.run_annotated_pod("bindguard", "late", pod.uid(), &opted_in)?;
    let first = cri.start_container(&sandbox, "first", &SLEEP, &[])?;
    let volume = pod.volume(VolumeKind::ConfigMap, "late", &[("app.conf", "one")])?;
    let place = "/etc/app.conf";
    let mounts = [at(&volume.subpath("app", 0, "app.conf"), place)?];
    let mut app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    until("the container reads the update of the added volume", || {
        Ok(cri.read(&app, place)? == "two")
    })?;

    drop(agent);
    volume.update(&[("app.conf", "three")])?;
    let diagnose = || node.bindguard(["diagnose", "--pod", "uid-late"]);
    let found = diagnose()?;
    ensure!(
        found.code() == 1 && found.stdout.contains("stale"),
        "{}",
        found.stdout
    );
    cri.stop(&app, 0)?;
    cri.remove(&app)?;
    app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    ensure!(
        cri.read(&app, place)? == "three",
        "the guard left the added volume's subPath as it was"
    );
    let found = diagnose()?;
    ensure!(found.code() == 0, "{}", found.stdout);
    ensure!(cri.pid(&first)? > 0, "the pod's first container ended");
    cri.remove_pod(&sandbox)?;
    pod.delete()
}

fn at(subpath: &Subpath, place: &str) -> Result<Mount> {
    Ok(mount(subpath.bind()?, place, PropagationPrivate))
}

/// The annotation names only the first of two containers in a pod, and a second pod has no
/// annotation.
fn update_reaches_only_containers_that_opted_in(
    node: &Node,
    agent: &Agent,
    kind: VolumeKind,
) -> Result<()> {
    let cri = node.cri()?;
    let before = agent.figure(REFRESHED);
    let (pod, other) = (
        node.kubelet().pod("uid-in")?,
        node.kubelet().pod("uid-out")?,
    );
    let payload = |text| [("app.conf", text), ("folder/key", text)];
    let volume = pod.volume(kind, "conf", &payload("one"))?;
    let other_volume = other.volume(kind, "conf", &payload("one"))?;
    let mounts = [
        at(&volume.subpath("app", 0, "app.conf"), "/etc/app/app.conf")?,
        at(&volume.subpath("app", 1, "folder"), "/etc/folder")?,
    ];
    let side_mounts = [at(
        &volume.subpath("side", 0, "app.conf"),
        "/etc/app/app.conf",
    )?];
    let other_mounts = [at(
        &other_volume.subpath("app", 0, "app.conf"),
        "/etc/app/app.conf",
    )?];
    let sandbox =
        cri.run_annotated_pod("runc", "in", pod.uid(), &[("bindguard.io/refresh", "app")])?;
    let out = cri.run_pod("runc", "out", other.uid())?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let side = cri.start_container(&sandbox, "side", &SLEEP, &side_mounts)?;
    let old = cri.start_container(&out, "app", &SLEEP, &other_mounts)?;
    let table = mounts_of(&cri, &app)?;

    for text in ["two", "three"] {
        volume.update(&payload(text))?;
        other_volume.update(&payload(text))?;
        until("the container reads the new file", || {
            Ok(cri.read(&app, "/etc/app/app.conf")? == text)
        })?;
        until("the container reads the new folder", || {
            Ok(cri.read(&app, "/etc/folder/key")? == text)
        })?;
    }
    ensure!(
        cri.read(&side, "/etc/app/app.conf")? == "one",
        "a container that is not named was entered"
    );
    ensure!(
        cri.read(&old, "/etc/app/app.conf")? == "one",
        "a pod without the annotation was entered"
    );
    let now = mounts_of(&cri, &app)?;
    ensure!(now == table, "the mounts changed:\n{table:#?}\n{now:#?}");
    // Both mounts. A refresh may serve both updates of a mount, and counts once.
    until("refreshes are counted", || {
        Ok(agent.figure(REFRESHED) >= before + 2.0)
    })?;
    for (sandbox, uid) in [(&sandbox, "uid-in"), (&out, "uid-out")] {
        cri.remove_pod(sandbox)?;
        delete_pod(node, uid)?;
    }
    Ok(())
}

/// Each mount point with its options, without the root.
fn mounts_of(cri: &Cri, id: &str) -> Result<Vec<(String, String)>> {
    let path = format!("/proc/{}/mountinfo", cri.pid(id)?);
    let table = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let fields = table
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let mut mounts: Vec<_> = fields
        .map(|fields| (fields[4].to_owned(), fields[5].to_owned()))
        .collect();
    mounts.sort();
    Ok(mounts)
}

/// The program reads its file again only when it gets the signal, as nginx does.
fn a_signal_follows_the_new_file(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-signal")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let mounts = [at(&volume.subpath("app", 0, "app.conf"), "/etc/app.conf")?];
    let annotations = [
        ("bindguard.io/refresh", "true"),
        ("bindguard.io/refresh-notify", "signal:SIGHUP"),
    ];
    let sandbox = cri.run_annotated_pod("runc", "signal", pod.uid(), &annotations)?;
    let program =
        "trap 'echo got $(cat /etc/app.conf)' HUP; echo started; while :; do sleep 0.1; done";
    let app = cri.start_container(&sandbox, "app", &["sh", "-c", program], &mounts)?;
    until("the program runs", || {
        Ok(cri.logs(&app)?.contains("started"))
    })?;
    for text in ["two", "three"] {
        volume.update(&[("app.conf", text)])?;
        until("the program read the new file", || {
            Ok(cri.logs(&app)?.contains(&format!("got {text}")))
        })
        .with_context(|| format!("the program's log: {:?}", cri.logs(&app)))?;
    }
    let log = cri.logs(&app)?;
    ensure!(
        log.matches("got ").count() == 2,
        "not one signal for each update: {log}"
    );
    refreshes_are_journaled(node, &app)?;
    cri.remove_pod(&sandbox)?;
    delete_pod(node, "uid-signal")
}

/// The init would end by the signal.
fn a_signal_reaches_a_program_that_is_not_the_init(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-program")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let mounts = [at(&volume.subpath("app", 0, "app.conf"), "/etc/app.conf")?];
    let start = |name: &str, program: &str| -> Result<_> {
        let notify = format!("signal:SIGUSR2@{program}");
        let annotations = [
            ("bindguard.io/refresh", "true"),
            ("bindguard.io/refresh-notify", &notify),
        ];
        let sandbox = cri.run_annotated_pod("runc", name, pod.uid(), &annotations)?;
        let server =
            "trap 'echo got $(cat /etc/app.conf)' USR2; echo started; while :; do sleep 0.1; done";
        let init = format!(
            "cp /bin/busybox /tmp/busybox-server; /tmp/busybox-server sh -c \"{server}\"; echo ended",
        );
        let init = init.replace("$(cat", "\\$(cat");
        let app = cri.start_container(&sandbox, "app", &["sh", "-c", &init], &mounts)?;
        until("the program runs", || {
            Ok(cri.logs(&app)?.contains("started"))
        })?;
        Ok((sandbox, app))
    };
    let (sandbox, app) = start("program", "busybox-server")?;
    volume.update(&[("app.conf", "two")])?;
    until("the program read the new file", || {
        Ok(cri.logs(&app)?.contains("got two"))
    })?;
    cri.remove_pod(&sandbox)?;

    let (sandbox, app) = start("missing", "nginx")?;
    volume.update(&[("app.conf", "three")])?;
    until("the missing program is journaled", || {
        let lines = journal::lines(JOURNAL)?.into_iter();
        let mut of_app =
            lines.filter(|line| line["kind"] == "refresh" && line["id"] == app.as_str());
        let error = "no process of the container runs \"nginx\"";
        Ok(of_app.any(|line| line["notification"]["error"] == error))
    })?;
    ensure!(cri.read(&app, "/etc/app.conf")? == "three");
    ensure!(
        !cri.logs(&app)?.contains("ended"),
        "the signal went elsewhere"
    );
    cri.remove_pod(&sandbox)?;
    delete_pod(node, "uid-program")
}

/// A line for each update, with the names of the pod, the file and the signal.
fn refreshes_are_journaled(node: &Node, id: &str) -> Result<()> {
    let of_container = || -> Result<Vec<Value>> {
        let is_of_it = |line: &Value| line["kind"] == "refresh" && line["id"] == id;
        Ok(journal::lines(JOURNAL)?
            .into_iter()
            .filter(is_of_it)
            .collect())
    };
    until("both refreshes are journaled", || {
        Ok(of_container()?.len() == 2)
    })?;
    for line in of_container()? {
        let (container, mount) = (&line["container"], &line["mounts"][0]);
        ensure!(
            line["by"] == "agent"
                && container["pod"] == "signal"
                && container["uid"] == "uid-signal",
            "{line}"
        );
        ensure!(
            mount["destination"] == "/etc/app.conf" && mount["outcome"]["result"] == "replaced",
            "{line}"
        );
        ensure!(
            line["notification"] == json!({ "request": "signal:SIGHUP" }),
            "{line}"
        );
    }
    let shown = node.bindguard(["journal", "--pod", "default/signal"])?;
    for words in [
        "refreshed while it runs, by the agent",
        "replaced   /etc/app.conf",
        "notified   signal:SIGHUP",
    ] {
        ensure!(
            shown.code() == 0 && shown.stdout.matches(words).count() == 2,
            "no {words:?} in {shown:?}"
        );
    }
    ensure!(
        shown
            .stdout
            .contains("default/signal (volume conf on the host, by the agent)"),
        "{shown:?}"
    );
    Ok(())
}

fn three_readers_never_see_anything_bad(node: &Node, agent: &Agent, updates: u32) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-fast")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "0")])?;
    let mounts = [at(&volume.subpath("app", 0, "app.conf"), "/etc/app.conf")?];
    let sandbox = cri.run_annotated_pod(
        "runc",
        "fast",
        pod.uid(),
        &[("bindguard.io/refresh", "true")],
    )?;
    let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
    let pid = cri.pid(&app)?;
    let table = mounts_of(&cri, &app)?;
    let readers = [(); 3].map(|()| PollingReader::start(format!("/proc/{pid}/root/etc/app.conf")));
    for number in 1..=updates {
        // A file of the old payload may be a mount point for a moment: the real kubelet logs that,
        // and goes on.
        if let Err(error) = volume.update(&[("app.conf", &number.to_string())]) {
            ensure!(format!("{error:#}").contains("busy"), "{error:#}");
        }
    }
    until("the last content arrives", || {
        Ok(cri.read(&app, "/etc/app.conf")? == updates.to_string())
    })?;
    for reader in readers {
        let seen = reader.stop();
        ensure!(
            seen.empty == 0 && seen.failed == 0 && seen.reads > 100,
            "{seen:?}"
        );
    }
    ensure!(mounts_of(&cri, &app)? == table, "mounts were left behind");
    let refreshes = |outcome| {
        agent.figure(&format!(
            "bindguard_refreshes_total{{outcome=\"{outcome}\"}}"
        ))
    };
    let (failed, replaced) = (refreshes("failed"), refreshes("replaced"));
    ensure!(
        failed == 0.0,
        "{failed} of {replaced} refreshes failed: {:?}",
        failures(&app)?
    );
    cri.remove_pod(&sandbox)?;
    delete_pod(node, "uid-fast")
}

/// The failed refreshes of a container's mounts, and the reasons why a refresh of any container was
/// skipped.
fn failures(id: &str) -> Result<Vec<Value>> {
    let refreshes = journal::lines(JOURNAL)?
        .into_iter()
        .filter(|line| line["kind"] == "refresh");
    Ok(refreshes
        .flat_map(|line| {
            let list = |name: &str| line[name].as_array().cloned().unwrap_or_default();
            let of_container = list("mounts").into_iter().filter(|_| line["id"] == id);
            let failed = of_container.filter(|mount| mount["outcome"]["result"] == "failed");
            failed.chain(list("problems")).collect::<Vec<_>>()
        })
        .collect())
}
