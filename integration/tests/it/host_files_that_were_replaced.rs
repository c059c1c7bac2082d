//! A pod has a file and a socket of the host. The restarted daemon makes a new file and a new
//! socket: the running container keeps the old file and socket, until a refresh by hand or by the
//! agent.

use bindguard_integration::prelude::*;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;

use bindguard_integration::fuse_daemon::FuseDaemon;
use bindguard_integration::mounts;
use bindguard_integration::node::AGENT_LOG;
use bindguard_integration::privilege::skipped;
use bindguard_integration::waiting::stays;
use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use rustix::param::clock_ticks_per_second;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const OPTED_IN: [(&str, &str); 1] = [("bindguard.io/refresh-binds", "host-files")];
const TASKS: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io";
const REPLACED: &str = "bindguard_refreshes_total{outcome=\"replaced\"}";

#[test]
fn by_hand() {
    Setup::on(Generation::NEWEST).cri().story_alone(
        "host_files_that_were_replaced::by_hand",
        |node| {
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
        },
    );
}

#[test]
fn by_the_agent() {
    Setup::on(Generation::NEWEST).cri().story_alone(
        "host_files_that_were_replaced::by_the_agent",
        |node| {
            let mut daemon = Daemon::started(node)?;
            let running = Running::start(node, &daemon, &OPTED_IN)?;
            daemon.restart("two")?;
            let before = mounts::table()?;
            let agent = Agent::start(node, "")?;
            until("the container has the new file and socket", || {
                Ok(running.shows(&daemon).is_ok())
            })?;
            ensure!(mounts::table()? == before, "the host's mounts have changed");
            until("both are counted", || Ok(agent.figure(REPLACED) == 2.0))?;
            running.cri.remove_pod(&running.sandbox)
        },
    );
}

/// Every survey is minutes away: a watch of the folder reports the new file and socket.
#[test]
fn by_the_agent_at_once() {
    Setup::on(Generation::NEWEST).cri().story_alone(
        "host_files_that_were_replaced::by_the_agent_at_once",
        |node| {
            let agent = Agent::start(node, "")?;
            let mut daemon = Daemon::started(node)?;
            let running = Running::start(node, &daemon, &OPTED_IN)?;
            for content in ["two", "three", "four"] {
                daemon.restart(content)?;
                until("the container has the new file and socket", || {
                    Ok(running.shows(&daemon).is_ok())
                })?;
            }
            // A refresh can replace a mount twice, and counts once.
            until("they are counted", || Ok(agent.figure(REPLACED) >= 2.0))?;
            running.cri.remove_pod(&running.sandbox)
        },
    );
}

/// Every survey is minutes away. The runtime, and then the bundle, cannot be read at the moment at
/// which the files are replaced.
#[test]
fn while_neither_the_runtime_nor_the_bundle_can_be_read() {
    Setup::on(Generation::NEWEST).cri().story_alone(
        "host_files_that_were_replaced::while_neither_the_runtime_nor_the_bundle_can_be_read",
        |node| {
            let mut daemon = Daemon::started(node)?;
            let _agent = Agent::start(node, "")?;
            let running = Running::start(node, &daemon, &OPTED_IN)?;
            let log = |words: &str| -> Result<usize> {
                let log = fs::read_to_string(node.disk().join(AGENT_LOG))?;
                Ok(log.matches(words).count())
            };
            daemon.restart("two")?;
            until("the folder is watched", || {
                Ok(running.shows(&daemon).is_ok())
            })?;
            node.without_containerd(Signal::SIGTERM, || {
                daemon.restart("three")?;
                until("the agent reports it", || Ok(log("of the CRI")? > 0))
            })?;
            until("the container has the third", || {
                Ok(running.shows(&daemon).is_ok())
            })?;
            // A refresh that has read the spec by now would go on with it.
            stays(Duration::from_secs(2), "it has the third", || {
                Ok(running.shows(&daemon).is_ok())
            })?;
            let spec = Path::new(TASKS).join(&running.id).join("config.json");
            let hidden = spec.with_extension("hidden");
            fs::rename(&spec, &hidden)?;
            daemon.restart("four")?;
            let words = "its bundle is not found; trying again";
            until("the agent reports it", || Ok(log(words)? > 0))?;
            // The last event of the files is a second old by then.
            stays(Duration::from_secs(2), "it has the old files", || {
                Ok(running.shows(&daemon).is_err())
            })?;
            // A file whose read fails.
            fs::create_dir(&spec)?;
            until("the agent reports it", || Ok(log("; trying again")? > 1))?;
            fs::remove_dir(&spec)?;
            fs::rename(&hidden, &spec)?;
            until("the container has the fourth", || {
                Ok(running.shows(&daemon).is_ok())
            })?;
            ensure!(log(words)? == 1, "it is reported once");
            running.cri.remove_pod(&running.sandbox)
        },
    );
}

