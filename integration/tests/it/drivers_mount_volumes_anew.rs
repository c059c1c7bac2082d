//! A driver that was restarted mounts its volume anew (kubernetes#70013): the running containers of
//! a pod that opted in get the new mount, without a restart. Without an opt-in, containers keep the
//! old mount.

use bindguard_integration::KubeletRoot;
use bindguard_integration::fuse_daemon::FuseDaemon;
use bindguard_integration::journal;
use bindguard_integration::kubelet::Pod;
use bindguard_integration::mount_calls::bind;
use bindguard_integration::mounts;
use bindguard_integration::prelude::*;
use bindguard_integration::privilege::{has_program, skipped};
use bindguard_integration::s3_server::S3Server;
use bindguard_integration::scenes::delete_pod;
use bindguard_integration::stopped::is_stopped;
use bindguard_integration::waiting::stays;
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use nix::errno::Errno;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const OPTED_IN: [(&str, &str); 1] = [("bindguard.io/refresh-binds", "volumes")];
const REPLACED: &str = "bindguard_refreshes_total{outcome=\"replaced\"}";
const FAILED: &str = "bindguard_refreshes_total{outcome=\"failed\"}";
const REFUSED: &str = "bindguard_refreshes_total{outcome=\"refused\"}";

fn story(generation: Generation) {
    Setup::on(generation)
        .cri()
        .story(a_new_tmpfs_reaches_only_pods_that_opted_in);
}

on_newest_and_older!(story);

/// A volume of a CSI driver, which is a tmpfs as with secrets-store.
struct CsiVolume(PathBuf);

impl CsiVolume {
    fn publish(pod: &Pod, content: &str) -> Result<Self> {
        let volume = Self::unpublished(pod)?;
        volume.mount(content)?;
        Ok(volume)
    }

    fn unpublished(pod: &Pod) -> Result<Self> {
        let path = pod.path().join("volumes/kubernetes.io~csi/pv/mount");
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self(path))
    }

    fn mount(&self, content: &str) -> Result<()> {
        tmpfs(&self.0, "")?;
        fs::write(self.0.join("file"), content).context("write a file of the volume")
    }

    /// The steps of a driver after its restart.
    fn mount_anew(&self, content: &str) -> Result<()> {
        self.unmount_lazily()?;
        self.mount(content)
    }

    fn unmount_lazily(&self) -> Result<()> {
        host(["umount".as_ref(), "--lazy".as_ref(), self.0.as_os_str()])?;
        Ok(())
    }

    /// A pod whose container mounts the volume at `/data`.
    fn used(
        &self,
        node: &Node,
        runtime: &str,
        name: &str,
        annotations: &[(&str, &str)],
    ) -> Result<Running> {
        let (cri, uid) = (node.cri()?, format!("uid-{name}"));
        let sandbox = cri.run_annotated_pod(runtime, name, &uid, annotations)?;
        let mounts = [mount(&self.0, "/data", PropagationPrivate)];
        let id = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        Ok(Running {
            cri,
            uid,
            sandbox,
            id,
        })
    }
}

/// A pod with a container.
struct Running {
    cri: Cri,
    uid: String,
    sandbox: Sandbox,
    id: String,
}

impl Running {
    fn content(&self) -> Result<String> {
        self.cri.read(&self.id, "/data/file")
    }

    /// True if the container gets "Transport endpoint is not connected".
    fn reads_a_dead_volume(&self) -> Result<bool> {
        let file = format!("/proc/{}/root/data/file", self.cri.pid(&self.id)?);
        let error = fs::read(file).err().and_then(|error| error.raw_os_error());
        Ok(error == Some(Errno::ENOTCONN as i32))
    }

    fn comes_to_read(&self, content: &str) -> Result<()> {
        until(&format!("{} reads {content:?}", self.uid), || {
            Ok(self.content().is_ok_and(|read| read == content))
        })
    }

    fn remove(&self, node: &Node) -> Result<()> {
        self.cri.remove_pod(&self.sandbox)?;
        delete_pod(node, &self.uid)
    }
}

