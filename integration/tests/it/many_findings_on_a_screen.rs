//! A node with 275 stale subPaths: an operator reads `diagnose` on terminals of 80 and 200 columns,
//! through a pipe, without colours, as YAML, of one namespace, and while the faults are repaired.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use bindguard_integration::process::{Finished, run, run_on_a_terminal};
use bindguard_integration::{Generation, Node, Setup, VolumeKind};
use serde_json::{Value, json};

const PODS: usize = 55;
const SUBPATHS: u32 = 5;
/// The folder of containerd's bundles, which have the names of their pods.
const BUNDLES: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io";

#[test]
fn a_person_reads_them() {
    Setup::on(Generation::V1_7).story(|node| {
        let pods = many_stale_subpaths(node)?;
        on_terminals(node)?;
        in_a_pipe(node)?;
        of_one_namespace(node)?;
        in_other_formats(node)?;
        unknown_names(node)?;
        watched_and_followed(node)?;
        for pod in pods {
            pod.delete()?;
        }
        Ok(())
    });
}

fn name(number: usize) -> (&'static str, String) {
    let namespace = if number < 10 { "shop" } else { "default" };
    (namespace, format!("web-5d8f7c9b5-{number:03}"))
}

fn many_stale_subpaths(node: &Node) -> Result<Vec<bindguard_integration::kubelet::Pod>> {
    let mut pods = Vec::new();
    for number in 0..PODS {
        let uid = format!("uid-{number:03}");
        let pod = node.kubelet().pod(&uid)?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        for index in 0..SUBPATHS {
            volume.subpath("app", index, "app.conf").bind()?;
        }
        volume.update(&[("app.conf", "two")])?;
        let (namespace, name) = name(number);
        let bundle = Path::new(BUNDLES).join(&uid);
        fs::create_dir_all(&bundle)?;
        // of the pod's sandbox: its container does not run
        let annotations = json!({
            "io.kubernetes.cri.sandbox-name": name,
            "io.kubernetes.cri.sandbox-namespace": namespace,
            "io.kubernetes.cri.sandbox-uid": uid,
        });
        let spec = json!({ "ociVersion": "1.0.2", "annotations": annotations });
        fs::write(bundle.join("config.json"), spec.to_string())?;
        pods.push(pod);
    }
    Ok(pods)
}

/// `diagnose` on a terminal of this width.
fn on_terminal(node: &Node, columns: usize, environment: &str, words: &str) -> Result<Finished> {
    let config = node.disk().join("bindguard.toml");
    let script = format!(
        "stty rows 50 cols {columns}; exec env -u NO_COLOR TERM=xterm BINDGUARD_CONFIG={} {environment} {} {words} 2>/dev/null",
        config.display(),
        node.programs().join("bindguard").display(),
    );
    let mut command = node.command("sh")?;
    command.args(["-c", &script]);
    run_on_a_terminal(&command)
}

fn without_colours(text: &str) -> String {
    let mut plain = String::new();
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        plain.push_str(part.split_once('m').map_or("", |(_, rest)| rest));
    }
    plain.replace('\r', "")
}

fn on_terminals(node: &Node) -> Result<()> {
    for columns in [80, 200] {
        let seen = on_terminal(node, columns, "", "diagnose")?;
        ensure!(
            seen.code() == 1 && seen.stdout.contains("\u{1b}["),
            "{seen:?}"
        );
        let text = without_colours(&seen.stdout);
        let lines: Vec<&str> = text.lines().collect();
        ensure!(lines.len() <= 150, "{} lines: {text}", lines.len());
        let rows = lines.iter().filter(|line| line.starts_with("stale "));
        ensure!(rows.clone().count() == PODS, "{text}");
        for line in &lines {
            ensure!(line.chars().count() <= columns, "{columns}: {line}");
        }
        for row in rows {
            ensure!(
                row.contains(" repair ") && row.contains("/web-5d8f7c9b5-"),
                "{row}"
            );
        }
        ensure!(
            text.contains("275 checked, 275 with findings") || text.contains("275 with findings"),
            "{text}"
        );
        ensure!(text.contains("run: bindguard repair --all\n"), "{text}");
        ensure!(!text.contains("running container"), "{text}");
    }
    let plain = on_terminal(node, 80, "NO_COLOR=1", "diagnose")?;
    ensure!(!plain.stdout.contains('\u{1b}'), "{plain:?}");
    let forced = on_terminal(node, 80, "NO_COLOR=1", "diagnose --color always")?;
    ensure!(forced.stdout.contains('\u{1b}'), "{forced:?}");
    let never = on_terminal(node, 80, "", "diagnose --color never")?;
    ensure!(!never.stdout.contains('\u{1b}'), "{never:?}");
    if let Some(folder) = std::env::var_os("BINDGUARD_SCREENS") {
        for (file, seen) in [
            ("80", on_terminal(node, 80, "", "diagnose")?),
            ("200", on_terminal(node, 200, "", "diagnose")?),
            (
                "v",
                on_terminal(node, 80, "", "diagnose -v pod/web-5d8f7c9b5-003")?,
            ),
            ("help", on_terminal(node, 80, "", "--help")?),
        ] {
            fs::write(Path::new(&folder).join(file), seen.stdout)?;
        }
    }
    Ok(())
}

