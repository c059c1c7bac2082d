//! An operator who wants to look first sets the checks to `report`: everything fails as it did
//! without bindguard, nothing is touched, and the log says what would have been done.

use bindguard_integration::mounts;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::says_no_such_file;

#[test]
fn log_only() {
    let policy = "[checks]\nstale-subpaths = \"report\"\nhost-root = \"report\"\n";
    Setup::on(Generation::V1_7).policy(policy).story(story);
}

fn story(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("look")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let bind = Bind::new(subpath.bind()?, "/etc/app.conf");
    volume.update(&[("app.conf", "two")])?;

    let ctr = node.ctr();
    let words = ctr.container("app").mount(bind).start()?.failure()?;
    ensure!(says_no_such_file(&words), "not runc's error: {words}");
    let reason = "bindguard: the subPath of volume conf at /etc/app.conf is stale: the file it was bound from is deleted";
    ensure!(
        words.contains(reason) && words.contains("bindguard diagnose"),
        "not the reason: {words}"
    );
    ctr.forget("app")?;
    ensure!(
        subpath.mounts()?.iter().all(mounts::Mount::is_deleted),
        "the subpath was touched: {:?}",
        subpath.mounts()?
    );

    ctr.container("monitor")
        .mount(Bind::new("/", "/host").options(&["rbind", "rprivate"]))
        .start()?
        .success()?;
    let table = mounts::table_of(ctr.pid("monitor")?)?;
    let host = table.iter().find(|mount| mount.target.ends_with("host"));
    ensure!(
        host.is_some_and(|mount| mount.propagation.is_empty()),
        "the host root was touched: {host:?}"
    );
    ctr.remove("monitor")?;
    for said in ["is stale", "is pinning"] {
        node.wait_for_log(&format!("that a bind {said}"), |line| {
            line.contains("bindguard: bind of") && line.contains(said)
        })?;
    }
    pod.delete()
}
