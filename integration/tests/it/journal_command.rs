//! `bindguard journal` prints admissions by time, by pod, through a rotation, and while a guard is
//! writing. Also the effective config and the manual.

use bindguard_integration::prelude::*;
use std::fs::OpenOptions;
use std::io::Write;

use bindguard_integration::bundle::Bundle;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const JOURNAL: &str = "/run/bindguard/journal.jsonl";

#[test]
fn journal() {
    Setup::on(Generation::V1_7).story(|node| {
        read_the_journal(node)?;
        read_the_config(node)?;
        generated(node)
    });
}

/// The stock shim writes no line, so only the agent's lines have the names of the pod.
#[test]
fn the_agents_rebinds_have_the_names_of_their_pod() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let (cri, pod) = (node.cri()?, node.kubelet().pod("uid-web")?);
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let mounts = [mount(
            volume.subpath("app", 0, "app.conf").bind()?,
            "/etc/app.conf",
            PropagationPrivate,
        )];
        let sandbox = cri.run_pod("runc", "web", pod.uid())?;
        cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        let _agent = Agent::start(node, "")?;
        volume.update(&[("app.conf", "two")])?;
        let mut rebinds = Value::Null;
        until("the re-bind is journaled", || {
            let report: Value =
                serde_json::from_str(&node.bindguard(["journal", "--json"])?.stdout)?;
            rebinds = report["rebinds"].clone();
            Ok(rebinds.is_array())
        })?;
        let names = json!({ "pod": "web", "namespace": "default", "uid": pod.uid() });
        ensure!(rebinds[0]["container"] == names, "{rebinds}");
        let text = node.bindguard(["journal", "--pod", "default/web"])?.stdout;
        ensure!(
            text.contains("default/web (volume conf on the host, by the agent)"),
            "{text}"
        );
        let log = fs::read_to_string(node.disk().join("agent.log"))?;
        let line = log
            .lines()
            .find(|line| line.contains(" INFO pod default/web: "))
            .with_context(|| format!("no line names the pod: {log}"))?;
        ensure!(line.starts_with("20") && line.contains("Z "), "{line}");
        cri.remove_pod(&sandbox)?;
        until("the kubelet deletes the pod", || {
            Ok(node.kubelet().pod("uid-web")?.delete().is_ok())
        })
    });
}

