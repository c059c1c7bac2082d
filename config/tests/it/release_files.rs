//! `release.sh` describes the artefacts of a release: bills of materials, the statement of their
//! origin, checksums. The chart of a release names the image by its digest. Pages and manifests name
//! the version of the programs.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::helm::{REGISTRY, container, folder, helm, run, text};
use crate::kube::documents;

#[test]
fn the_statement_of_a_release_names_each_artefact_with_its_digest() {
    if Command::new("jq").arg("--version").output().is_err() {
        return eprintln!("SKIPPED: no jq here");
    }
    let folder = tempfile::tempdir().unwrap();
    let (dist, sbom) = (folder.path().join("dist"), folder.path().join("sbom"));
    fs::create_dir(&dist).unwrap();
    for name in ["bindguard-0.2.0.tgz", "bindguard_0.2.0_amd64.deb"] {
        fs::write(dist.join(name), name).unwrap();
    }
    let bill = json!({
        "serialNumber": "urn:uuid:1",
        "metadata": {"authors": [{"name": "root"}], "timestamp": "2026-11-28T05:09:51.066Z"},
        "components": [{"bom-ref": "rustix"}, {"bom-ref": "nix"}],
        "dependencies": [{"ref": "nix", "dependsOn": ["libc", "bitflags"]}],
    });
    fs::write(&sbom, bill.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("release.sh");
    let mut command = Command::new("sh");
    command.args([&script, &dist, &sbom]).arg("0.2.0");
    command.env("BINDGUARD_REVISION", "1234abcd");
    command.env("SOURCE_DATE_EPOCH", "1000000000");
    command.env_remove("GITHUB_REPOSITORY");
    command.env_remove("GITHUB_WORKFLOW_REF");
    assert!(command.status().unwrap().success());

    let sums = fs::read_to_string(dist.join("SHA256SUMS")).unwrap();
    let mut statement = Value::Null;
    let mut subjects = Vec::new();
    for line in sums.lines() {
        let (digest, name) = line.split_once("  ").unwrap();
        if name.ends_with(".provenance.json") {
            statement = serde_json::from_slice(&fs::read(dist.join(name)).unwrap()).unwrap();
        } else if !name.ends_with(".cdx.json") {
            subjects.push(json!({"name": name, "digest": {"sha256": digest}}));
        }
    }
    assert_eq!(subjects.len(), 2, "{sums}");
    assert_eq!(statement["subject"], Value::from(subjects));
    assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
    assert_eq!(statement["predicateType"], "https://slsa.dev/provenance/v1");
    let definition = &statement["predicate"]["buildDefinition"];
    let source = &definition["resolvedDependencies"][0];
    assert_eq!(source["digest"]["gitCommit"], "1234abcd");

    let bill = fs::read(dist.join("bindguard_0.2.0_amd64.deb.cdx.json")).unwrap();
    let mut bill: Value = serde_json::from_slice(&bill).unwrap();
    let artefact = bill["metadata"]["component"].take();
    assert_eq!(artefact["name"], "bindguard_0.2.0_amd64.deb");
    let expected = json!({
        "metadata": {"component": null, "timestamp": "2001-09-09T01:46:40Z"},
        "components": [{"bom-ref": "nix"}, {"bom-ref": "rustix"}],
        "dependencies": [{"ref": "nix", "dependsOn": ["bitflags", "libc"]}],
    });
    assert_eq!(bill, expected);
}

/// A value has precedence. The time of the day is not in the package.
#[test]
fn the_chart_of_a_release_names_the_image_by_its_digest() {
    let Some(helm) = helm() else { return };
    if Command::new("jq").arg("--version").output().is_err() {
        return eprintln!("SKIPPED: no jq here");
    }
    let work = tempfile::tempdir().unwrap();
    let digest = format!("sha256:{}", "5".repeat(64));
    let index = json!({"schemaVersion": 2, "manifests": [{"digest": digest}]});
    fs::write(work.path().join("index.json"), index.to_string()).unwrap();
    let image = work.path().join("image.tar");
    let mut tar = Command::new("tar");
    tar.arg("--create").arg("--file").arg(&image);
    tar.arg("--directory").arg(work.path()).arg("index.json");
    assert!(tar.status().unwrap().success());

    let file_name = concat!("bindguard-", env!("CARGO_PKG_VERSION"), ".tgz");
    let mut packages = Vec::new();
    for to in ["one", "two"] {
        let to = work.path().join(to);
        fs::create_dir(&to).unwrap();
        let mut script = Command::new("sh");
        script.arg(folder("chart/package.sh"));
        script.args([&helm, &image, &to]);
        script.env("SOURCE_DATE_EPOCH", "1000000000");
        assert!(script.status().unwrap().success());
        packages.push(to.join(file_name));
        // A file's time in an archive has a resolution of one second.
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    let [one, two] = [0, 1].map(|number| fs::read(&packages[number]).unwrap());
    assert!(one == two, "the same chart gives other bytes");

    let package = packages[0].to_str().unwrap();
    for (values, reference) in [
        (&[][..], format!("@{digest}")),
        (&["--set", "image.tag=own"], ":own".to_owned()),
        (
            &["--set", &format!("image.digest=sha256:{}", "6".repeat(64))],
            format!("@sha256:{}", "6".repeat(64)),
        ),
    ] {
        let words = [&["template", "b", package, "--set", REGISTRY], values].concat();
        let rendered = run(&helm, &words);
        assert!(rendered.status.success(), "{rendered:?}");
        let documents = documents(&text(&rendered.stdout));
        for daemon_set in ["b", "b-agent"] {
            assert_eq!(
                container(&documents, daemon_set)["image"],
                format!("registry.example.com/ops/bindguard-node{reference}")
            );
        }
    }
}

/// The figures of docs/benchmarks.md keep the version that was measured.
#[test]
fn pages_and_manifests_name_the_version_of_the_programs() {
    let mut found = 0;
    for folder in [folder(""), folder("../docs")] {
        for file in fs::read_dir(folder).unwrap() {
            let file = file.unwrap().path();
            let is_text = |kind| kind == "md" || kind == "yaml";
            if !file.extension().is_some_and(is_text) {
                continue;
            }
            let text = fs::read_to_string(&file).unwrap();
            for mark in ["bindguard-node:", "bindguard-node-", "newTag: "] {
                for named in text.split(mark).skip(1) {
                    if named.starts_with(|character: char| character.is_ascii_digit()) {
                        found += 1;
                        assert!(named.starts_with(env!("CARGO_PKG_VERSION")), "{file:?}");
                    }
                }
            }
        }
    }
    assert!(found > 10, "{found}");
}