/// With the stock shim and with bindguard's. The host's mounts stay as the driver made them.
fn a_new_tmpfs_reaches_only_pods_that_opted_in(node: &Node) -> Result<()> {
    // An unknown word is reported, and the known words still count.
    let words = [("bindguard.io/refresh-binds", "volumes,host-dirs")];
    let files = [("bindguard.io/refresh", "true")];
    let started = |name, runtime, annotations| {
        let pod = node.kubelet().pod(&format!("uid-{name}"))?;
        let volume = CsiVolume::publish(&pod, "one")?;
        let running = volume.used(node, runtime, name, annotations)?;
        Ok::<_, anyhow::Error>((volume, running))
    };
    let others = started("out", "bindguard", &files[..])?;
    let opted_in = [
        started("stock", "runc", &OPTED_IN[..])?,
        started("guarded", "bindguard", &OPTED_IN[..])?,
        started("half", "runc", &words[..])?,
    ];
    let all = || opted_in.iter().chain([&others]);

    all().try_for_each(|(volume, _)| volume.mount_anew("two"))?;
    for (_, running) in all() {
        ensure!(running.content()? == "one", "without an agent");
    }
    let agent = Agent::start(node, "")?;
    for content in ["two", "three", "four"] {
        if content != "two" {
            all().try_for_each(|(volume, _)| volume.mount_anew(content))?;
        }
        let before = mounts::table()?;
        for (_, running) in &opted_in {
            running.comes_to_read(content)?;
        }
        ensure!(
            others.1.content()? == "one",
            "a pod that did not opt in to volumes was entered"
        );
        ensure!(mounts::table()? == before, "the host's mounts have changed");
    }
    ensure!(agent.figure(REPLACED) == 9.0, "{}", agent.get("/metrics"));
    until("the unknown word is counted", || {
        Ok(agent.figure("bindguard_refresh_requests_ignored") == 1.0)
    })?;
    it_is_journaled(&opted_in[0].1.id)?;
    a_pod_that_starts_later(node)?;
    all().try_for_each(|(_, running)| running.remove(node))
}

/// A pod opts in to files and volumes: one refresh replaces mounts of files and of volumes.
#[test]
fn a_container_with_files_and_a_volume() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let (cri, pod) = (node.cri()?, node.kubelet().pod("uid-both")?);
        let csi = CsiVolume::publish(&pod, "one")?;
        let conf = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
        let mounts = [
            mount(&csi.0, "/data", PropagationPrivate),
            mount(
                conf.subpath("app", 0, "app.conf").bind()?,
                "/etc/app.conf",
                PropagationPrivate,
            ),
        ];
        let annotations = [OPTED_IN[0], ("bindguard.io/refresh", "app")];
        let sandbox = cri.run_annotated_pod("runc", "both", pod.uid(), &annotations)?;
        let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        let side = cri.start_container(&sandbox, "side", &SLEEP, &mounts)?;
        let before = mounts::table_of(cri.pid(&app)?)?.len();
        let agent = Agent::start(node, "")?;
        for content in ["two", "three"] {
            csi.mount_anew(content)?;
            conf.update(&[("app.conf", content)])?;
            for (id, place) in [
                (&app, "/data/file"),
                (&app, "/etc/app.conf"),
                (&side, "/data/file"),
            ] {
                until("the container reads it", || {
                    Ok(cri.read(id, place).is_ok_and(|read| read == content))
                })?;
            }
        }
        ensure!(
            cri.read(&side, "/etc/app.conf")? == "one",
            "a container that is not named got a file"
        );
        ensure!(mounts::table_of(cri.pid(&app)?)?.len() == before);
        ensure!(agent.figure(FAILED) == 0.0, "{}", agent.get("/metrics"));
        cri.remove_pod(&sandbox)?;
        delete_pod(node, pod.uid())
    });
}

/// The agent learns of a pod when its containers start.
fn a_pod_that_starts_later(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("uid-later")?;
    let volume = CsiVolume::publish(&pod, "one")?;
    let running = volume.used(node, "runc", "later", &OPTED_IN)?;
    for content in ["two", "three"] {
        volume.mount_anew(content)?;
        running.comes_to_read(content)?;
    }
    running.remove(node)
}

/// The journal has a line for each refresh, and no line for the later checks.
fn it_is_journaled(id: &str) -> Result<()> {
    until("each refresh is journaled", || {
        let lines = journal::lines(JOURNAL)?.into_iter();
        let of_agent = lines.filter(|line| {
            let mount = &line["mounts"][0];
            line["kind"] == "refresh"
                && line["id"] == id
                && line["by"] == "agent"
                && mount["destination"] == "/data"
                && mount["outcome"]["result"] == "replaced"
        });
        Ok(of_agent.count() == 3)
    })
}