fn read_the_journal(node: &Node) -> Result<()> {
    let empty = node.bindguard(["journal"])?;
    ensure!(
        empty.code() == 0 && empty.stdout.starts_with("0 creates"),
        "{empty:?}"
    );
    admit(node, "web", false)?;
    admit(node, "shop", true)?;
    fs::rename(JOURNAL, format!("{JOURNAL}.1"))?;
    admit(node, "late", false)?;
    let mut half = OpenOptions::new().append(true).open(JOURNAL)?;
    half.write_all(br#"{"time":"2026-11-21T05:10:00Z","binds":["#)?;

    let all = node.bindguard(["journal"])?;
    let order: Vec<usize> = ["default/web", "default/shop", "default/late"]
        .map(|pod| all.stdout.find(pod).unwrap_or(usize::MAX))
        .to_vec();
    ensure!(
        all.code() == 1 && order.is_sorted() && order[2] != usize::MAX,
        "{all:?}"
    );
    ensure!(
        all.stdout.contains("re-bound")
            && all.stdout.contains("3 creates, 3 with findings, 1 of them"),
        "{all:?}"
    );
    for (words, count, code) in [
        (&["--pod", "shop"][..], 1, 1),
        (&["--pod", "default/web"], 1, 0),
        (&["--pod", "uid-late"], 1, 0),
        (&["--since", "1h"], 3, 1),
        (&["--since", "2099-01-01T00:00:00Z"], 0, 0),
    ] {
        let ended = node.bindguard([&["journal", "--json"], words].concat())?;
        let report: Value = serde_json::from_str(&ended.stdout)?;
        let admissions = report["admissions"].as_array().context("admissions")?;
        ensure!(
            admissions.len() == count && ended.code() == code,
            "{words:?}: {ended:?}"
        );
    }
    half.write_all(b"\n")?;
    let strange = node.bindguard(["journal"])?;
    ensure!(
        strange.code() == 2 && strange.stdout.contains("is no line of a journal"),
        "{strange:?}"
    );
    for (words, said) in [
        (&["journal", "--file", "/etc/passwd"][..], "is no journal"),
        (&["journal", "--file", "/nowhere"], "no such file"),
        (&["journal", "--since", "soon"], "neither a time"),
    ] {
        let ended = node.bindguard(words)?;
        ensure!(
            ended.code() == 2 && ended.stderr.contains(said) && ended.stderr.lines().count() == 1,
            "{ended:?}"
        );
    }
    Ok(())
}

/// A create of a pod's container on a stale subpath, whose key is gone or not.
fn admit(node: &Node, name: &str, is_gone: bool) -> Result<()> {
    let pod = node.kubelet().pod(&format!("uid-{name}"))?;
    let volume = pod.volume(
        VolumeKind::ConfigMap,
        "conf",
        &[("app.conf", "one"), ("b", "")],
    )?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mut spec = Bundle::spec(&[Bundle::bind(subpath.bind()?, "/etc/app.conf")]);
    spec["annotations"] = serde_json::json!({
        "io.kubernetes.cri.container-name": "app",
        "io.kubernetes.cri.sandbox-name": name,
        "io.kubernetes.cri.sandbox-namespace": "default",
        "io.kubernetes.cri.sandbox-uid": pod.uid(),
    });
    volume.update(if is_gone {
        &[("b", "")]
    } else {
        &[("app.conf", "two"), ("b", "")]
    })?;
    let bundle = Bundle::create(node, name, spec.to_string().as_bytes())?;
    run(bundle.admit(node)?)?.success()?;
    pod.delete()
}

fn read_the_config(node: &Node) -> Result<()> {
    let shown = node.bindguard(["config", "show", "--json"])?;
    let keys: Vec<Value> = serde_json::from_str(&shown.stdout)?;
    let of = |name: &str| {
        keys.iter()
            .find(|key| key["key"] == name)
            .with_context(|| format!("{name} in {keys:?}"))
    };
    ensure!(of("kubelet.roots")?["value"][0] == node.kubelet().root().to_string_lossy().as_ref());
    ensure!(
        of("kubelet.roots")?["origin"]
            .as_str()
            .is_some_and(|path| path.ends_with("bindguard.toml"))
    );
    ensure!(
        of("guard.deadline-ms")?["value"] == 2000
            && of("guard.deadline-ms")?["origin"] == "default"
    );
    let text = node.bindguard(["config", "show"])?.success()?;
    ensure!(
        text.contains("runtime.path") && text.contains("= \"runc\"  # default"),
        "{text}"
    );
    for file in ["/etc/passwd", "/nowhere.toml"] {
        let ended = node.bindguard(["config", "show", "--config", file])?;
        ensure!(
            ended.code() == 2 && ended.stdout.is_empty() && ended.stderr.contains(file),
            "{ended:?}"
        );
    }
    Ok(())
}

/// Completions and pages are made, and the shell and man(7)'s macros have nothing to say against
/// them.
fn generated(node: &Node) -> Result<()> {
    for (shell, has) in [
        ("bash", "_bindguard()"),
        ("zsh", "#compdef bindguard"),
        ("fish", "complete -c bindguard"),
    ] {
        let script = node.bindguard(["completions", shell])?.success()?;
        ensure!(
            script.contains(has) && script.contains("diagnose"),
            "{shell}: {script}"
        );
        if shell == "bash" {
            let file = node.disk().join("completions.bash");
            fs::write(&file, script)?;
            let mut bash = node.command("bash")?;
            bash.args(["-ec", "source \"$1\"; complete -p bindguard", "bash"])
                .arg(&file);
            ensure!(run(bash)?.success()?.contains("-F _bindguard"));
        }
    }
    let folder = node.disk().join("man");
    node.bindguard(["man".as_ref(), "--dir".as_ref(), folder.as_os_str()])?
        .success()?;
    for page in [
        "bindguard.1",
        "bindguard-diagnose.1",
        "bindguard-repair.1",
        "bindguard-config-show.1",
    ] {
        let text = fs::read_to_string(folder.join(page)).with_context(|| format!("read {page}"))?;
        ensure!(
            text.contains(".TH bindguard") && text.contains(".SH"),
            "{page}: {text}"
        );
    }
    ensure!(node.bindguard(["man"])?.success()?.contains(".SH NAME"));
    let nowhere = node.bindguard(["man", "--dir", "/proc/nowhere"])?;
    ensure!(
        nowhere.code() == 2 && nowhere.stderr.contains("/proc/nowhere"),
        "{nowhere:?}"
    );
    ensure!(!Path::new("/proc/nowhere").exists());
    Ok(())
}
