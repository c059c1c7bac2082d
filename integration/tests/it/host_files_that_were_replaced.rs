//! A pod has a file and a socket of the host. The daemon is restarted and makes both anew: the
//! running container keeps the old ones, until a refresh by hand or by the agent.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use bindguard_integration::cri::{Cri, Sandbox, mount};
use bindguard_integration::mounts;
use bindguard_integration::waiting::until;
use bindguard_integration::{Agent, Generation, Node, Setup};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SLEEP: [&str; 2] = ["sleep", "1000000"];

#[test]
fn by_hand() {
    Setup::on(Generation::V2_1).cri().story(|node| {
        let mut daemon = Daemon::started(node)?;
        let running = Running::start(node, &daemon, &[])?;
        running.shows(&daemon)?;
        daemon.restart("two")?;
        ensure!(running.shows(&daemon).is_err(), "without a refresh");
        let before = mounts::table()?;
        let refresh = || {
            let words = ["refresh", "--pod", "default/app", "--what", "host-files"];
            node.bindguard(words)
        };
        let done = refresh()?;
        ensure!(
            done.code() == 0 && done.stdout.matches("replaced").count() == 2,
            "{done:?}"
        );
        running.shows(&daemon)?;
        ensure!(mounts::table()? == before, "the host's mounts have changed");
        let again = refresh()?;
        ensure!(
            again.code() == 0 && !again.stdout.contains("replaced"),
            "{again:?}"
        );
        running.cri.remove_pod(&running.sandbox)
    });
}

#[test]
fn by_the_agent() {
    Setup::on(Generation::V2_1).cri().story(|node| {
        let mut daemon = Daemon::started(node)?;
        let opted_in = [("bindguard.io/refresh-binds", "host-files")];
        let running = Running::start(node, &daemon, &opted_in)?;
        daemon.restart("two")?;
        let before = mounts::table()?;
        let agent = Agent::start(node, "")?;
        until("the container has the new file and socket", || {
            Ok(running.shows(&daemon).is_ok())
        })?;
        ensure!(mounts::table()? == before, "the host's mounts have changed");
        let replaced = agent.figure("bindguard_refreshes_total{outcome=\"replaced\"}");
        ensure!(replaced == 2.0, "{}", agent.get("/metrics"));
        running.cri.remove_pod(&running.sandbox)
    });
}

/// A daemon of the host with a file and a socket.
struct Daemon {
    folder: PathBuf,
    listener: UnixListener,
}

impl Daemon {
    fn started(node: &Node) -> Result<Self> {
        let folder = node.disk().join("daemon");
        fs::create_dir(&folder)?;
        fs::write(folder.join("file"), "one")?;
        let listener = UnixListener::bind(folder.join("socket")).context("make the socket")?;
        Ok(Self { folder, listener })
    }

    fn restart(&mut self, content: &str) -> Result<()> {
        fs::write(self.folder.join("new"), content)?;
        fs::rename(self.folder.join("new"), self.folder.join("file"))?;
        fs::remove_file(self.folder.join("socket"))?;
        self.listener = UnixListener::bind(self.folder.join("socket"))?;
        Ok(())
    }
}

/// The pod that has both.
struct Running {
    cri: Cri,
    sandbox: Sandbox,
    id: String,
}

impl Running {
    fn start(node: &Node, daemon: &Daemon, annotations: &[(&str, &str)]) -> Result<Self> {
        let cri = node.cri()?;
        node.kubelet().pod("uid-app")?;
        let sandbox = cri.run_annotated_pod("runc", "app", "uid-app", annotations)?;
        let mounts = [
            mount(&daemon.folder.join("file"), "/etc/file", PropagationPrivate),
            mount(&daemon.folder.join("socket"), "/socket", PropagationPrivate),
        ];
        let id = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        Ok(Self { cri, sandbox, id })
    }

    fn shows(&self, daemon: &Daemon) -> Result<()> {
        let pid = self.cri.pid(&self.id)?;
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        for (inside, name) in [("etc/file", "file"), ("socket", "socket")] {
            let shown = fs::metadata(root.join(inside))?.ino();
            ensure!(
                shown == fs::metadata(daemon.folder.join(name))?.ino(),
                "it has an old {name}"
            );
        }
        Ok(())
    }
}
