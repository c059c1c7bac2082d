//! A support bundle from a node without a login: its mountinfo and a copy of its files give the
//! same result as the node's own `diagnose` says, in text, in JSON, and as kubediag's processors
//! would.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use bindguard_integration::process::{Finished, host};
use bindguard_integration::{Generation, Node, Setup, VolumeKind};
use serde_json::Value;

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

    let root = node.disk().join("bundle");
    let mountinfo = root.join("mountinfo.txt");
    copy(node, &root, &mountinfo)?;
    let words = |more: &[&str]| -> Result<_> {
        let from = [
            "--mountinfo",
            &mountinfo.to_string_lossy(),
            "--root",
            &root.to_string_lossy(),
        ]
        .map(str::to_owned);
        let more = more.iter().map(|word| (*word).to_owned());
        node.bindguard(["diagnose".to_owned()].into_iter().chain(from).chain(more))
    };
    let live = node.bindguard(["diagnose", "--all", "--json"])?;
    let afar = words(&["--all", "--json"])?;
    ensure!((live.code(), afar.code()) == (1, 1), "{live:?}\n{afar:?}");
    ensure!(
        verdicts(&live.stdout)? == verdicts(&afar.stdout)?,
        "the node: {live:?}\nthe bundle: {afar:?}"
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

fn copy(node: &Node, root: &Path, mountinfo: &Path) -> Result<()> {
    let kubelet = node.kubelet().root();
    let to = root.join(kubelet.strip_prefix("/")?);
    fs::create_dir_all(to.parent().context("a parent")?)?;
    host([
        "cp".as_ref(),
        "-a".as_ref(),
        kubelet.as_os_str(),
        to.as_os_str(),
    ])?;
    fs::copy("/proc/thread-self/mountinfo", mountinfo)
        .map(drop)
        .context("copy the mountinfo")
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

/// An incomplete bundle is reported as such, and never as healthy.
fn is_incomplete(node: &Node, root: &Path, mountinfo: &Path) -> Result<()> {
    let whole = fs::read(mountinfo)?;
    let cut = root.join("cut.txt");
    let nowhere = root.join("nowhere");
    let in_a_line = 10
        + whole[..whole.len() / 2]
            .iter()
            .rposition(|byte| *byte == b'\n')
            .context("find a line")?;
    fs::write(&cut, &whole[..in_a_line])?;
    let all_but_the_end = root.join("all-but-the-end.txt");
    fs::write(&all_but_the_end, &whole[..whole.len() - 3])?;
    for (file, folder, said) in [
        (cut.as_path(), root, "take it again, whole"),
        (&all_but_the_end, root, "take it again, whole"),
        (&nowhere, root, "read "),
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
