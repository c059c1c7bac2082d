//! A config.json that was made to hurt: enormous, deep, or with a hundred thousand mounts. The
//! guard's memory and its work are bounded; then the runtime decides, on the bytes that it would
//! have seen without a guard.

use bindguard_integration::prelude::*;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;

use bindguard_integration::bundle::Bundle;
use bindguard_integration::stale::StaleBundle;

/// The guard's limits: address space, and seconds of a processor, enough for a machine of half the
/// speed.
const LIMITS: [&str; 3] = ["prlimit", "--as=300000000", "--cpu=5"];
const MANY: usize = 100_000;

#[test]
fn memory_and_work_are_bounded() {
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    let mounts = |mount: &str| format!(r#"{{"mounts":[{}]}}"#, vec![mount; MANY].join(","));
    let stale = StaleBundle::lay_out(node, "many")?;
    let source = stale.subpath().target().display().to_string();
    let subpath = format!(r#"{{"source":"{source}","type":"bind"}}"#);
    let nested =
        |open: &str, close: &str| format!("{}{}", open.repeat(1 << 20), close.repeat(1 << 20));
    let annotation =
        |value: &str| format!(r#"{{"annotations":{{"io.kubernetes.cri.sandbox-name":{value}}}}}"#);
    let cases = [
        (
            "many foreign mounts",
            mounts(r#"{"source":"/nowhere/at/all","type":"bind"}"#),
            "not checked",
        ),
        (
            "many host roots",
            mounts(r#"{"source":"/","type":"bind","options":["rbind","rprivate"]}"#),
            "not checked",
        ),
        ("many subpaths", mounts(&subpath), "not checked"),
        ("deep lists", nested("[", "]"), "config.json"),
        ("deep objects", nested(r#"{"a":"#, "}"), "config.json"),
        (
            "deep mounts",
            format!(r#"{{"mounts":{}}}"#, nested("[", "]")),
            "mounts",
        ),
        (
            "half of it",
            r#"{"mounts":[{"source":"#.repeat(1 << 18),
            "config.json",
        ),
        (
            "many keys",
            format!("{{{}}}", vec![r#""a":1"#; 1 << 20].join(",")),
            "",
        ),
        (
            "a long annotation",
            annotation(&format!("{:?}", "x".repeat(8 << 20))),
            "",
        ),
        (
            "an annotation of many lines",
            annotation(r#""\n{\"id\":\"forged\"}\n\u0000\u001b[2J""#),
            "",
        ),
        (
            "an annotation that is none",
            annotation("{}"),
            "annotations",
        ),
    ];
    for (name, spec, words) in cases {
        let bundle = Bundle::create(node, &name.replace(' ', "-"), spec.as_bytes())?;
        admitted_within_limits(node, &bundle, words).with_context(|| name.to_owned())?;
        let seen = bundle.seen()?;
        ensure!(
            name == "many host roots" || seen == spec.as_bytes(),
            "{name}: the runtime saw another spec"
        );
    }
    let bundle = Bundle::create(node, "gigabyte", b"")?;
    a_string_of_a_gigabyte(&bundle.path().join("config.json"))?;
    admitted_within_limits(node, &bundle, "16 MiB")?;
    journal_is_not_forged()?;
    stale.delete()
}

/// Most of it is a hole in the file, which reads as NUL bytes.
fn a_string_of_a_gigabyte(path: &Path) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    file.write_all(br#"{"ociVersion":""#)
        .and_then(|()| file.set_len(1 << 30))
        .context("write a gigabyte")
}

fn admitted_within_limits(node: &Node, bundle: &Bundle, words: &str) -> Result<()> {
    let ended = run(bundle.admit_under(node, &LIMITS)?)?;
    let log = bundle.log().unwrap_or_default();
    ensure!(ended.status.signal().is_none(), "it was killed: {ended:?}");
    ensure!(!ended.stderr.contains("panicked"), "it panicked: {ended:?}");
    ensure!(log.contains(words), "no word of {words:?}: {:.2000}", log);
    bundle.arguments()?;
    Ok(())
}

fn journal_is_not_forged() -> Result<()> {
    for line in fs::read_to_string("/run/bindguard/journal.jsonl")
        .context("read the journal")?
        .lines()
    {
        let line: Value = serde_json::from_str(line).context("parse a line of the journal")?;
        ensure!(line["id"] == "c1", "a line of another container: {line}");
    }
    Ok(())
}
