//! youki 0.7 refuses `linux.rootfsPropagation` of rslave, and its binds are slaves of the host's
//! mounts anyway: the guard leaves a host-root bind as it is.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use rustix::process::geteuid;

const SPEC: &str = r#"{"ociVersion":"1.0.0","linux":{},"mounts":[{"destination":"/host","type":"bind","source":"/","options":["rbind","rprivate"]}]}"#;

/// The spec that a runtime of this name gets. The node finds the runtime through a link.
fn spec_for(runtime: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("bundle")).unwrap();
    fs::write(path("bundle/config.json"), SPEC).unwrap();
    fs::copy("/bin/true", path(runtime)).unwrap();
    symlink(path(runtime), path("link")).unwrap();
    let config = format!(
        "[runtime]\npath = {:?}\n[journal]\npath = {:?}\n",
        path("link"),
        path("journal.jsonl")
    );
    fs::write(path("config.toml"), config).unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_bindguard-runtime"))
        .env("BINDGUARD_CONFIG", path("config.toml"))
        .env_remove("BINDGUARD_RUNTIME")
        .args(["create", "--bundle"])
        .arg(path("bundle"))
        .arg("c")
        .status();
    assert!(status.unwrap().success());
    fs::read_to_string(path("bundle/config.json")).unwrap()
}

#[test]
fn a_host_root_bind_is_left_as_it_is() {
    if !geteuid().is_root() {
        eprintln!("SKIPPED: not root");
        return;
    }
    assert_eq!(spec_for("youki"), SPEC);
    let of_runc = spec_for("runc");
    assert!(
        of_runc.contains(r#""rootfsPropagation":"rslave""#),
        "{of_runc}"
    );
}
