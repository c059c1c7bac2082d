//! A container that can write a folder on the way to its file: it must not get a file of the host
//! that no bind gives it.

use crate::refresh_scene::running::{RunningContainer, RunningInits};
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindguard_core::refresh::{Refused, RefusedReason};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_guard::refresh::{
    BoundFiles, FileBind, REPLACE_TIMEOUT, RefreshAct, Refreshed, TuckRecords, refresh_container,
};
use bindguard_testing::hostile_process::{self, HostileProcess, Step, errno};
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{bind, helper, rounds, test_if};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};

use crate::refresh_scene::can_run;

const PLACE: &str = "/app/.env";
const CONF: &str = "data/a/conf";

/// `-v P/data:/data:rw -v P/data/a/conf/.env:/app/.env:ro`, where root alone may write P and every
/// folder above.
struct Scene {
    folder: PathBuf,
    root: tempfile::TempDir,
}

impl Scene {
    /// In the namespace of the test, `/mnt` is a filesystem of its own.
    fn new() -> Self {
        mount(
            Some("tmpfs"),
            "/mnt",
            Some("tmpfs"),
            MsFlags::empty(),
            Some("mode=755"),
        )
        .unwrap();
        let scene = Self {
            folder: "/mnt/p".into(),
            root: tempfile::tempdir().unwrap(),
        };
        fs::create_dir_all(scene.at(CONF)).unwrap();
        fs::create_dir(scene.at("secret")).unwrap();
        scene.write("0");
        for outside in ["secret/.env", ".env", "data/.env.outside"] {
            fs::write(scene.at(outside), "SECRET").unwrap();
        }
        scene
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// As an editor does it.
    fn write(&self, content: &str) {
        fs::write(self.at(CONF).join("new"), content).unwrap();
        fs::rename(self.at(CONF).join("new"), self.at(CONF).join(".env")).unwrap();
    }

    fn file(&self) -> Inside {
        Inside::of(self.at(CONF).join(".env"), "app/.env")
    }

    fn start(&self) -> Container {
        Container::start(
            self.root.path(),
            &[self.file(), Inside::writable(self.at("data"), "data")],
        )
    }

    fn refresh(&self, container: &Container) -> Refreshed {
        self.refresh_beside(container, &[container])
    }

    /// Refreshes `container` while the containers in `running` run.
    fn refresh_beside(&self, container: &Container, running: &[&Container]) -> Refreshed {
        let running: Vec<u32> = running.iter().map(|it| it.process.pid()).collect();
        self.refresh_while(container, &running)
    }

    /// Refreshes `container` while the containers with the init pids `running` run.
    fn refresh_while(&self, container: &Container, running: &[u32]) -> Refreshed {
        let running: Vec<_> = running
            .iter()
            .map(|init| RunningContainer {
                init: *init,
                spec: Some(container.spec().clone()),
            })
            .collect();
        self.refresh_among(container, &running)
    }

    fn refresh_among(&self, container: &Container, running: &[RunningContainer]) -> Refreshed {
        let spec = serde_json::json!({"mounts": [bindguard_testing::mount_of(&self.at(CONF).join(".env"), PLACE, "rprivate")]});
        let spec = spec.to_string().into_bytes();
        let binds = FileBind::of_spec(&SpecView::from_bytes(&spec).unwrap());
        let running = RunningInits(running.to_vec());
        let (files, _) = BoundFiles::open(binds, container.process.pid(), &running);
        let records = TuckRecords::at(&self.at("tucks"));
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&files],
            RefreshAct::Replace(Notify::None),
            &records,
        )
        .unwrap()
    }

    /// The reason of the refusal, and its path below P.
    fn refused(&self, refreshed: &Refreshed) -> Option<(RefusedReason, String)> {
        match refreshed.mounts.first()?.outcome.clone() {
            MountResult::Refused(Refused { reason, path, .. }) => Some((
                reason,
                path.strip_prefix(&self.folder)
                    .unwrap()
                    .to_string_lossy()
                    .into_owned(),
            )),
            _ => None,
        }
    }
}

/// A path in the container, for the test to act as the container does.
fn inside(container: &Container, path: &str) -> PathBuf {
    Path::new(&format!("/proc/{}/root", container.process.pid())).join(path)
}

