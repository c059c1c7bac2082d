//! `bindguard diagnose` shows which running containers read old files (kubernetes#50345), and
//! whether they opted in to live refresh. `diagnose` enters no container and changes nothing.

use bindguard_integration::prelude::*;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

fn story(generation: Generation) {
    Setup::on(generation).cri().story(|node| {
        // The host's subpaths become current; no container is refreshed.
        let _agent = Agent::start(node, "refresh.mode = 'off'\n")?;
        let cri = node.cri()?;
        let inside = ReaderPod::run(node, &cri, "in", &[("bindguard.io/refresh", "app")])?;
        let outside = ReaderPod::run(node, &cri, "out", &[])?;
        let fresh = diagnose(node, &[], 0)?;
        ensure!(fresh.get("old_files").is_none(), "{fresh}");

        inside.update("two")?;
        outside.update("two")?;
        opted_in_is_a_finding(node, &inside)?;
        not_opted_in_is_listed(node, &outside)?;
        let all = diagnose(node, &[], 1)?;
        ensure!(
            all["old_files"]
                .as_array()
                .is_some_and(|old| old.len() == 2),
            "{all}"
        );
        let status = node.bindguard(["status", "--json"])?;
        let status: Value = serde_json::from_str(&status.stdout)?;
        ensure!(
            status["old_files"] == json!({ "containers": 2, "opted_in": 1 }),
            "{status}"
        );
        ensure!(
            cri.read(&inside.container, "/etc/app/app.conf")? == "one",
            "diagnose changed something"
        );

        node.bindguard(["refresh", "--pod", "default/in"])?
            .success()?;
        ensure!(cri.read(&inside.container, "/etc/app/app.conf")? == "two");
        let done = diagnose(node, &["--pod", "default/in"], 0)?;
        ensure!(done.get("old_files").is_none(), "{done}");
        every_pod_is_opted_in_by_the_config(node)?;
        [inside, outside]
            .into_iter()
            .try_for_each(|pod| pod.remove(node, &cri))
    });
}

on_newest_and_older!(story);

fn opted_in_is_a_finding(node: &Node, pod: &ReaderPod) -> Result<()> {
    let report = diagnose(node, &["--pod", "default/in"], 1)?;
    let old = report["old_files"].get(0).context("no old file")?;
    ensure!(
        old["opted_in"] == true && old["container"]["id"] == pod.container.as_str(),
        "{report}"
    );
    ensure!(
        old["files"][0]["destination"] == "/etc/app/app.conf",
        "{report}"
    );
    let source = old["files"][0]["source"].as_str().context("a source")?;
    ensure!(source.ends_with("/conf/app.conf"), "{report}");
    let text = node.bindguard(["diagnose", "--pod", "default/in"])?;
    for words in [
        "it opted in to live refresh",
        "/etc/app/app.conf",
        "run: bindguard refresh --pod default/in",
    ] {
        ensure!(
            text.code() == 1 && text.stdout.contains(words),
            "no {words:?} in {text:?}"
        );
    }
    Ok(())
}

fn not_opted_in_is_listed(node: &Node, pod: &ReaderPod) -> Result<()> {
    let report = diagnose(node, &["--pod", "default/out"], 0)?;
    let old = report["old_files"].get(0).context("no old file")?;
    ensure!(
        old["opted_in"] == false && old["container"]["id"] == pod.container.as_str(),
        "{report}"
    );
    let text = node.bindguard(["diagnose", "--pod", "default/out"])?;
    ensure!(
        text.code() == 0 && text.stdout.contains("it did not opt in to live refresh"),
        "{text:?}"
    );
    Ok(())
}

/// With `[refresh] mode = "all"` no annotation is needed.
fn every_pod_is_opted_in_by_the_config(node: &Node) -> Result<()> {
    let file = node.disk().join("all.toml");
    fs::write(
        &file,
        format!(
            "kubelet.roots = ['{}']\nrefresh.mode = 'all'\n",
            node.kubelet().root().display()
        ),
    )?;
    let config = ["--config".to_owned(), file.display().to_string()];
    let words: Vec<&str> = config
        .iter()
        .map(String::as_str)
        .chain(["--pod", "default/out"])
        .collect();
    let report = diagnose(node, &words, 1)?;
    ensure!(report["old_files"][0]["opted_in"] == true, "{report}");
    Ok(())
}

fn diagnose(node: &Node, words: &[&str], code: i32) -> Result<Value> {
    let done = node.bindguard([&["diagnose", "--json"], words].concat())?;
    ensure!(done.code() == code, "{done:?}");
    serde_json::from_str(&done.stdout).with_context(|| format!("read {}", done.stdout))
}

/// A pod with a container that reads a subPath.
struct ReaderPod {
    uid: String,
    sandbox: Sandbox,
    container: String,
    volume: Volume,
}

impl ReaderPod {
    fn run(node: &Node, cri: &Cri, name: &str, annotations: &[(&str, &str)]) -> Result<Self> {
        let pod = node.kubelet().pod(&format!("uid-{name}"))?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let subpath = volume.subpath("app", 0, "app.conf");
        let mounts = [mount(
            subpath.bind()?,
            "/etc/app/app.conf",
            PropagationPrivate,
        )];
        let sandbox = cri.run_annotated_pod("runc", name, pod.uid(), annotations)?;
        let container = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        Ok(Self {
            uid: pod.uid().to_owned(),
            sandbox,
            container,
            volume,
        })
    }

    /// Waits until the agent re-bound the host's subpath.
    fn update(&self, content: &str) -> Result<()> {
        self.volume.update(&[("app.conf", content)])?;
        let subpath = self.volume.subpath("app", 0, "app.conf");
        until("the host's subpath is current", || {
            Ok(only_a_current_mount(&subpath).is_ok())
        })
    }

    fn remove(self, node: &Node, cri: &Cri) -> Result<()> {
        cri.remove_pod(&self.sandbox)?;
        until("the kubelet deletes the pod", || {
            Ok(node.kubelet().pod(&self.uid)?.delete().is_ok())
        })
    }
}
