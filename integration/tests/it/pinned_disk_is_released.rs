//! A monitoring pod of a shim without a guard has the host's `/` as a private bind. So the pod
//! keeps a disk and a network namespace that the host has given up. A refresh of the bind releases
//! both while the pod runs on.

use bindguard_integration::prelude::*;
use bindguard_testing::test_if;
use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;

use bindguard_integration::journal;
use bindguard_integration::mounts;
use bindguard_integration::privilege::{has_program, skipped};
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use nix::libc;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const REPLACED: &str = "bindguard_refreshes_total{outcome=\"replaced\"}";

fn can_run() -> bool {
    let programs = ["losetup", "mkfs.ext4", "ip"];
    let can = Path::new("/dev/loop-control").exists() && programs.into_iter().all(has_program);
    if !can {
        skipped("no loop devices, or no losetup, mkfs.ext4 or ip");
    }
    can
}

#[test_if(can_run)]
fn by_hand() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let kept = Kept::made(node, "hand")?;
        let running = Running::start(node, "hand", &[])?;
        kept.is_given_up_by_the_host()?;
        let before = mounts::table()?;
        let command = "bindguard refresh --pod default/exporter --what host-root";
        let diagnosed = node.bindguard(["diagnose", "--pod", "default/exporter"])?;
        ensure!(
            diagnosed.code() == 1
                && diagnosed.stdout.contains("pinned")
                && diagnosed.stdout.contains(command),
            "{diagnosed:?}"
        );
        let looked = refresh(node, &["--dry-run"])?;
        ensure!(
            looked.code() == 1 && looked.stdout.contains("/host of default/exporter/app"),
            "{looked:?}"
        );
        kept.is_held()?;
        let done = refresh(node, &[])?;
        ensure!(
            done.code() == 0 && done.stdout.contains("replaced"),
            "{done:?}"
        );
        ensure!(mounts::table()? == before, "the host's mounts have changed");
        kept.is_released()?;
        running.follows_the_host(node)?;
        let again = refresh(node, &[])?;
        ensure!(
            again.code() == 0 && !again.stdout.contains("replaced"),
            "{again:?}"
        );
        running.remove()
    });
}

#[test_if(can_run)]
fn by_the_agent() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let kept = Kept::made(node, "agent")?;
        let opted_in = [("bindguard.io/refresh-binds", "volumes,host-root")];
        let running = Running::start(node, "agent", &opted_in)?;
        kept.is_given_up_by_the_host()?;
        let before = mounts::table()?;
        let agent = Agent::start(node, "")?;
        kept.is_released()?;
        ensure!(mounts::table()? == before, "the host's mounts have changed");
        ensure!(agent.figure(REPLACED) == 1.0, "{}", agent.get("/metrics"));
        running.follows_the_host(node)?;
        running.remove()
    });
}

/// The stock shim makes the bind of the new container private again.
#[test_if(can_run)]
fn by_the_agent_after_a_restart_of_the_container() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let agent = Agent::start(node, "")?;
        let opted_in = [("bindguard.io/refresh-binds", "host-root")];
        let mut running = Running::start(node, "again", &opted_in)?;
        let replaced = |count: f64| {
            until("the agent has replaced the bind", || {
                Ok(agent.figure(REPLACED) == count)
            })
        };
        replaced(1.0)?;
        running.restart()?;
        replaced(2.0)?;
        running.follows_the_host(node)?;
        running.remove()
    });
}

/// The agent enters no pod that did not opt in, and no command changes what policy only reports.
#[test_if(can_run)]
fn unless_policy_only_reports() {
    let only_reports = Setup::on(Generation::NEWEST).policy("[checks]\nhost-root = \"report\"\n");
    only_reports.cri().story(|node| {
        let kept = Kept::made(node, "report")?;
        let running = Running::start(node, "report", &[])?;
        kept.is_given_up_by_the_host()?;
        let reported = refresh(node, &[])?;
        ensure!(
            reported.code() == 1 && reported.stdout.contains("policy only reports"),
            "{reported:?}"
        );
        kept.is_held()?;
        running.remove()?;
        kept.is_released()
    });
}