fn shown(container: &Container) -> String {
    container.read("app/.env").unwrap()
}

#[test_if(can_run)]
fn a_link_of_the_container_never_leads_out_of_its_volume() {
    // Links in the file's folder, and one and two levels above; by `..`, by the whole path, and
    // through a second link.
    for (link, target) in [
        (CONF, "../../secret"),
        (CONF, "/mnt/p/secret"),
        (CONF, "../.."),
        (CONF, "second"),
        ("data/a", "../"),
        ("data/a", "deep"),
        ("data/a/conf/.env", "../../../secret/.env"),
    ] {
        let scene = Scene::new();
        let container = scene.start();
        let within = |path: &str| inside(&container, path);
        symlink("../../secret", within("data/a/second")).unwrap();
        fs::create_dir(within("data/deep")).unwrap();
        symlink("/mnt/p/secret", within("data/deep/conf")).unwrap();
        fs::create_dir_all(scene.at("conf")).unwrap();
        fs::write(scene.at("conf/.env"), "SECRET").unwrap();
        fs::rename(within(link), within(&format!("{link}.old"))).unwrap();
        symlink(target, within(link)).unwrap();
        let refreshed = scene.refresh(&container);
        assert_eq!(shown(&container), "0", "{link} {target}: {refreshed:?}");
        let (reason, _) = scene
            .refused(&refreshed)
            .unwrap_or_else(|| panic!("{link} {target}: {refreshed:?}"));
        assert_eq!(
            reason,
            RefusedReason::LinkBelowWritableBind,
            "{link} {target}"
        );
    }
}

#[test_if(can_run)]
fn a_link_of_another_container_is_refused() {
    let scene = Scene::new();
    let victim = Container::start(scene.root.path(), &[scene.file()]);
    let other_root = tempfile::tempdir().unwrap();
    let attacker = Container::start(
        other_root.path(),
        &[Inside::writable(scene.at("data"), "data")],
    );
    fs::rename(inside(&attacker, "data/a"), inside(&attacker, "data/b")).unwrap();
    symlink("/mnt/p/secret", inside(&attacker, "data/a")).unwrap();
    fs::create_dir(scene.at("secret/conf")).unwrap();
    fs::write(scene.at("secret/conf/.env"), "SECRET").unwrap();
    let refreshed = scene.refresh_beside(&victim, &[&victim, &attacker]);
    assert_eq!((shown(&victim).as_str(), scene.refused(&refreshed)), {
        (
            "0",
            Some((RefusedReason::LinkBelowWritableBind, "data/a".to_owned())),
        )
    });
}

/// The tables are read in turn, and no longer than needed: some containers with large tables must
/// not fill the agent's memory.
#[test_if(can_run)]
fn no_table_is_read_after_that_of_a_container_that_leads() {
    let scene = Scene::new();
    let container = scene.start();
    fs::rename(inside(&container, CONF), inside(&container, "data/a/old")).unwrap();
    symlink("../../secret", inside(&container, CONF)).unwrap();
    let running = |init, spec: Option<&SpecUsers>| RunningContainer {
        init,
        spec: spec.cloned(),
    };
    let (known, unknown) = (
        running(container.process.pid(), Some(container.spec())),
        running(std::process::id(), None),
    );
    for (running, reason) in [
        (
            vec![known.clone(), unknown.clone()],
            RefusedReason::LinkBelowWritableBind,
        ),
        (vec![unknown, known], RefusedReason::MountsUnknown),
    ] {
        let refreshed = scene.refresh_among(&container, &running);
        assert_eq!(
            scene.refused(&refreshed),
            Some((reason, CONF.to_owned())),
            "{refreshed:?}"
        );
    }
}

/// The steps of an attacker that hides its writable bind: in namespaces of its own it needs no
/// privilege to make `/old` its root, and to unmount the old root. Its open directory still leads to
/// the bind.
const HIDING: [Step; 2] = [
    || {
        let own = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS;
        errno(unshare(own)) | hostile_process::map_to_root(0)
    },
    || {
        let empty = mount(
            Some("tmpfs"),
            "/old",
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        );
        let enter = empty
            .and_then(|()| chdir("/old"))
            .and_then(|()| pivot_root(".", "."));
        errno(enter.and_then(|()| umount2(".", MntFlags::MNT_DETACH)))
    },
];