/// A script gets every column whole.
fn in_a_pipe(node: &Node) -> Result<()> {
    let seen = node.bindguard(["diagnose"])?;
    let row = seen.stdout.lines().nth(1).context("a row")?;
    ensure!(
        seen.code() == 1 && !seen.stdout.contains(['\u{1b}', '…']),
        "{seen:?}"
    );
    ensure!(
        row.contains("  default/web-5d8f7c9b5-010  app        conf/0 conf/1 conf/2 +2  the file it was bound from is deleted"),
        "{row}"
    );
    let quiet = node.bindguard(["diagnose", "--quiet"])?;
    ensure!(quiet.code() == 1 && quiet.stdout.is_empty(), "{quiet:?}");
    let detailed = node.bindguard(["diagnose", "--verbose"])?;
    ensure!(
        detailed.stdout.matches("run: bindguard repair /").count() == PODS * SUBPATHS as usize,
        "{detailed:?}"
    );
    ensure!(
        !detailed.stdout.contains("the running container"),
        "{detailed:?}"
    );
    Ok(())
}

fn of_one_namespace(node: &Node) -> Result<()> {
    let of = |words: &[&str]| node.bindguard([&["diagnose"], words].concat());
    let shop = of(&["-n", "shop"])?;
    ensure!(
        shop.stdout.matches("shop/web-").count() == 10 && !shop.stdout.contains("default/"),
        "{shop:?}"
    );
    ensure!(
        shop.stdout
            .contains("run: bindguard repair --namespace shop\n"),
        "{shop:?}"
    );
    let one = of(&["pod/web-5d8f7c9b5-003", "-n", "shop"])?;
    ensure!(one.stdout.contains("5 with findings"), "{one:?}");
    let all = of(&["-A"])?;
    ensure!(all.stdout.contains("275 with findings"), "{all:?}");
    let repaired = node.bindguard(["repair", "pod/web-5d8f7c9b5-003", "-n", "shop"])?;
    ensure!(
        repaired.code() == 0 && repaired.stdout.contains("5 of them repaired"),
        "{repaired:?}"
    );
    ensure!(of(&["pod/web-5d8f7c9b5-003"])?.code() == 0);
    let journal = node.bindguard(["journal", "--pod", "uid-003", "-n", "1"])?;
    ensure!(
        journal.stdout.contains("volume conf on the host"),
        "{journal:?}"
    );
    Ok(())
}

fn in_other_formats(node: &Node) -> Result<()> {
    let json = node.bindguard(["diagnose", "-n", "shop", "-o", "json"])?;
    let report: Value = serde_json::from_str(&json.stdout)?;
    ensure!(
        report["binds"].as_array().map(Vec::len) == Some(45),
        "{json:?}"
    );
    let yaml = node.bindguard(["diagnose", "-n", "shop", "-o", "yaml"])?;
    ensure!(
        yaml.code() == 1
            && yaml.stdout.starts_with("binds:\n- source: /")
            && yaml.stdout.matches("\n  verdict: stale\n").count() == 45,
        "{yaml:?}"
    );
    let version = node.bindguard(["version"])?.success()?;
    ensure!(
        version.starts_with(concat!(
            "bindguard ",
            env!("CARGO_PKG_VERSION"),
            ", revision "
        )),
        "{version}"
    );
    Ok(())
}

fn unknown_names(node: &Node) -> Result<()> {
    for (words, said) in [
        (
            &["diagnose", "pod/web-5d8f7c9b5"][..],
            "; known here: default/web-5d8f7c9b5-010, ",
        ),
        (
            &["repair", "--pod", "shop/web-5d8f7c9b5-04"],
            "; known here: ",
        ),
        (&["diagnose", "-n", "shpo"], "no pod of namespace shpo"),
        (&["diagnose", "web"], "expected pod/NAME"),
    ] {
        let ended = node.bindguard(words)?;
        ensure!(
            ended.code() == 2 && ended.stderr.contains(said),
            "{words:?}: {ended:?}"
        );
    }
    Ok(())
}

/// Both go on until their reader leaves.
fn watched_and_followed(node: &Node) -> Result<()> {
    for words in [
        &["diagnose", "--watch", "-n", "shop"][..],
        &["journal", "--follow"],
    ] {
        let mut command = node.command(node.programs().join("bindguard"))?;
        command.args(words).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let stdout = child.stdout.take().context("stdout")?;
        let mut lines = BufReader::new(stdout).lines();
        let wanted = |line: &String| line.contains("shop/web-5d8f7c9b5-004");
        if words[0] == "journal" {
            run({
                let mut repair = node.command(node.programs().join("bindguard"))?;
                repair.args(["repair", "pod/web-5d8f7c9b5-004"]);
                repair
            })?
            .success()?;
        }
        let found = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| wanted(&line) || line.contains("uid-004"));
        ensure!(found, "{words:?} printed no such line");
        child.kill()?;
        child.wait()?;
    }
    Ok(())
}
