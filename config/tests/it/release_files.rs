//! `release.sh` describes the artefacts of a release: bills of materials, the statement of their
//! origin, checksums.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

#[test]
fn the_statement_of_a_release_names_each_artefact_with_its_digest() {
    if Command::new("jq").arg("--version").output().is_err() {
        return eprintln!("SKIPPED: no jq here");
    }
    let folder = tempfile::tempdir().unwrap();
    let (dist, sbom) = (folder.path().join("dist"), folder.path().join("sbom"));
    fs::create_dir(&dist).unwrap();
    for name in ["bindguard-0.1.0.tgz", "bindguard_0.1.0_amd64.deb"] {
        fs::write(dist.join(name), name).unwrap();
    }
    let bill = json!({"metadata": {}, "components": [{"name": "nix"}], "dependencies": []});
    fs::write(&sbom, bill.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("release.sh");
    let mut command = Command::new("sh");
    command.args([&script, &dist, &sbom]).arg("0.1.0");
    command.env("BINDGUARD_REVISION", "1234abcd");
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
}