#[test_if(can_run)]
fn a_container_that_hides_its_mounts_in_namespaces_of_its_own_leads_nowhere() {
    let scene = Scene::new();
    let victim = Container::start(scene.root.path(), &[scene.file()]);
    let other_root = tempfile::tempdir().unwrap();
    let binds = [Inside::writable(scene.at("data"), "data")];
    let mut attacker = HostileProcess::start(other_root.path(), &binds, None, &HIDING);
    let data = Path::new(&format!("/proc/{}/root/data", attacker.process.pid())).to_owned();
    fs::rename(data.join("a"), data.join("b")).unwrap();
    symlink("/mnt/p/secret", data.join("a")).unwrap();
    fs::create_dir(scene.at("secret/conf")).unwrap();
    fs::write(scene.at("secret/conf/.env"), "SECRET").unwrap();
    assert_eq!([0, 1].map(|step| attacker.does(step)), [0, 0]);
    let table = String::from_utf8(attacker.process.read("mountinfo").unwrap()).unwrap();
    assert!(!table.contains("/data"), "{table}");
    let running = [victim.process.pid(), attacker.process.pid()];
    let refreshed = scene.refresh_while(&victim, &running);
    assert_eq!((shown(&victim).as_str(), scene.refused(&refreshed)), {
        (
            "0",
            Some((RefusedReason::MountsUnknown, "data/a".to_owned())),
        )
    });
}

/// Sets the flag when the test ends, in any way.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// renameat2(2) with RENAME_EXCHANGE, without a pause: the folder, a link to the secret, and a
/// folder of the container's own.
#[test_if(can_run)]
fn an_exchange_in_a_loop_never_shows_a_file_from_outside() {
    let scene = Scene::new();
    let container = scene.start();
    symlink("../../secret", inside(&container, "data/a/link")).unwrap();
    let conf = scene.at(CONF);
    // The path through the descriptor names the folder after each rename.
    let opened = fs::File::open(&conf).unwrap();
    let folder = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    let namespace = fs::File::open("/proc/thread-self/ns/mnt").unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS).unwrap();
            nix::sched::setns(&namespace, CloneFlags::CLONE_NEWNS).unwrap();
            while !is_over.load(Ordering::Relaxed) {
                let link = scene.at("data/a/link");
                renameat2(
                    AT_FDCWD,
                    &conf,
                    AT_FDCWD,
                    &link,
                    RenameFlags::RENAME_EXCHANGE,
                )
                .unwrap();
            }
        });
        // A failed assertion must end the loop of the second thread, too.
        let _ends = Ends(&is_over);
        let mut outcomes = std::collections::BTreeMap::<&str, u32>::new();
        for number in 1..=rounds(100, 1500) {
            fs::write(folder.join("new"), number.to_string()).unwrap();
            fs::rename(folder.join("new"), folder.join(".env")).unwrap();
            let refreshed = scene.refresh(&container);
            for mount in &refreshed.mounts {
                *outcomes.entry(mount.outcome.as_str()).or_default() += 1;
            }
            assert_ne!(shown(&container), "SECRET", "{refreshed:?}");
        }
        assert!(
            outcomes.contains_key("replaced") && outcomes.contains_key("refused"),
            "{outcomes:?}"
        );
    });
}

/// The container does not see a host mount in its volume, so the container can rename the mount
/// point.
#[test_if(can_run)]
fn a_mount_point_that_the_container_renamed_is_refused() {
    let scene = Scene::new();
    let container = scene.start();
    fs::create_dir(scene.at("data/a/vault")).unwrap();
    bind(&scene.at("secret"), &scene.at("data/a/vault"));
    // Only where it is not mounted can a mount point be renamed.
    container.run_inside(|| {
        fs::rename("/data/a/conf", "/data/a/old").unwrap();
        fs::rename("/data/a/vault", "/data/a/conf").unwrap();
    });
    assert_eq!(
        fs::read_to_string(scene.at(CONF).join(".env")).unwrap(),
        "SECRET",
        "the attack reaches the host"
    );
    let refreshed = scene.refresh(&container);
    assert_eq!((shown(&container).as_str(), scene.refused(&refreshed)), {
        (
            "0",
            Some((
                RefusedReason::OtherFolderBelowWritableBind,
                "data/a".to_owned(),
            )),
        )
    });
}

