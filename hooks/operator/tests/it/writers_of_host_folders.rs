//! The containers that can lead the way to a host file elsewhere: all with a live mount namespace,
//! recorded or not. A container whose mounts are not known blocks the paths that it could reach.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use bindguard_core::places::Places;
use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, REPLACE_TIMEOUT, RefreshAct, Refreshed,
    RunningContainers, TuckRecords, refresh_container,
};
use bindguard_operator::writers::ContainersOfNode;
use bindguard_testing::hostile_process::{self, HostileProcess, Step, errno};
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{deny_call, helper, mount_of, mount_tmpfs, own_namespace};
use nix::errno::Errno;
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};
use serde_json::{Value, json};

/// `-v P/link/.env:/app/.env:ro`, where root alone may write P, and `link` is root's link to
/// `conf`. The runtimes' records are below `node`.
struct Scene {
    folder: PathBuf,
    node: tempfile::TempDir,
    root: tempfile::TempDir,
    attacker: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// The hidden namespace of a parallel test has no record at this test's node.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const OTHER: &str = "bystander";

impl Scene {
    fn new() -> Option<Self> {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if !own_namespace() {
            return None;
        }
        let tmpfs = Some("tmpfs");
        mount(tmpfs, "/mnt", tmpfs, MsFlags::empty(), Some("mode=755")).unwrap();
        let scene = Self {
            folder: "/mnt/p".into(),
            node: tempfile::tempdir().unwrap(),
            root: tempfile::tempdir().unwrap(),
            attacker: tempfile::tempdir().unwrap(),
            _alone: alone,
        };
        for name in ["conf", "secret", "other", "data/app", "volume"] {
            fs::create_dir_all(scene.at(name)).unwrap();
        }
        fs::write(scene.at("conf/.env"), "0").unwrap();
        fs::write(scene.at("data/app/.env"), "0").unwrap();
        fs::write(scene.at("secret/.env"), "SECRET").unwrap();
        symlink("conf", scene.at("link")).unwrap();
        Some(scene)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Records a container as crun does. Returns its bundle.
    fn record(&self, id: &str, pid: u32, spec: &Value) -> PathBuf {
        let bundle = self.node.path().join("bundles").join(id);
        let state = self.node.path().join("run/crun").join(id);
        fs::create_dir_all(&bundle).unwrap();
        fs::create_dir_all(&state).unwrap();
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let status = json!({"pid": pid, "process-start-time": 1, "bundle": bundle});
        fs::write(state.join("status"), status.to_string()).unwrap();
        bundle
    }

    /// Starts a recorded container with the file at `/app/.env`.
    fn victim(&self, source: &str) -> Container {
        let bind = Inside::of(self.at(source), "app/.env");
        let container = Container::start(self.root.path(), &[bind]);
        let spec = json!({"mounts": [mount_of(&self.at(source), "/app/.env", "rprivate")]});
        self.record("victim", container.process.pid(), &spec);
        container
    }

    fn refresh(&self, container: &Container, source: &str) -> Refreshed {
        let spec = json!({"mounts": [mount_of(&self.at(source), "/app/.env", "rprivate")]});
        let spec = spec.to_string().into_bytes();
        let binds = FileBind::of_spec(&SpecView::from_bytes(&spec).unwrap());
        let running = ContainersOfNode(self.node.path().to_owned());
        let (files, _) = BoundFiles::open(binds, container.process.pid(), &running);
        self.refresh_with(container, &files)
    }

    fn refresh_with(&self, container: &Container, files: &dyn CurrentFiles) -> Refreshed {
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[files],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::at(&self.at("tucks")),
        )
        .unwrap()
    }

    /// As an editor does it.
    fn write(&self, content: &str) {
        fs::write(self.at("conf/new"), content).unwrap();
        fs::rename(self.at("conf/new"), self.at("conf/.env")).unwrap();
    }

    /// A recorded container whose init hides its mounts in namespaces of its own, with this
    /// writable bind.
    fn hiding(&self, bind: &str, spec: &Value) -> HostileProcess {
        let binds = [Inside::writable(self.at(bind), "data")];
        let mut hiding = HostileProcess::start(self.attacker.path(), &binds, None, &HIDING);
        self.record(OTHER, hiding.process.pid(), spec);
        assert_eq!([0, 1].map(|step| hiding.does(step)), [0, 0]);
        hiding
    }

