//! A release packs the plugin of kubectl: krew gets an archive and a manifest that names the
//! archive by its digest.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::helm::{folder, run, text};
use crate::kube::documents;

#[test]
fn the_manifest_names_the_archive_and_its_files() {
    let version = env!("CARGO_PKG_VERSION");
    let work = tempfile::tempdir().unwrap();
    let mut packed = Vec::new();
    for to in ["one", "two"] {
        let to = work.path().join(to);
        fs::create_dir(&to).unwrap();
        let mut script = Command::new("sh");
        script.arg(folder("kubectl/package.sh"));
        script.arg(version).arg(&to);
        script.env("SOURCE_DATE_EPOCH", "1000000000");
        assert!(script.status().unwrap().success());
        let archive = to.join(format!("kubectl-bindguard-{version}.tar.gz"));
        packed.push((archive, to.join("kubectl-bindguard.yaml")));
    }
    let [(archive, manifest), (again, _)] = &packed[..] else {
        panic!("{packed:?}");
    };
    assert!(fs::read(archive).unwrap() == fs::read(again).unwrap());

    let manifest = fs::read_to_string(manifest).unwrap();
    assert!(!manifest.contains('@'), "{manifest}");
    let plugin = &documents(&manifest)[0];
    assert_eq!(plugin["metadata"]["name"], "bindguard");
    assert_eq!(plugin["spec"]["version"], format!("v{version}"));
    let platform = &plugin["spec"]["platforms"][0];
    let sum = run("sha256sum".as_ref(), &[archive.to_str().unwrap()]);
    let sum = text(&sum.stdout);
    assert_eq!(platform["sha256"], sum.split(' ').next().unwrap());
    let address = platform["uri"].as_str().unwrap();
    let name = archive.file_name().unwrap().to_str().unwrap();
    assert!(address.ends_with(&format!("/v{version}/{name}")));

    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(archive);
    tar.arg("--directory").arg(work.path());
    assert!(tar.status().unwrap().success());
    for file in platform["files"].as_array().unwrap() {
        let file = work.path().join(file["from"].as_str().unwrap());
        assert!(fs::exists(&file).unwrap(), "{}", file.display());
    }
    let program = work.path().join(platform["bin"].as_str().unwrap());
    let mode = fs::metadata(&program).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    let help = run(&program, &["--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("Exit status"));
}