/// Under bindguard's shim, on a node whose policy leaves the bind private: the record of the create
/// shows that the disk is a copy. Under the stock shim no record does.
#[test_if(can_run)]
fn one_by_one_without_a_refresh() {
    let only_reports = Setup::on(Generation::NEWEST).policy("[checks]\nhost-root = \"report\"\n");
    only_reports.cri().story(|node| {
        let kept = Kept::made(node, "release")?;
        let stock = Running::start_with(node, "runc", "stock", &[])?;
        let guarded = Running::start_with(node, "bindguard", "release", &[])?;
        let idle = Running::start_with(node, "bindguard", "idle", &[])?;
        let user = guarded.opens(&kept.place)?;
        kept.is_given_up_by_the_host()?;
        let place = kept.place.to_string_lossy().into_owned();
        let release = |more: &[&str]| {
            let words = ["release", &place].into_iter();
            node.bindguard(words.chain(more.iter().copied()))
        };
        let looked = release(&["--dry-run"])?;
        ensure!(
            looked.code() == 1
                && looked.stdout.contains("kept")
                && looked
                    .stdout
                    .contains("the create of the container was not recorded"),
            "{looked:?}"
        );
        let before = mounts::table()?;
        let busy = release(&[])?;
        ensure!(
            busy.code() == 1
                && busy.stdout.contains(&format!("by tail ({user})"))
                && busy.stdout.contains("released"),
            "{busy:?}"
        );
        ensure!(mounts::table()? == before, "the host's mounts have changed");
        shows_in_the_journal(node)?;
        [stock, idle].iter().try_for_each(Running::remove)?;
        let lazy = release(&["--lazy"])?;
        ensure!(
            lazy.code() == 0
                && lazy.stdout.contains(&format!("by tail ({user})"))
                && lazy.stdout.contains("the device stays busy"),
            "{lazy:?}"
        );
        kept.is_held()?;
        guarded.closes(user)?;
        until("the disk is free", || Ok(kept.opened_alone().is_ok()))?;
        guarded.cri.exec(&guarded.id, &["true"])?;
        // `ip netns add` binds /run/netns onto itself, and a second copy is hidden below.
        let hidden = node.bindguard(["release", "/run/netns"])?;
        ensure!(
            hidden.code() == 1 && hidden.stdout.contains("another mount has its place"),
            "{hidden:?}"
        );
        guarded.remove()?;
        kept.is_released()
    });
}

/// The journal has a line for each container, and no line for the dry run.
fn shows_in_the_journal(node: &Node) -> Result<()> {
    let lines = journal::lines(JOURNAL)?.into_iter();
    let releases: Vec<_> = lines.filter(|line| line["kind"] == "release").collect();
    let mut results: Vec<_> = releases
        .iter()
        .map(|line| line["copies"][0]["result"].as_str().unwrap_or_default())
        .collect();
    results.sort_unstable();
    ensure!(results == ["busy", "refused", "released"], "{releases:#?}");
    let shown = node.bindguard(["journal"])?;
    ensure!(
        shown.code() == 1
            && shown
                .stdout
                .contains("copies of unmounted mounts, by an operator")
            && shown
                .stdout
                .contains("3 refreshes and repairs between creates, 2 of them"),
        "{shown:?}"
    );
    Ok(())
}

/// In a debug pod, or under `unshare --mount`, the mounts of the command are not the node's: a disk
/// that is not mounted there may well be mounted on the node.
#[test_if(can_run)]
fn by_no_command_in_another_mount_namespace() {
    let only_reports = Setup::on(Generation::NEWEST).policy("[checks]\nhost-root = \"report\"\n");
    only_reports.cri().story(|node| {
        let kept = Kept::made(node, "elsewhere")?;
        let guarded = Running::start_with(node, "bindguard", "elsewhere", &[])?;
        let inside = format!("/host{}/file", kept.place.display());
        for words in [
            "release \"$1\"",
            "refresh --pod default/exporter --what host-root",
        ] {
            let mut command = node.command("unshare")?;
            command.args(["--mount", "--propagation", "private", "sh", "-ec"]);
            command.arg(format!("umount \"$1\"; exec \"$0\" {words}"));
            command.args([&node.under_test().join(CLI), &kept.place]);
            let ended = run(command)?;
            ensure!(
                ended.code() == 2 && format!("{ended:?}").contains("another mount namespace"),
                "{ended:?}"
            );
            ensure!(guarded.cri.read(&guarded.id, &inside)? == "content");
        }
        guarded.remove()?;
        kept.is_unmounted_by_the_host()?;
        kept.is_released()
    });
}

