//! A debug pod on a node without a login: the node's mountinfo and its root directory give the
//! verdicts of the node's own `diagnose`, in JSON and as kubediag's processors print.

use bindguard_integration::prelude::*;
use std::collections::BTreeMap;

#[test]
fn as_on_the_node() {
    Setup::on(Generation::V1_7).story(story);
}

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("afar")?;
    let stale = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let fresh = pod.volume(VolumeKind::ConfigMap, "calm", &[("app.conf", "one")])?;
    let secret = pod.volume(VolumeKind::Secret, "keys", &[("key", "one")])?;
    let gone = pod.volume(
        VolumeKind::ConfigMap,
        "gone",
        &[("app.conf", "one"), ("b", "")],
    )?;
    for (volume, index) in [(&stale, 0), (&fresh, 1), (&gone, 3)] {
        volume.subpath("app", index, "app.conf").bind()?;
    }
    secret.subpath("app", 2, "key").bind()?;
    stale.update(&[("app.conf", "two")])?;
    secret.update(&[("key", "two")])?;
    gone.update(&[("b", "")])?;

    let root = node.disk().join("host");
    let mountinfo = node.disk().join("mountinfo.txt");
    fs::create_dir(&root)?;
    fs::copy("/proc/thread-self/mountinfo", &mountinfo).context("copy the mountinfo")?;
    let words = |more: &[&str]| -> Result<_> {
        // The volume of a debug pod: a private copy of all mounts of the node.
        let mut pod = node.command("unshare")?;
        pod.args(["--mount", "sh", "-c"])
            .arg("mount --rbind / \"$1\" && exec \"$0\" diagnose --root \"$@\"")
            .arg(node.under_test().join("bindguard"))
            .args([root.as_path(), Path::new("--mountinfo"), &mountinfo])
            .args(more);
        run(pod)
    };
    let live = node.bindguard(["diagnose", "--all", "--json"])?;
    let afar = words(&["--all", "--json"])?;
    ensure!((live.code(), afar.code()) == (1, 1), "{live:?}\n{afar:?}");
    ensure!(
        verdicts(&live.stdout)? == verdicts(&afar.stdout)?,
        "the node: {live:?}\nthe debug pod: {afar:?}"
    );
    ensure!(
        verdicts(&live.stdout)?
            .iter()
            .map(|(_, verdict)| verdict.as_str())
            .collect::<Vec<_>>()
            == [
                "current", "stale", "orphaned", "stale", "current", "current", "current", "current"
            ],
        "{live:?}"
    );
    for report in [
        node.bindguard(["diagnose", "--format", "kubediag"])?,
        words(&["--format", "kubediag"])?,
    ] {
        speaks_as_kubediag(&report, &fs::read_to_string(&mountinfo)?)?;
    }
    is_incomplete(node, &root, &mountinfo)?;
    pod.delete()
}

fn verdicts(report: &str) -> Result<Vec<(String, String)>> {
    let report: Value = serde_json::from_str(report).with_context(|| format!("parse {report}"))?;
    let word = |bind: &Value, key: &str| bind[key].as_str().unwrap_or_default().to_owned();
    let binds = report["binds"].as_array().context("binds")?;
    Ok(binds
        .iter()
        .map(|bind| (word(bind, "source"), word(bind, "verdict")))
        .collect())
}

/// A single object of strings: kubediag's agent accepts only one object, and the recoverer only one
/// path.
fn speaks_as_kubediag(report: &Finished, mountinfo: &str) -> Result<()> {
    let keys: BTreeMap<String, String> =
        serde_json::from_str(&report.stdout).with_context(|| format!("parse {report:?}"))?;
    ensure!(
        keys.get("collector.system.mountinfo")
            .is_some_and(|ended| ended == mountinfo),
        "another mountinfo"
    );
    let key = |name: &str| {
        keys.get(&format!("diagnoser.kubernetes.subpath_remount.{name}"))
            .map_or("", String::as_str)
    };
    ensure!(
        keys.len() == 5
            && key("bug_link") == "https://github.com/kubernetes/kubernetes/issues/68211",
        "{keys:?}"
    );
    ensure!(
        key("original_source_path").ends_with("//deleted") && key("result").contains("68211"),
        "{keys:?}"
    );
    ensure!(mountinfo.contains(&format!(
        " {} {} ",
        key("original_source_path"),
        key("original_destination_path")
    )));
    ensure!(
        report.stderr.contains("2 more subpaths are stale"),
        "{}",
        report.stderr
    );
    Ok(())
}

/// An incomplete mount table is reported as such, and never as healthy.
fn is_incomplete(node: &Node, root: &Path, mountinfo: &Path) -> Result<()> {
    let whole = fs::read(mountinfo)?;
    let nowhere = root.join("nowhere");
    let all_but_the_end = node.disk().join("all-but-the-end.txt");
    fs::write(&all_but_the_end, &whole[..whole.len() - 3])?;
    for (file, folder, said) in [
        (all_but_the_end.as_path(), root, "take it again, whole"),
        (mountinfo, &nowhere, "No such file or directory"),
        (mountinfo, mountinfo, "is no folder"),
    ] {
        let words = [
            "diagnose".as_ref(),
            "--mountinfo".as_ref(),
            file.as_os_str(),
            "--root".as_ref(),
            folder.as_os_str(),
        ];
        let ended = node.bindguard(words)?;
        let one_line = ended.stderr.lines().count() == 1;
        ensure!(
            ended.code() == 2 && one_line && ended.stderr.contains(said),
            "{words:?}: {ended:?}"
        );
    }
    Ok(())
}