    /// The spec of a container with a writable bind of this folder and no capability.
    fn plain(&self, bind: &str) -> Value {
        let mut bind = mount_of(&self.at(bind), "/data", "rprivate");
        bind["options"] = json!(["rbind", "rw", "rprivate"]);
        json!({"process": {"capabilities": {}}, "mounts": [bind]})
    }
}

/// `unshare -Urm` without a privilege, then a new root: the bind is in no mount table any more, and
/// an open directory could still lead to the bind.
const HIDING: [Step; 2] = [
    || {
        let own = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS;
        errno(unshare(own)) | hostile_process::map_to_root(0)
    },
    || {
        let (tmpfs, none) = (Some("tmpfs"), None::<&str>);
        let empty = mount(tmpfs, "/old", tmpfs, MsFlags::empty(), none);
        let enter = empty
            .and_then(|()| chdir("/old"))
            .and_then(|()| pivot_root(".", "."));
        errno(enter.and_then(|()| umount2(".", MntFlags::MNT_DETACH)))
    },
];

/// The reason for which the only mount was refused, and its text.
fn refused(refreshed: &Refreshed) -> Option<(RefusedReason, String)> {
    let [mount] = &refreshed.mounts[..] else {
        panic!("{refreshed:?}");
    };
    match mount.outcome.clone() {
        MountResult::Refused(Refused { reason, .. }) => {
            let text = mount.reason().unwrap_or_default().into_owned();
            Some((reason, text))
        }
        _ => None,
    }
}

/// A single unprivileged container stopped the refreshes of all host files of the node.
#[test]
fn a_container_that_hides_its_mounts_blocks_no_path_out_of_its_reach() {
    let Some(scene) = Scene::new() else { return };
    let victim = scene.victim("link/.env");
    let _hiding = scene.hiding("other", &scene.plain("other"));
    scene.write("1");
    let refreshed = scene.refresh(&victim, "link/.env");
    assert_eq!(refused(&refreshed), None);
    assert_eq!(victim.read("app/.env").as_deref(), Some("1"));
}

/// The way to a volume of Docker relies on all its folders.
#[test]
fn a_container_that_hides_its_mounts_blocks_no_volume_out_of_its_reach() {
    let Some(scene) = Scene::new() else { return };
    let volume = scene.at("volume");
    mount_tmpfs(&volume);
    fs::write(volume.join("0"), "1").unwrap();
    let victim = Container::start(scene.root.path(), &[Inside::of(volume.clone(), "data")]);
    let spec = json!({"mounts": [mount_of(&volume, "/data", "rprivate")]});
    let bundle = scene.record("victim", victim.process.pid(), &spec);
    let _hiding = scene.hiding("other", &scene.plain("other"));
    umount2(&volume, MntFlags::MNT_DETACH).unwrap();
    mount_tmpfs(&volume);
    fs::write(volume.join("0"), "2").unwrap();
    let running = ContainersOfNode(scene.node.path().to_owned());
    let mounts = BoundMounts::of_engine(&bundle, &running, &Places::default(), None).unwrap();
    let refreshed = scene.refresh_with(&victim, &mounts);
    assert_eq!(refused(&refreshed), None);
    assert_eq!(victim.read("data/0").as_deref(), Some("2"));
}

/// The spec shows the mounts of a container only if nothing else can have made a mount.
#[test]
fn a_container_that_hides_its_mounts_and_could_reach_the_path_is_named() {
    let Some(scene) = Scene::new() else { return };
    let victim = scene.victim("link/.env");
    let other = |change: fn(&mut Value)| {
        let mut spec = scene.plain("other");
        change(&mut spec);
        spec
    };
    let sets = |name: &str| json!({name: ["CAP_SYS_ADMIN"]});
    for (case, bind, spec) in [
        ("a writable bind of the folder", "", scene.plain("")),
        ("CAP_SYS_ADMIN", "other", {
            let mut spec = scene.plain("other");
            spec["process"]["capabilities"] = sets("bounding");
            spec
        }),
        (
            "no list of capabilities",
            "other",
            other(|spec| spec["process"] = json!({})),
        ),
        (
            "a hook",
            "other",
            other(|spec| spec["hooks"] = json!({"createContainer": [{"path": "/h"}]})),
        ),
        (
            "a block device",
            "other",
            other(|spec| {
                let disk = json!({"path": "/dev/sda", "type": "b", "major": 8, "minor": 0});
                spec["linux"] = json!({"devices": [disk]});
            }),
        ),
        (
            "a slave of the host's mount",
            "other",
            other(|spec| spec["mounts"][0]["options"] = json!(["rbind", "rw", "rslave"])),
        ),
        (
            "a peer of the host's mount",
            "other",
            other(|spec| spec["mounts"][0]["options"] = json!(["rbind", "rw", "rshared"])),
        ),
    ] {
        let hiding = scene.hiding(bind, &spec);
        scene.write("1");
        let refreshed = scene.refresh(&victim, "link/.env");
        let Some((_, text)) = refused(&refreshed) else {
            panic!("{case}: {refreshed:?}");
        };
        assert_eq!(victim.read("app/.env").as_deref(), Some("0"), "{case}");
        let pid = hiding.process.pid().to_string();
        assert!(
            text.contains(OTHER) || text.contains(&pid),
            "{case}: the refusal does not name the container: {text}"
        );
    }
}

/// Kata, LXC, nspawn, a runtime with another state folder.
#[test]
fn a_writer_without_a_record_leads_to_no_file() {
    let Some(scene) = Scene::new() else { return };
    let victim = scene.victim("data/app/.env");
    let binds = [Inside::writable(scene.at("data"), "data")];
    let writer = Container::start(scene.attacker.path(), &binds);
    writer.run_inside(|| {
        fs::rename("/data/app", "/data/old").unwrap();
        symlink("/mnt/p/secret", "/data/app").unwrap();
    });
    let refreshed = scene.refresh(&victim, "data/app/.env");
    assert_eq!(
        victim.read("app/.env").as_deref(),
        Some("0"),
        "{refreshed:?}"
    );
    let reason = refused(&refreshed).map(|(reason, _)| reason);
    assert_eq!(reason, Some(RefusedReason::LinkBelowWritableBind));
}

/// An agent without a free descriptor took every container for one that ended.
#[test]
fn a_container_that_cannot_be_opened_is_not_left_out() {
    let Some(scene) = Scene::new() else { return };
    let binds = [Inside::writable(scene.at("data"), "data")];
    let writer = Container::start(scene.attacker.path(), &binds);
    scene.record(OTHER, writer.process.pid(), &scene.plain("data"));
    let node = scene.node.path().to_owned();
    let found = thread::spawn(move || {
        deny_call(libc::SYS_pidfd_open, Errno::EMFILE);
        let mut writers = ContainersOfNode(node).writers();
        writers.any(|writer| writer.name == format!("container {OTHER}"))
    });
    assert!(found.join().unwrap());
}

/// The init is in a namespace without the bind, and another process is still in the container's.
#[test]
fn a_writer_whose_init_left_its_namespace_leads_to_no_file() {
    let Some(scene) = Scene::new() else { return };
    let victim = scene.victim("data/app/.env");
    let binds = [Inside::writable(scene.at("data"), "data")];
    let writer = Container::start(scene.attacker.path(), &binds);
    // The record names a process without the bind, as if the init had been moved.
    let elsewhere = tempfile::tempdir().unwrap();
    let init = Container::start(elsewhere.path(), &[]);
    scene.record(OTHER, init.process.pid(), &scene.plain("data"));
    writer.run_inside(|| {
        fs::rename("/data/app", "/data/old").unwrap();
        symlink("/mnt/p/secret", "/data/app").unwrap();
    });
    let refreshed = scene.refresh(&victim, "data/app/.env");
    assert_eq!(
        victim.read("app/.env").as_deref(),
        Some("0"),
        "{refreshed:?}"
    );
    assert!(refused(&refreshed).is_some(), "{refreshed:?}");
}

/// With the right to mount, a container needs no namespace of its own to hide a bind.
#[test]
fn a_writer_that_unmounted_its_bind_leads_to_no_file() {
    let Some(scene) = Scene::new() else { return };
    let victim = scene.victim("data/app/.env");
    let binds = [Inside::writable(scene.at("data"), "data")];
    let writer = Container::start(scene.attacker.path(), &binds);
    let mut spec = scene.plain("data");
    spec["process"]["capabilities"] = json!({"bounding": ["CAP_SYS_ADMIN"]});
    scene.record(OTHER, writer.process.pid(), &spec);
    writer.run_inside(|| {
        fs::rename("/data/app", "/data/old").unwrap();
        symlink("/mnt/p/secret", "/data/app").unwrap();
        umount2("/data", MntFlags::MNT_DETACH).unwrap();
    });
    let refreshed = scene.refresh(&victim, "data/app/.env");
    assert_eq!(
        victim.read("app/.env").as_deref(),
        Some("0"),
        "{refreshed:?}"
    );
    let Some((reason, text)) = refused(&refreshed) else {
        panic!("{refreshed:?}");
    };
    assert_eq!(reason, RefusedReason::LinkBelowWritableBind);
    assert!(text.contains(OTHER), "{text}");
}

/// A process that ends with this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rootless Podman, bubblewrap, a browser: any user of the node may make namespaces. The user could
/// write no folder that root alone may write.
#[test]
fn a_user_of_the_node_in_namespaces_of_its_own_blocks_no_file() {
    let Some(scene) = Scene::new() else { return };
    let victim = scene.victim("link/.env");
    // Without -r, the user namespace maps no ids.
    for options in ["-Urm", "-Um"] {
        blocks_no_file(&scene, &victim, options);
    }
}

fn blocks_no_file(scene: &Scene, victim: &Container, options: &str) {
    let mut command = Command::new("unshare");
    command.args([options, "sleep", "1000"]).uid(1000).gid(1000);
    let user = Running(command.current_dir("/").spawn().unwrap());
    let namespace = |pid: &str| fs::read_link(Path::new("/proc").join(pid).join("ns/user"));
    let start = Instant::now();
    while namespace(&user.0.id().to_string()).ok() == namespace("self").ok() {
        assert!(start.elapsed() < Duration::from_secs(60), "no namespaces");
        sleep(Duration::from_millis(5));
    }
    scene.write(options);
    let refreshed = scene.refresh(victim, "link/.env");
    assert_eq!(refused(&refreshed), None, "{options}");
    assert_eq!(victim.read("app/.env").as_deref(), Some(options));
}