/// A container that ended has no mounts; a container whose spec cannot be read may have copies.
#[test]
fn unless_a_spec_cannot_be_read() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let ctr = node.ctr();
        let ended = ctr.container("ended").runtime(Runtime::Stock);
        let ended = ended.mount(Bind::new("/", "/host")).runs(&["true"]);
        ended.start()?.success()?;
        ctr.wait_for_status("ended", "STOPPED")?;
        let nothing = node.bindguard(["release", "/mnt"])?;
        ensure!(
            nothing.code() == 0
                && nothing
                    .stdout
                    .contains("bindguard holders /mnt lists every mount namespace"),
            "{nothing:?}"
        );
        ctr.remove("ended")?;
        let running = Running::start(node, "broken", &[])?;
        let tasks = Path::new("/run/containerd/io.containerd.runtime.v2.task/k8s.io");
        let config = tasks.join(&running.id).join("config.json");
        let spec = fs::read(&config)?;
        fs::write(&config, "{\"mounts\": 7}")?;
        let unknown = node.bindguard(["release", "/mnt"])?;
        fs::write(&config, spec)?;
        ensure!(
            unknown.code() == 2
                && unknown
                    .stdout
                    .contains("problem    release mounts of default/exporter/app")
                && !unknown.stdout.contains("no private bind"),
            "{unknown:?}"
        );
        running.remove()
    });
}

fn refresh(node: &Node, more: &[&str]) -> Result<Finished> {
    let words = [
        "refresh",
        "--pod",
        "default/exporter",
        "--what",
        "host-root",
    ];
    node.bindguard(words.iter().chain(more))
}

/// The pod with the host's `/`.
struct Running {
    cri: Cri,
    sandbox: Sandbox,
    id: String,
}

impl Running {
    fn start(node: &Node, name: &str, annotations: &[(&str, &str)]) -> Result<Self> {
        Self::start_with(node, "runc", name, annotations)
    }

    fn start_with(
        node: &Node,
        runtime: &str,
        name: &str,
        annotations: &[(&str, &str)],
    ) -> Result<Self> {
        let (cri, uid) = (node.cri()?, format!("uid-{name}"));
        node.kubelet().pod(&uid)?;
        let pod = match name {
            "stock" | "idle" => name,
            _ => "exporter",
        };
        let sandbox = cri.run_annotated_pod(runtime, pod, &uid, annotations)?;
        let id = start_app(&cri, &sandbox)?;
        Ok(Self { cri, sandbox, id })
    }

    /// As the kubelet replaces a container that ended.
    fn restart(&mut self) -> Result<()> {
        self.cri.stop(&self.id, 0)?;
        self.cri.remove(&self.id)?;
        self.id = start_app(&self.cri, &self.sandbox)?;
        Ok(())
    }

    /// The host's later mounts and umounts arrive in the container, which runs on.
    fn follows_the_host(&self, node: &Node) -> Result<()> {
        let later = node.disk().join("later");
        fs::create_dir(&later)?;
        tmpfs(&later, "")?;
        fs::write(later.join("file"), "later")?;
        let inside = format!("/host{}/file", later.display());
        ensure!(self.cri.read(&self.id, &inside)? == "later");
        unmount(&later)?;
        ensure!(self.cri.read(&self.id, &inside).is_err(), "it is kept");
        Ok(())
    }

    /// A process of the container has a file of the disk open. Returns its pid.
    fn opens(&self, place: &Path) -> Result<u32> {
        let file = format!("/host{}/file", place.display());
        let tail = format!("tail -f {file} >/dev/null 2>&1 </dev/null &");
        self.cri.exec(&self.id, &["sh", "-c", &tail])?;
        let mut found = None;
        until("tail has opened the file", || {
            found = process_with_open(&file)?;
            Ok(found.is_some())
        })?;
        found.context("the pid of tail")
    }

    fn closes(&self, user: u32) -> Result<()> {
        host(["kill", &user.to_string()])?;
        // The container's init does not reap the process.
        let file = Path::new("/proc").join(user.to_string()).join("fd/3");
        until("tail has ended", || Ok(fs::read_link(&file).is_err()))
    }