#[test_if(can_run)]
fn a_file_mounted_on_the_name_is_refused() {
    let scene = Scene::new();
    let container = scene.start();
    scene.write("1");
    bind(&scene.at("secret/.env"), &scene.at(CONF).join(".env"));
    let refreshed = scene.refresh(&container);
    assert_eq!((shown(&container).as_str(), scene.refused(&refreshed)), {
        (
            "0",
            Some((RefusedReason::MountPoint, format!("{CONF}/.env"))),
        )
    });
}

/// A volume that the container may write contains the folder above the file's folder. A second
/// volume hides a part of that folder.
#[test_if(can_run)]
fn a_hidden_part_of_a_volume_is_not_given() {
    let scene = Scene::new();
    fs::create_dir(scene.at("data/hidden")).unwrap();
    fs::write(scene.at("data/hidden/.env"), "SECRET").unwrap();
    let binds = [
        scene.file(),
        Inside::writable(scene.at("data"), "data"),
        Inside::writable(scene.root.path().to_owned(), "data/hidden"),
    ];
    let container = Container::start(scene.root.path(), &binds[..2]);
    drop(container);
    let container = Container::start_with(scene.root.path(), &binds[..2], || {
        mount(
            Some("tmpfs"),
            "/data/hidden",
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap();
    });
    fs::rename(inside(&container, CONF), inside(&container, "data/a/old")).unwrap();
    symlink("../hidden", inside(&container, CONF)).unwrap();
    let refreshed = scene.refresh(&container);
    assert_eq!((shown(&container).as_str(), scene.refused(&refreshed)), {
        (
            "0",
            Some((RefusedReason::LinkBelowWritableBind, CONF.to_owned())),
        )
    });
}

/// The way stays in the volume, or the container has the whole host: nothing new is given.
#[test_if(can_run)]
fn a_container_that_has_the_file_anyway_gets_it() {
    let scene = Scene::new();
    let container = scene.start();
    fs::rename(inside(&container, CONF), inside(&container, "data/a/v1")).unwrap();
    fs::create_dir(inside(&container, "data/a/v2")).unwrap();
    fs::write(inside(&container, "data/a/v2/.env"), "2").unwrap();
    symlink("v2", inside(&container, CONF)).unwrap();
    let refreshed = scene.refresh(&container);
    assert!(
        refreshed.is_current() && shown(&container) == "2",
        "{refreshed:?}"
    );

    let scene = Scene::new();
    let agent_root = tempfile::tempdir().unwrap();
    let agent = Container::start(
        agent_root.path(),
        &[Inside::writable("/mnt".into(), "host")],
    );
    let container = Container::start(scene.root.path(), &[scene.file()]);
    fs::rename(scene.at("data"), scene.at("old")).unwrap();
    symlink("new", scene.at("data")).unwrap();
    fs::create_dir_all(scene.at("new/a/conf")).unwrap();
    scene.write("3");
    let refreshed = scene.refresh_beside(&container, &[&agent, &container]);
    assert!(
        refreshed.is_current() && shown(&container) == "3",
        "{refreshed:?}"
    );
}

/// systemd removes a RuntimeDirectory= and makes it anew: only root may write the folders above.
#[test_if(can_run)]
fn a_folder_that_root_made_anew_is_followed() {
    for is_renamed in [false, true] {
        let scene = Scene::new();
        let container = Container::start(scene.root.path(), &[scene.file()]);
        match is_renamed {
            true => fs::rename(scene.at(CONF), scene.at("data/a/old")).unwrap(),
            false => fs::remove_dir_all(scene.at(CONF)).unwrap(),
        }
        fs::create_dir(scene.at(CONF)).unwrap();
        scene.write("1");
        let refreshed = scene.refresh(&container);
        assert!(
            refreshed.is_current() && shown(&container) == "1",
            "{refreshed:?}"
        );
    }
}

/// A user other than root may have put the folder there: its owner, its group, or everyone, with or
/// without a sticky bit.
#[test_if(can_run)]
fn a_folder_that_a_user_may_have_made_is_refused() {
    for (owner, mode) in [(1000, 0o755), (0, 0o775), (0, 0o757), (0, 0o1777)] {
        for is_renamed in [false, true] {
            let scene = Scene::new();
            chown(scene.at("data/a"), Some(owner), None).unwrap();
            fs::set_permissions(scene.at("data/a"), fs::Permissions::from_mode(mode)).unwrap();
            let container = Container::start(scene.root.path(), &[scene.file()]);
            // The same folder: it may belong to anyone.
            scene.write("1");
            assert!(scene.refresh(&container).is_current());
            scene.write("2");
            // Longer than the accuracy of a process's start.
            thread::sleep(std::time::Duration::from_millis(20));
            match is_renamed {
                true => fs::rename(scene.at(CONF), scene.at("data/a/old")).unwrap(),
                false => fs::remove_dir_all(scene.at(CONF)).unwrap(),
            }
            fs::create_dir(scene.at(CONF)).unwrap();
            scene.write("SECRET");
            let refreshed = scene.refresh(&container);
            let refused = Some((RefusedReason::OtherFolderOfUser, CONF.to_owned()));
            assert_eq!(
                (shown(&container).as_str(), scene.refused(&refreshed)),
                ("1", refused),
                "{owner} {mode:o}"
            );
        }
    }
}

#[test_if(can_run)]
fn a_link_that_a_user_may_have_made_is_refused() {
    for (owner, mode, link_owner, expected) in [
        (0, 0o755, 0, None),
        (0, 0o755, 1000, Some(RefusedReason::LinkOfUser)),
        (1000, 0o755, 0, Some(RefusedReason::LinkInWritableFolder)),
        (0, 0o1777, 0, Some(RefusedReason::LinkInWritableFolder)),
        (0, 0o775, 0, Some(RefusedReason::LinkInWritableFolder)),
    ] {
        let scene = Scene::new();
        let container = Container::start(scene.root.path(), &[scene.file()]);
        fs::rename(scene.at(CONF), scene.at("data/a/old")).unwrap();
        symlink("../../secret", scene.at(CONF)).unwrap();
        std::os::unix::fs::lchown(scene.at(CONF), Some(link_owner), None).unwrap();
        chown(scene.at("data/a"), Some(owner), None).unwrap();
        fs::set_permissions(scene.at("data/a"), fs::Permissions::from_mode(mode)).unwrap();
        let refreshed = scene.refresh(&container);
        let is_shown = shown(&container) == "SECRET";
        assert_eq!(
            (scene.refused(&refreshed).map(|it| it.0), is_shown),
            (expected, expected.is_none()),
            "{refreshed:?}"
        );
    }
}

#[test_if(can_run)]
fn a_file_of_another_type_is_refused() {
    let scene = Scene::new();
    let container = scene.start();
    fs::remove_file(scene.at(CONF).join(".env")).unwrap();
    let _socket = UnixListener::bind(scene.at(CONF).join(".env")).unwrap();
    let refreshed = scene.refresh(&container);
    assert_eq!(
        scene.refused(&refreshed),
        Some((RefusedReason::OtherType, format!("{CONF}/.env"))),
        "{refreshed:?}"
    );
    assert_eq!(shown(&container), "0");
}

/// link(2) works only within a mount: a container can link only files that its binds show. A hard
/// link that root made is root's decision.
#[test_if(can_run)]
fn a_hard_link_needs_no_rule() {
    let scene = Scene::new();
    let binds = [
        scene.file(),
        Inside::writable(scene.at("data"), "data"),
        Inside::of(scene.at("secret"), "secret"),
    ];
    let container = Container::start(scene.root.path(), &binds);
    // The filesystem is the same, and the container sees the file, but through a different mount.
    let linked = fs::hard_link(
        inside(&container, "secret/.env"),
        inside(&container, "data/a/conf/link"),
    );
    assert_eq!(linked.unwrap_err().kind(), io::ErrorKind::CrossesDevices);
    fs::hard_link(scene.at("secret/.env"), scene.at("data/a/conf/new")).unwrap();
    fs::rename(scene.at("data/a/conf/new"), scene.at(CONF).join(".env")).unwrap();
    assert!(scene.refresh(&container).is_current());
    assert_eq!(shown(&container), "SECRET");
}
