//! A pod crash-loops under a runtime without bindguard: the operator repairs its subpath by hand,
//! and it starts.

use bindguard_integration::prelude::*;
use std::ffi::OsStr;

#[test]
fn stock_shim_starts_it_again() {
    Setup::on(Generation::V1_7).story(story);
}

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("looping")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let source = subpath.bind()?;
    volume.update(&[("app.conf", "two")])?;
    let stock = |id: &str| {
        node.ctr()
            .container(id)
            .runtime(Runtime::Stock)
            .mount(Bind::new(source, "/etc/app.conf"))
            .start()
    };
    let words = stock("loops")?.failure()?;
    ensure!(
        words.contains("no such file or directory"),
        "not the fault: {words}"
    );
    node.ctr().forget("loops")?;

    let before = subpath.mounts()?;
    for way in [&["--dry-run"][..], &["--dry-run", "--unmount"]] {
        let dry_run = node.bindguard([&["repair", "--pod", "looping"], way].concat())?;
        ensure!(
            dry_run.code() == 1 && dry_run.stdout.contains("would be re-bound"),
            "a dry run: {dry_run:?}"
        );
    }
    ensure!(subpath.mounts()? == before, "a dry run changed the mounts");

    let repaired = node.bindguard([OsStr::new("repair"), source.as_os_str()])?;
    ensure!(
        repaired.code() == 0 && repaired.stdout.contains("re-bound to the current target"),
        "not repaired: {repaired:?}"
    );
    only_a_current_mount(&subpath)?;
    stock("starts")?.success()?;
    ensure!(node.ctr().read("starts", "/etc/app.conf")? == "two");
    node.ctr().remove("starts")?;

    volume.update(&[("app.conf", "three")])?;
    let detached = node.bindguard([
        "repair",
        "--unmount",
        "--pod",
        "looping",
        "--format",
        "kubediag",
    ])?;
    let said = r#"{"recover.kubernetes.subpath_remount.result":""#;
    ensure!(
        detached.code() == 0 && detached.stdout.starts_with(said),
        "not detached: {detached:?}"
    );
    ensure!(
        subpath.mounts()?.is_empty(),
        "it is mounted still: {:?}",
        subpath.mounts()?
    );
    ensure!(
        fs::read(source)?.is_empty(),
        "the kubelet's own empty file is not what is left"
    );
    nothing_but_stale_subpaths(node, source.as_os_str())?;
    subpath.bind()?;
    pod.delete()?;
    // Four commands were dry runs or refused; two repaired.
    let journal = node.bindguard(["journal", "--pod", "looping"])?.success()?;
    ensure!(
        journal
            .matches("(volume conf on the host, by an operator)")
            .count()
            == 2,
        "{journal}"
    );
    ensure!(
        journal.contains("re-bound to the current target") && journal.contains("detached: "),
        "{journal}"
    );
    Ok(())
}

/// Anything except a stale subpath is refused in a single line, and stays unchanged.
fn nothing_but_stale_subpaths(node: &Node, detached: &OsStr) -> Result<()> {
    let passwd = fs::read("/etc/passwd")?;
    let gone = format!("{}x", detached.to_string_lossy().trim_end_matches('0'));
    let mistyped = gone.replace("/app/x", "/app/7");
    // a finding that remains is exit status 1, by its path as with --all
    for (words, said, code) in [
        (&["repair", "/etc/passwd"][..], "is not a volume-subpath", 2),
        (&["repair", "--pod=no-such-pod"], "of a pod no-such-pod", 2),
        (&["repair", &mistyped], "No such file or directory", 2),
        (
            &["repair", &detached.to_string_lossy()],
            "is unmounted, not stale",
            1,
        ),
        (
            &["repair", "--unmount", &detached.to_string_lossy()],
            "is unmounted, not stale",
            1,
        ),
        (&["repair", "--all"], "unmounted", 1),
        (
            &["diagnose", "--pod", "no-such-pod"],
            "of a pod no-such-pod",
            2,
        ),
        (
            &["check", "/nowhere"],
            "read /nowhere/config.json: No such file",
            2,
        ),
        (
            &["diagnose", "--config", "/etc/passwd"],
            "parse /etc/passwd",
            2,
        ),
    ] {
        let ended = node.bindguard(words)?;
        let text = format!("{}{}", ended.stdout, ended.stderr);
        ensure!(
            text.contains(said) && ended.code() == code,
            "{words:?} says {text} and exits {}",
            ended.code()
        );
    }
    ensure!(fs::read("/etc/passwd")? == passwd);
    let good = node.bindguard(["config", "check"])?;
    ensure!(
        good.code() == 0 && good.stdout.contains("has no mistake"),
        "{good:?}"
    );
    Ok(())
}
