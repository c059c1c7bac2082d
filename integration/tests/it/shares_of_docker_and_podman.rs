//! A container of Docker or Podman binds a share that the host mounts anew, and the host's `/run`,
//! in which runtimes mount. The container that opted in gets the new share, and gives up what the
//! host has unmounted. Docker itself makes a bind of `/` rslave.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use bindguard_integration::engines::{ContainerEngine, Docker, Podman, missing};
use bindguard_integration::mounts;
use bindguard_integration::privilege;
use bindguard_integration::waiting::stays;

const OPTED_IN: &str = "bindguard.refresh-binds=volumes,host-root";
const SLEEP: [&str; 2] = ["sleep", "1000000"];

/// Root alone may write the folders above.
const SHARE: &str = "/run/share";
const KEPT: &str = "/run/kept";

/// The last survey after the start of a container comes after five seconds.
const AFTER_SURVEYS: Duration = Duration::from_secs(7);

#[test]
fn docker() {
    story(|node| {
        let docker = Docker::start(node)?;
        play(node, &docker, &["--label", OPTED_IN])
    });
}

#[test]
fn podman() {
    story(|node| {
        let podman = Podman::on(node)?;
        // The command line splits annotations at commas, as CSV.
        let annotation = format!("\"{OPTED_IN}\"");
        play(node, &podman, &["--annotation", &annotation])
    });
}

/// The driver `vfs` lays the root filesystem out as a plain folder, and runc 1.3 makes the mount private
/// on which the folder lies. Here this is the host's `/`.
#[test]
fn host_root_of_a_container_in_a_plain_folder() {
    // runc 1.1 leaves that mount shared
    story_on(Generation::V2_1, |node| {
        let docker = Docker::start(node)?;
        let kept = node.disk().join("kept");
        fs::create_dir(&kept)?;
        tmpfs(&kept, "mode=755")?;
        fs::write(kept.join("file"), "one")?;
        let id = docker.start(&["--volume=/:/host:rslave"], &SLEEP)?;
        unmount(&kept)?;
        ensure!(
            docker
                .read(&id, &format!("/host{}/file", kept.display()))
                .is_ok(),
            "the bind is no private one: this story shows nothing"
        );
        let words = ["refresh", "--container", &id[..12], "--what", "host-root"];
        let refreshed = node.bindguard(words)?;
        ensure!(
            refreshed.stdout.contains("1 mount checked, 1 stale before"),
            "{refreshed:?}"
        );
        docker.remove(&id)
    });
}

fn story(story: impl FnOnce(&Node) -> Result<()>) {
    story_on(Generation::V1_7, story);
}

fn story_on(generation: Generation, story: impl FnOnce(&Node) -> Result<()>) {
    if let Some(why) = missing() {
        return privilege::skipped(&why);
    }
    Setup::on(generation).bare().story(story);
}

fn play(node: &Node, engine: &impl ContainerEngine, flags: &[&str]) -> Result<()> {
    let users = node.disk().join("users/share");
    fs::create_dir_all(&users)?;
    fs::set_permissions(node.disk().join("users"), Permissions::from_mode(0o1777))?;
    for folder in [SHARE.as_ref(), KEPT.as_ref(), users.as_path()] {
        fs::create_dir_all(folder)?;
        tmpfs(folder, "mode=755")?;
        fs::write(folder.join("file"), "one")?;
    }
    let binds = [
        format!("--volume={SHARE}:/data"),
        format!("--volume={}:/users", users.display()),
        "--volume=/run:/host:ro".to_owned(),
    ];
    let binds: Vec<&str> = binds.iter().map(String::as_str).collect();
    let by_hand = engine.start(&binds, &SLEEP)?;
    let by_agent = engine.start(&[flags, &binds].concat(), &SLEEP)?;
    for folder in [SHARE.as_ref(), users.as_path()] {
        mount_anew(folder, "two")?;
    }
    unmount(KEPT)?;
    let keeps = |id: &str| engine.read(id, "/host/kept/file").is_ok();
    ensure!(engine.read(&by_hand, "/data/file")? == "one" && keeps(&by_hand));

    let before = mounts::table()?;
    let refresh = |what: &str| {
        let words = ["refresh", "--container", &by_hand[..12], "--what", what];
        node.bindguard(words)
    };
    // Any user may write the folder above, and could lead the path to a different mount.
    let volumes = refresh("volumes")?;
    ensure!(
        volumes.code() == 1
            && volumes.stdout.contains("replaced")
            && volumes
                .stdout
                .contains("others than root may have put it there"),
        "{volumes:?}"
    );
    let root = refresh("host-root")?;
    ensure!(
        root.code() == 0 && root.stdout.contains("replaced"),
        "{root:?}"
    );
    ensure!(engine.read(&by_hand, "/data/file")? == "two" && !keeps(&by_hand));
    ensure!(engine.read(&by_hand, "/users/file")? == "one");

    ensure!(engine.read(&by_agent, "/data/file")? == "one" && keeps(&by_agent));
    let agent = Agent::start(node, "")?;
    until("the container that opted in has both", || {
        Ok(engine.read(&by_agent, "/data/file")? == "two" && !keeps(&by_agent))
    })?;
    ensure!(mounts::table()? == before, "the host's mounts have changed");
    // Later no survey is due for minutes.
    stays(AFTER_SURVEYS, "the container runs", || {
        Ok(engine.read(&by_agent, "/data/file")? == "two")
    })?;
    mount_anew(SHARE.as_ref(), "three")?;
    until("the next share arrives at once", || {
        Ok(engine.read(&by_agent, "/data/file")? == "three")
    })?;
    ensure!(engine.read(&by_agent, "/users/file")? == "one");
    until("the share of the user is counted", || {
        Ok(agent.figure("bindguard_refreshes_total{outcome=\"refused\"}") >= 1.0)
    })?;
    [&by_hand, &by_agent]
        .iter()
        .try_for_each(|id| engine.remove(id))
}

/// The steps of a remount.
fn mount_anew(place: &Path, content: &str) -> Result<()> {
    host(["umount".as_ref(), "--lazy".as_ref(), place.as_os_str()])?;
    tmpfs(place, "mode=755")?;
    fs::write(place.join("file"), content).context("write the file")
}