    fn remove(&self) -> Result<()> {
        self.cri.remove_pod(&self.sandbox)
    }
}

fn start_app(cri: &Cri, sandbox: &Sandbox) -> Result<String> {
    let root = [mount("/".as_ref(), "/host", PropagationPrivate)];
    cri.start_container(sandbox, "app", &SLEEP, &root)
}

/// The process whose descriptor 3 is this file, by the path in its mount namespace.
fn process_with_open(file: &str) -> Result<Option<u32>> {
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let links = fs::read_link(process.path().join("fd/3"));
        if links.is_ok_and(|link| link == Path::new(file)) {
            let name = process.file_name();
            return Ok(name.to_str().and_then(|pid| pid.parse().ok()));
        }
    }
    Ok(None)
}

/// A disk and a network namespace that the host has mounted.
struct Kept {
    device: PathBuf,
    image: String,
    place: PathBuf,
    namespace: String,
    /// The host's end of a veth into the network namespace.
    link: String,
    /// A parallel story may have the loop device by then.
    is_detached: Cell<bool>,
}

impl Kept {
    fn made(node: &Node, name: &str) -> Result<Self> {
        let (image, place) = (node.disk().join("image"), node.disk().join("mnt"));
        fs::create_dir(&place)?;
        File::create(&image)?.set_len(8 << 20)?;
        let image = image.to_str().context("the image's path is UTF-8")?;
        host(["mkfs.ext4", "-q", image])?;
        let device = host(["losetup", "--find", "--show", image])?;
        let kept = Self {
            device: device.trim().into(),
            image: image.to_owned(),
            place,
            namespace: format!("bg-{name}"),
            link: format!("bg-{name}-0"),
            is_detached: Cell::new(false),
        };
        host([
            "mount".as_ref(),
            kept.device.as_os_str(),
            kept.place.as_os_str(),
        ])?;
        fs::write(kept.place.join("file"), "content")?;
        host(["ip", "netns", "add", &kept.namespace])?;
        let peer = format!("bg-{name}-1");
        host(
            ["ip", "link", "add", &kept.link, "type", "veth"]
                .into_iter()
                .chain(["peer", "name", &peer, "netns", &kept.namespace]),
        )?;
        Ok(kept)
    }

    fn is_given_up_by_the_host(&self) -> Result<()> {
        self.is_unmounted_by_the_host()?;
        self.is_held()
    }

    fn is_unmounted_by_the_host(&self) -> Result<()> {
        unmount(&self.place)?;
        // `ip netns delete` also removes the file, which would detach the copy as well.
        unmount(Path::new("/run/netns").join(&self.namespace))
    }

    fn is_held(&self) -> Result<()> {
        let opened = self.opened_alone().map_err(|error| error.raw_os_error());
        ensure!(
            matches!(opened, Err(Some(libc::EBUSY))),
            "{}: {opened:?}",
            self.device.display()
        );
        ensure!(self.has_link(), "the network namespace is gone");
        Ok(())
    }

    fn is_released(&self) -> Result<()> {
        until("the disk and the network namespace are free", || {
            Ok(self.opened_alone().is_ok() && !self.has_link())
        })?;
        host([
            "losetup".as_ref(),
            "--detach".as_ref(),
            self.device.as_os_str(),
        ])?;
        self.is_detached.set(true);
        // Without a file the kernel does not show the folder.
        let file = Path::new("/sys/block").join(self.device.file_name().context("its name")?);
        until("the loop device is free", || {
            let backing = fs::read_to_string(file.join("loop/backing_file"));
            Ok(backing.map_or(true, |backing| !backing.starts_with(&self.image)))
        })
    }

    /// As mkfs(8) opens a device: a mounted device is busy.
    fn opened_alone(&self) -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(&self.device)
    }

    fn has_link(&self) -> bool {
        Path::new("/sys/class/net").join(&self.link).exists()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if !self.is_detached.get() {
            let _ = host([
                "losetup".as_ref(),
                "--detach".as_ref(),
                self.device.as_os_str(),
            ]);
        }
        let _ = host(["ip", "link", "delete", &self.link]);
    }
}