/// The host's subpath is re-bound first: a restart of the container finds it current as well.
#[test]
fn a_subpath_of_such_a_volume() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let pod = node.kubelet().pod("uid-sub")?;
        let volume = pod.empty_volume(VolumeKind::EmptyDirMemory, "data")?;
        let (subpath, folder) = (
            volume.subpath("app", 0, "folder"),
            volume.path().join("folder"),
        );
        let fill = |text: &str| -> Result<()> {
            fs::create_dir(&folder)?;
            Ok(fs::write(folder.join("file"), text)?)
        };
        fill("one")?;
        let used = CsiVolume(subpath.bind()?.to_owned());
        let running = used.used(node, "runc", "sub", &OPTED_IN)?;
        let _agent = Agent::start(node, "")?;
        for text in ["two", "three"] {
            CsiVolume(volume.path().to_owned()).unmount_lazily()?;
            tmpfs(volume.path(), "")?;
            fill(text)?;
            running.comes_to_read(text)?;
            ensure!(fs::read_to_string(subpath.target().join("file"))? == text);
        }
        running.remove(node)
    });
}

/// `/var/lib/kubelet` is a link to a larger disk. containerd writes the target into the spec.
#[test]
fn below_a_kubelet_root_that_is_a_link() {
    let linked = Setup::on(Generation::NEWEST).kubelet_root(KubeletRoot::Symlinked);
    linked.cri().story(|node| {
        let pod = node.kubelet().pod("uid-link")?;
        let volume = CsiVolume::publish(&pod, "one")?;
        let running = volume.used(node, "bindguard", "link", &OPTED_IN)?;
        volume.mount_anew("two")?;
        let words = ["refresh", "--pod", "default/link", "--what", "volumes"];
        let by_hand = node.bindguard(words)?;
        ensure!(
            by_hand.code() == 0 && by_hand.stdout.contains("replaced"),
            "{by_hand:?}"
        );
        ensure!(running.content()? == "two");
        let agent = Agent::start(node, "")?;
        for content in ["three", "four"] {
            volume.mount_anew(content)?;
            running.comes_to_read(content)?;
        }
        until("they are counted", || Ok(agent.figure(REPLACED) >= 1.0))?;
        running.remove(node)
    });
}

/// Off is off, also for a pod that opted in.
#[test]
fn a_node_that_refreshes_nothing() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let volume = CsiVolume::publish(&node.kubelet().pod("uid-off")?, "one")?;
        let running = volume.used(node, "runc", "off", &OPTED_IN)?;
        let _agent = Agent::start(node, "refresh.mode = 'off'\n")?;
        volume.mount_anew("two")?;
        stays(Duration::from_secs(3), "the old volume is read", || {
            Ok(running.content()? == "one")
        })?;
        running.remove(node)
    });
}

/// Its container gets "Transport endpoint is not connected" until the driver is back.
#[test]
fn a_fuse_daemon_that_dies() {
    if let Some(why) = FuseDaemon::missing() {
        return skipped(why);
    }
    Setup::on(Generation::NEWEST)
        .cri()
        .story(|node| a_daemon_dies(node, &FuseDaemon::mounted));
}

/// Kills the FUSE daemons that CSI drivers run.
#[test]
#[ignore = "needs rclone, sshfs, s3fs and s3s-fs: make refresh-apps"]
fn rclone_sshfs_and_s3fs_that_die() {
    if let Some(why) = FuseDaemon::missing() {
        return skipped(why);
    }
    Setup::on(Generation::NEWEST).cri().story(|node| {
        for program in ["rclone", "sshfs", "s3fs"] {
            ensure!(has_program(program), "no {program}: make refresh-apps");
        }
        let server = S3Server::start(node, node.disk())?;
        let s3fs = |node: &Node, folder: &Path, place: &Path| {
            let bucket = folder.file_name().context("a bucket has no name")?;
            FuseDaemon::s3fs(node, &server, bucket, place)
        };
        let drivers: [(&str, &Driver); 3] = [
            ("rclone", &FuseDaemon::rclone),
            ("sshfs", &FuseDaemon::sshfs),
            ("s3fs", &s3fs),
        ];
        drivers
            .into_iter()
            .try_for_each(|(name, driver)| a_daemon_dies(node, driver).context(name))
    });
}

/// Starts a daemon that shows a folder, which has a file `file`, at a place.
type Driver<'d> = dyn Fn(&Node, &Path, &Path) -> Result<FuseDaemon> + 'd;