/// A container that can write the folder makes file events all the time. The agent stays idle, and
/// the other pod gets its file.
#[test]
fn beside_a_container_that_makes_events() {
    Setup::on(Generation::NEWEST).cri().story_alone(
        "host_files_that_were_replaced::beside_a_container_that_makes_events",
        |node| {
            let mut daemon = Daemon::started(node)?;
            let agent = Agent::start(node, "")?;
            let quiet = Running::start(node, &daemon, &OPTED_IN)?;
            daemon.restart("two")?;
            until("the folder is watched", || Ok(quiet.shows(&daemon).is_ok()))?;
            let noise = "while :; do : > /shared/a; : > /shared/file; : > /shared/b; done";
            let shared = mount(&daemon.folder, "/shared", PropagationPrivate);
            let noisy =
                Running::start_more(node, &daemon, "noisy", &["sh", "-c", noise], &[shared])?;
            until("the container makes events", || {
                Ok(daemon.folder.join("a").exists())
            })?;
            let (began, before) = (Instant::now(), processor_time(agent.pid())?);
            stays(Duration::from_secs(5), "the agent is there", || {
                Ok(processor_time(agent.pid()).is_ok())
            })?;
            let share = (processor_time(agent.pid())? - before).as_secs_f64()
                / began.elapsed().as_secs_f64();
            ensure!(share < 0.15, "the agent uses {share:.2} of a processor");
            daemon.restart("three")?;
            until("the other container has the new file", || {
                Ok(quiet.shows(&daemon).is_ok())
            })?;
            noisy.cri.remove_pod(&noisy.sandbox)?;
            quiet.cri.remove_pod(&quiet.sandbox)
        },
    );
}

/// The time of a processor that a process used.
fn processor_time(pid: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, after) = stat.rsplit_once(')').context("read the agent's times")?;
    // utime and stime, proc_pid_stat(5).
    let ticks = after.split_whitespace().skip(11).take(2);
    let ticks: Result<Vec<u64>, _> = ticks.map(str::parse).collect();
    let milliseconds = 1_000 * ticks?.iter().sum::<u64>() / clock_ticks_per_second();
    Ok(Duration::from_millis(milliseconds))
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
        Self::start_with(node, daemon, "app", annotations, &SLEEP, &[])
    }

    /// A further pod that opted in, with more mounts.
    fn start_more(
        node: &Node,
        daemon: &Daemon,
        name: &str,
        words: &[&str],
        more: &[Mount],
    ) -> Result<Self> {
        Self::start_with(node, daemon, name, &OPTED_IN, words, more)
    }

    fn start_with(
        node: &Node,
        daemon: &Daemon,
        name: &str,
        annotations: &[(&str, &str)],
        words: &[&str],
        more: &[Mount],
    ) -> Result<Self> {
        let cri = node.cri()?;
        let uid = format!("uid-{name}");
        node.kubelet().pod(&uid)?;
        let sandbox = cri.run_annotated_pod("runc", name, &uid, annotations)?;
        let mut mounts = vec![
            mount(&daemon.folder.join("file"), "/etc/file", PropagationPrivate),
            mount(&daemon.folder.join("socket"), "/socket", PropagationPrivate),
        ];
        mounts.extend_from_slice(more);
        let id = cri.start_container(&sandbox, "app", words, &mounts)?;
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

/// The files of LXCFS (lxc/lxcfs#701): the whole filesystem of the file is mounted anew.
#[test]
fn a_file_of_a_fuse_filesystem_that_was_mounted_anew() {
    if let Some(why) = FuseDaemon::missing() {
        return skipped(why);
    }
    Setup::on(Generation::NEWEST).cri().story_alone(
        "host_files_that_were_replaced::a_file_of_a_fuse_filesystem_that_was_mounted_anew",
        |node| {
            // Root alone may write the folders of the path.
            let (folder, place) = (node.disk().join("served"), PathBuf::from("/run/lxcfs"));
            [&folder, &place].into_iter().try_for_each(fs::create_dir)?;
            fs::write(folder.join("file"), "one")?;
            let mut daemon = FuseDaemon::mounted(node, &folder, &place)?;
            let (cri, uid) = (node.cri()?, "uid-lxcfs");
            node.kubelet().pod(uid)?;
            let sandbox = cri.run_annotated_pod("runc", "lxcfs", uid, &OPTED_IN)?;
            let mounts = [mount(&place.join("file"), "/etc/file", PropagationPrivate)];
            let id = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
            ensure!(cri.read(&id, "/etc/file")? == "one");
            let mut agent = None;
            for content in ["two", "three"] {
                drop(daemon);
                ensure!(cri.read(&id, "/etc/file").is_err(), "its daemon is dead");
                host(["umount".as_ref(), "--lazy".as_ref(), place.as_os_str()])?;
                fs::write(folder.join("file"), content)?;
                daemon = FuseDaemon::mounted(node, &folder, &place)?;
                let before = mounts::table()?;
                if agent.is_none() {
                    let listed = node.bindguard(["diagnose", "--pod", "default/lxcfs"])?;
                    let command = "bindguard refresh --pod default/lxcfs --what host-files";
                    ensure!(listed.stdout.contains(command), "{listed:?}");
                    node.bindguard(command.split(' ').skip(1))?.success()?;
                    ensure!(cri.read(&id, "/etc/file")? == content);
                    // Every survey but those after its start is minutes away.
                    agent = Some(Agent::start(node, "")?);
                } else {
                    until("the agent has refreshed the file", || {
                        Ok(cri.read(&id, "/etc/file").is_ok_and(|read| read == content))
                    })?;
                }
                ensure!(mounts::table()? == before, "the host's mounts have changed");
            }
            cri.remove_pod(&sandbox)?;
            unmount(&place)
        },
    );
}