fn a_daemon_dies(node: &Node, driver: &Driver) -> Result<()> {
    let folder = node.disk().join("bucket");
    fs::create_dir_all(&folder)?;
    let agent = Agent::start(node, "")?;
    let mounts_of_node = || -> Result<Vec<_>> {
        let table = mounts::table()?.into_iter().map(|mount| mount.target);
        Ok(table.filter(|path| path.starts_with(node.disk())).collect())
    };
    let without_pods = mounts_of_node()?;
    let pods = [
        ("fuse-in", "bindguard", &OPTED_IN[..]),
        ("fuse-out", "bindguard", &[]),
        ("fuse-stock", "runc", &[]),
    ];
    for (name, runtime, annotations) in pods {
        fs::write(folder.join("file"), "one")?;
        let volume = CsiVolume::unpublished(&node.kubelet().pod(&format!("uid-{name}"))?)?;
        let mut daemon = driver(node, &folder, &volume.0)?;
        let running = volume.used(node, runtime, name, annotations)?;
        running.comes_to_read("one")?;
        for content in ["two", "three"] {
            drop(daemon);
            ensure!(running.reads_a_dead_volume()?, "its daemon is dead");
            volume.unmount_lazily()?;
            fs::write(folder.join("file"), content)?;
            daemon = driver(node, &folder, &volume.0)?;
            let before = mounts::table()?;
            match annotations {
                [] => stays(Duration::from_secs(1), "the dead volume stays", || {
                    running.reads_a_dead_volume()
                })?,
                _ => running.comes_to_read(content)?,
            }
            ensure!(mounts::table()? == before, "the host's mounts have changed");
        }
        drop(daemon);
        running.remove(node)?;
    }
    ensure!(agent.figure(REPLACED) == 2.0, "{}", agent.get("/metrics"));
    until("no mount is left", || Ok(mounts_of_node()? == without_pods))
}

/// A lookup in a dead volume makes the kernel detach the mounts in it: the emptyDir comes back with
/// the volume.
#[test]
fn an_empty_dir_within_the_volume_of_a_daemon_that_dies() {
    if let Some(why) = FuseDaemon::missing() {
        return skipped(why);
    }
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let (folder, pod) = (node.disk().join("bucket"), node.kubelet().pod("uid-in")?);
        fs::create_dir_all(folder.join("cache"))?;
        fs::write(folder.join("file"), "one")?;
        let volume = CsiVolume::unpublished(&pod)?;
        let mut daemon = FuseDaemon::mounted(node, &folder, &volume.0)?;
        let cache = pod.empty_volume(VolumeKind::EmptyDir, "cache")?;
        fs::write(cache.path().join("file"), "cached")?;
        let agent = Agent::start(node, "")?;
        for runtime in ["bindguard", "runc"] {
            let cri = node.cri()?;
            let sandbox = cri.run_annotated_pod(runtime, runtime, pod.uid(), &OPTED_IN)?;
            let mounts = [
                mount(&volume.0, "/data", PropagationPrivate),
                mount(cache.path(), "/data/cache", PropagationPrivate),
            ];
            let id = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
            for content in ["two", "three"] {
                drop(daemon);
                until("the emptyDir is lost", || {
                    Ok(cri.read(&id, "/data/cache/file").is_err())
                })?;
                volume.unmount_lazily()?;
                fs::write(folder.join("file"), content)?;
                daemon = FuseDaemon::mounted(node, &folder, &volume.0)?;
                let before = mounts::table()?;
                for (place, content) in [("/data/file", content), ("/data/cache/file", "cached")] {
                    until("the container reads it", || {
                        Ok(cri.read(&id, place).is_ok_and(|read| read == content))
                    })?;
                }
                ensure!(mounts::table()? == before, "the host's mounts have changed");
            }
            cri.remove_pod(&sandbox)?;
        }
        ensure!(agent.figure(REPLACED) == 4.0, "{}", agent.get("/metrics"));
        drop(daemon);
        delete_pod(node, pod.uid())
    });
}

/// A FUSE mount is in the mount table before its daemon answers: until then the container keeps
/// what it has, and does not hang.
#[test]
fn a_fuse_daemon_that_answers_late() {
    if let Some(why) = FuseDaemon::missing() {
        return skipped(why);
    }
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let (folder, place) = (node.disk().join("bucket"), node.disk().join("served"));
        [&folder, &place].into_iter().try_for_each(fs::create_dir)?;
        fs::write(folder.join("file"), "two")?;
        let daemon = FuseDaemon::mounted(node, &folder, &place)?;
        let volume = CsiVolume::publish(&node.kubelet().pod("uid-late")?, "one")?;
        let running = volume.used(node, "runc", "late", &OPTED_IN)?;
        let agent = Agent::start(node, "")?;
        daemon.signal(Signal::SIGSTOP)?;
        until("bindfs is stopped", || is_stopped(daemon.pid()))?;
        volume.unmount_lazily()?;
        bind(&place, &volume.0)?;
        until("the new mount is probed in vain", || {
            Ok(agent.figure(REFUSED) >= 1.0)
        })?;
        ensure!(running.content()? == "one", "it was replaced");
        daemon.signal(Signal::SIGCONT)?;
        running.comes_to_read("two")?;
        running.remove(node)?;
        unmount(&place)
    });
}
