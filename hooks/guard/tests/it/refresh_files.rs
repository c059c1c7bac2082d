//! moby#15793: an editor replaces a file that a container binds, and the container keeps the old
//! file. A refresh shows the container the new file, whatever method the editor used, and never a
//! file of another directory.

use crate::refresh_scene::running::RunningInits;
use std::cell::Cell;
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{KeptMounts, Refused, RefusedReason, SubpathInContainer};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::{
    BoundFiles, CurrentFiles, FileBind, HeldProcess, REPLACE_TIMEOUT, RefreshAct, RefreshError,
    Refreshed, TuckRecords, find_stale, refresh_container,
};
use bindguard_sys::Handle;
use bindguard_sys::replace::CloneSettings;
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{
    Folder, Fuse, bind, deny_call, helper, mount_tmpfs, mounts_of_host, skipped, test_if,
};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::refresh_scene::{can_run, refusal};

pub(crate) const PLACE: &str = "/etc/app.conf";

/// No other container runs.
pub(crate) static NO_OTHERS: RunningInits = RunningInits(Vec::new());

/// A directory of the host with a file, and the root of a container that binds it.
pub(crate) struct Scene {
    pub(crate) folder: Folder,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let scene = Self {
            folder: Folder::new(),
        };
        for name in ["conf", "root", "elsewhere"] {
            fs::create_dir(scene.folder.path().join(name)).unwrap();
        }
        fs::write(scene.at("app.conf"), "0").unwrap();
        scene
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join("conf").join(name)
    }

    pub(crate) fn start(&self) -> Container {
        self.start_with(|| {})
    }

    fn start_with(&self, more: impl FnOnce()) -> Container {
        let binds = [Inside::of(self.at("app.conf"), "etc/app.conf")];
        Container::start_with(&self.folder.path().join("root"), &binds, more)
    }

    pub(crate) fn refresh(&self, container: &Container) -> Refreshed {
        self.refresh_with(container, &self.files(container))
    }

    fn refresh_with(&self, container: &Container, files: &dyn CurrentFiles) -> Refreshed {
        let records = TuckRecords::at(&self.folder.path().join("tucks"));
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[files],
            RefreshAct::Replace(Notify::None),
            &records,
        )
        .unwrap()
    }

    fn files(&self, container: &Container) -> BoundFiles<'static> {
        let spec = spec(&[(&self.at("app.conf"), PLACE)]);
        let (files, errors) = BoundFiles::open(
            FileBind::of_spec(&SpecView::from_bytes(&spec).unwrap()),
            container.process.pid(),
            &NO_OTHERS,
        );
        assert!(errors.is_empty(), "{errors:?}");
        files
    }
}

pub(crate) fn spec(binds: &[(&Path, &str)]) -> Vec<u8> {
    let mounts = binds
        .iter()
        .map(|(source, place)| bindguard_testing::mount_of(source, place, "rprivate"));
    serde_json::json!({"mounts": mounts.collect::<Vec<_>>()})
        .to_string()
        .into_bytes()
}

/// False, with a printed reason, without privilege.
/// A way in which programs replace a file, given its scene and the new content.
type Replace = fn(&Scene, &str);

/// `sed -i`, most editors, `kubectl cp`: a new file is renamed over the old file.
fn rename_over(scene: &Scene, content: &str) {
    fs::write(scene.at(".app.conf.swp"), content).unwrap();
    fs::rename(scene.at(".app.conf.swp"), scene.at("app.conf")).unwrap();
}

/// vim with a backup: the old file is renamed, and removed later.
fn rename_away(scene: &Scene, content: &str) {
    fs::rename(scene.at("app.conf"), scene.at("app.conf~")).unwrap();
    fs::write(scene.at("app.conf"), content).unwrap();
    fs::remove_file(scene.at("app.conf~")).unwrap();
}

/// emacs: the old file stays, under a new name.
fn keep_backup(scene: &Scene, content: &str) {
    fs::rename(scene.at("app.conf"), scene.at("app.conf~")).unwrap();
    fs::write(scene.at("app.conf"), content).unwrap();
}

/// git, `cp --remove-destination`.
fn remove_and_make(scene: &Scene, content: &str) {
    fs::remove_file(scene.at("app.conf")).unwrap();
    fs::write(scene.at("app.conf"), content).unwrap();
}

/// `ln -sfn`: the name becomes a symlink to a file of the same directory.
fn link_to_next(scene: &Scene, content: &str) {
    fs::create_dir_all(scene.at("releases")).unwrap();
    let release = format!("releases/{content}");
    fs::write(scene.at(&release), content).unwrap();
    symlink(&release, scene.at("next")).unwrap();
    fs::rename(scene.at("next"), scene.at("app.conf")).unwrap();
}

#[test_if(can_run)]
fn each_way_of_replacing_a_file_reaches_the_container() {
    let ways: [Replace; 5] = [
        rename_over,
        rename_away,
        keep_backup,
        remove_and_make,
        link_to_next,
    ];
    for (way, replace) in ways.iter().enumerate() {
        let scene = Scene::new();
        if fs::metadata(scene.folder.path())
            .unwrap()
            .created()
            .is_err()
        {
            return skipped("folders have no birth time here: tmpfs before Linux 6.0");
        }
        let container = scene.start().reading();
        let look = || {
            (
                container.mounts(),
                container.mounts_at(PLACE)[0].1.clone(),
                container.propagation_at(PLACE),
            )
        };
        let before = look();
        assert_eq!(
            (
                scene.refresh(&container).subpaths,
                scene.refresh(&container).mounts.len()
            ),
            (1, 0)
        );
        for content in 1..=20 {
            replace(&scene, &content.to_string());
            let refreshed = scene.refresh(&container);
            assert!(
                refreshed.is_current() && refreshed.replaced() == 1,
                "way {way}: {refreshed:?}"
            );
            assert_eq!(
                container.read("etc/app.conf"),
                Some(content.to_string()),
                "way {way}"
            );
        }
        assert_eq!(look(), before, "way {way}");
        let seen = container.stop();
        assert_eq!(
            (seen.failed, seen.empty, seen.older),
            (0, 0, 0),
            "way {way}: {seen:?}"
        );
    }
}

#[test_if(can_run)]
fn a_file_that_is_gone_keeps_its_old_content() {
    let scene = Scene::new();
    let container = scene.start();
    fs::remove_file(scene.at("app.conf")).unwrap();
    let refreshed = scene.refresh(&container);
    assert!(
        matches!(refreshed.mounts[0].outcome, MountResult::KeyGone),
        "{refreshed:?}"
    );
    assert_eq!(container.read("etc/app.conf").as_deref(), Some("0"));
}

/// Files of a refresh that cannot list mounts any more once it attaches a new one.
struct Unlisted<'a> {
    files: &'a BoundFiles<'static>,
    looks: Cell<u32>,
}

impl CurrentFiles for Unlisted<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        self.files.shown_in(table)
    }

    /// Called before the new mount is made, and before it is attached.
    fn mounts_below(
        &self,
        _: &SubpathInContainer,
        _: &MountTable,
    ) -> Result<Option<KeptMounts>, MountResult> {
        const SYS_LISTMOUNT: i64 = 458;
        self.looks.set(self.looks.get() + 1);
        if self.looks.get() == 2 {
            deny_call(SYS_LISTMOUNT, Errno::ENOMEM);
        }
        Ok(None)
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Result<(Handle, CloneSettings), MountResult> {
        self.files.open_current(stale)
    }
}

/// The journal had no line about the new mount, and the application got no signal.
#[test_if(can_run)]
fn a_refresh_that_cannot_look_again_reports_what_it_replaced() {
    let scene = Scene::new();
    let container = scene.start();
    rename_over(&scene, "1");
    let refreshed = thread::scope(|scope| {
        let refreshing = scope.spawn(|| {
            let unlisted = Unlisted {
                files: &scene.files(&container),
                looks: Cell::new(0),
            };
            scene.refresh_with(&container, &unlisted)
        });
        refreshing.join().unwrap()
    });
    assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
    assert_eq!(container.read("etc/app.conf").as_deref(), Some("1"));
}

/// A container may write the directory through another bind: it must not get a file that it was not
/// given.
#[test_if(can_run)]
fn a_symlink_out_of_the_directory_is_refused() {
    let scene = Scene::new();
    fs::write(scene.folder.path().join("elsewhere/secret"), "9").unwrap();
    for target in [
        scene.folder.path().join("elsewhere/secret"),
        "../elsewhere/secret".into(),
    ] {
        let container = scene.start();
        fs::remove_file(scene.at("app.conf")).unwrap();
        symlink(target, scene.at("app.conf")).unwrap();
        let refreshed = scene.refresh(&container);
        assert!(!refreshed.mounts[0].outcome.is_replaced(), "{refreshed:?}");
        assert_eq!(container.read("etc/app.conf").as_deref(), Some("0"));
        fs::remove_file(scene.at("app.conf")).unwrap();
        fs::write(scene.at("app.conf"), "0").unwrap();
    }
}

/// The directory's path leads elsewhere now, and anyone may have put it there: `/tmp` is writable
/// for all.
#[test_if(can_run)]
fn a_file_of_another_directory_is_never_shown() {
    let scene = Scene::new();
    let container = scene.start();
    let (conf, moved) = (
        scene.folder.path().join("conf"),
        scene.folder.path().join("moved"),
    );
    fs::rename(&conf, moved).unwrap();
    symlink("elsewhere", &conf).unwrap();
    fs::write(scene.folder.path().join("elsewhere/app.conf"), "9").unwrap();
    let refused = Refused::new(RefusedReason::OtherFolderOfUser, scene.folder.path());
    let refused = MountResult::Refused(refused);
    // A survey has the reason as well: a command that is refused is no cure.
    let seen = find_stale(&container.process, &[&scene.files(&container)]).unwrap();
    assert_eq!(seen.mounts[0].outcome, refused);
    let refreshed = scene.refresh(&container);
    assert_eq!(refreshed.mounts[0].outcome, refused);
    assert_eq!(container.read("etc/app.conf").as_deref(), Some("0"));
}

/// The filesystem of the file is mounted anew, as by LXCFS (lxc/lxcfs#701). A user of the host may
/// have led the way there: `/tmp` is writable for all. A file of the container in the same place is
/// none of the spec's.
#[test_if(can_run)]
fn a_file_of_another_filesystem_is_found_unless_the_container_mounted_it() {
    let scene = Scene::new();
    let conf = scene.folder.path().join("conf");
    let own = scene.folder.path().join("root/own");
    fs::create_dir(&own).unwrap();
    let over = |place: &Path, content: &str| {
        mount_tmpfs(place);
        fs::write(place.join("app.conf"), content).unwrap();
    };
    over(&conf, "0");
    let plain = scene.start();
    let covered = scene.start_with(|| {
        over(Path::new("/own"), "7");
        bind(Path::new("/own/app.conf"), Path::new(PLACE));
    });
    umount2(&conf, MntFlags::MNT_DETACH).unwrap();
    over(&conf, "1");
    let refreshed = scene.refresh(&plain);
    let refused = matches!(refreshed.mounts[0].outcome, MountResult::Refused(_));
    assert!(refused && refreshed.mounts.len() == 1, "{refreshed:?}");
    let mounts = covered.mounts();
    let refreshed = scene.refresh(&covered);
    assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
    assert_eq!(covered.mounts(), mounts);
}

/// The agent has one thread for the files of all pods: a silent daemon, such as a stopped LXCFS,
/// must not block the thread.
#[test]
fn a_file_of_a_silent_daemon_is_not_waited_for() {
    let Some(mut fuse) = can_run().then(Fuse::mounted).flatten() else {
        return;
    };
    fuse.begin();
    let mut device = fuse.device.as_ref().unwrap().try_clone().unwrap();
    thread::spawn(move || while device.read(&mut [0; 8192]).is_ok() {});
    let spec = spec(&[(&fuse.path().join("meminfo"), PLACE)]);
    let (done, finished) = mpsc::channel();
    thread::spawn(move || {
        let binds = FileBind::of_spec(&SpecView::from_bytes(&spec).unwrap());
        let (_, errors) = BoundFiles::open(binds, std::process::id(), &NO_OTHERS);
        done.send(errors.len()).unwrap();
    });
    let errors = finished.recv_timeout(Duration::from_secs(30));
    assert_eq!(errors, Ok(1));
}

/// The container may have remounted its mount, or have a file of its own with that name in place.
#[test_if(can_run)]
fn a_new_mount_of_a_file_denies_what_the_spec_denies() {
    let scene = Scene::new();
    let none = None::<&str>;
    let writable = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    let container = scene.start_with(|| mount(none, PLACE, none, writable, none).unwrap());
    let at = container.mounts_at(PLACE);
    assert!(at[0].1.starts_with("rw,"), "{at:?}");
    let mut bind = bindguard_testing::mount_of(&scene.at("app.conf"), PLACE, "rprivate");
    bind["options"] = serde_json::json!(["rbind", "ro", "nosuid", "noexec"]);
    let spec = serde_json::json!({"mounts": [bind]}).to_string();
    rename_over(&scene, "1");
    let binds = FileBind::of_spec(&SpecView::from_bytes(spec.as_bytes()).unwrap());
    let (files, _) = BoundFiles::open(binds, container.process.pid(), &NO_OTHERS);
    assert_eq!(scene.refresh_with(&container, &files).replaced(), 1);
    assert_eq!(container.read("etc/app.conf").as_deref(), Some("1"));
    let at = container.mounts_at(PLACE);
    assert!(at[0].1.starts_with("ro,nosuid,noexec"), "{at:?}");
}

/// When the old file is removed, the kernel detaches what is mounted on it: here it stays as a
/// backup.
#[test_if(can_run)]
fn a_mount_of_the_container_over_it_stays() {
    let scene = Scene::new();
    fs::write(scene.folder.path().join("root/own"), "7").unwrap();
    let container = scene.start_with(|| {
        mount(
            Some("/own"),
            PLACE,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
    });
    let mounts = container.mounts();
    keep_backup(&scene, "1");
    let refreshed = scene.refresh(&container);
    assert!(
        matches!(refreshed.mounts[0].outcome, MountResult::Hidden),
        "{refreshed:?}"
    );
    assert_eq!(
        (
            container.read("etc/app.conf").as_deref(),
            container.mounts()
        ),
        (Some("7"), mounts)
    );
}

#[test_if(can_run)]
fn binds_of_directories_are_left_out() {
    let scene = Scene::new();
    let (directory, gone) = (
        scene.folder.path().join("conf"),
        scene.folder.path().join("gone/app.conf"),
    );
    let spec = spec(&[
        (&directory, "/etc/conf"),
        (&gone, "/etc/gone"),
        (&scene.at("app.conf"), PLACE),
    ]);
    let (files, errors) = BoundFiles::open(
        FileBind::of_spec(&SpecView::from_bytes(&spec).unwrap()),
        1,
        &NO_OTHERS,
    );
    let destinations: Vec<_> = files
        .binds()
        .iter()
        .map(|bind| bind.destination.as_path())
        .collect();
    // A file whose directory is gone may come back.
    assert_eq!(
        (destinations, errors.len()),
        (vec![Path::new("/etc/gone"), Path::new(PLACE)], 1),
        "{errors:?}"
    );
}

/// The program of a process that lasts until the test that started it ends.
#[test]
#[ignore = "a test starts it"]
fn waits() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// The process that Kata names for a container is the virtual machine's, with the node's own
/// mounts; gVisor's is its kernel.
#[test_if(can_run)]
fn a_sandbox_is_never_entered() {
    let (files, _) = BoundFiles::open(Vec::new(), 1, &NO_OTHERS);
    let refused = |mut command: Command| {
        let mut program = command.spawn().unwrap();
        let process = HeldProcess::open(program.id()).unwrap();
        let refused = refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &process,
            Some(&live::spec_of(None)),
            &[&files],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::default(),
        );
        program.kill().unwrap();
        program.wait().unwrap();
        refused.unwrap_err()
    };
    let mut kata = Command::new("sleep");
    kata.arg("1000");
    assert!(matches!(refused(kata), RefreshError::MountsOfNode(_)));
    // gVisor executes its program through /proc/self/exe, so the process name differs from the
    // program's name.
    let folder = tempfile::tempdir().unwrap();
    let [program, link, other] =
        ["runsc", "exe", "runsc-sandbox"].map(|name| folder.path().join(name));
    // Not busybox, whose name must be that of an applet.
    // A copy made here would be busy while a child of another test has the descriptor.
    let mut copy = Command::new("cp");
    copy.arg(std::env::current_exe().unwrap()).arg(&program);
    assert!(copy.status().unwrap().success());
    symlink(&program, &link).unwrap();
    symlink("/proc/self/exe", &other).unwrap();
    for start in [link, other] {
        let mut gvisor = Command::new(start);
        gvisor
            .args(["--ignored", "--exact", "refresh_files::waits"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        // SAFETY: a single syscall, which uses neither the heap nor a lock.
        unsafe {
            gvisor.pre_exec(|| Ok(nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?))
        };
        assert!(matches!(refused(gvisor), RefreshError::Sandbox(_)));
    }
}

/// A pod has the socket of a daemon that was restarted.
#[test_if(can_run)]
fn a_socket_that_was_made_anew_is_attached() {
    let scene = Scene::new();
    let listen = || {
        fs::remove_file(scene.at("app.conf")).unwrap();
        UnixListener::bind(scene.at("app.conf")).unwrap()
    };
    let first = listen();
    let container = scene.start();
    drop(first);
    let second = listen();
    let inside = || {
        let path = format!("/proc/{}/root/{PLACE}", container.process.pid());
        fs::metadata(path).map(|file| file.ino())
    };
    let host = fs::metadata(scene.at("app.conf")).unwrap().ino();
    assert_ne!(inside().ok(), Some(host));
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(inside().ok(), Some(host));
    // A regular file never replaces a socket.
    drop(second);
    fs::remove_file(scene.at("app.conf")).unwrap();
    fs::write(scene.at("app.conf"), "text").unwrap();
    assert_eq!(scene.refresh(&container).replaced(), 0);
}

/// The files of a pod that the kubelet writes have a refresh of their own.
#[test]
fn only_sources_outside_of_the_kubelets_folders_are_files_of_the_host() {
    let spec = spec(&[
        (Path::new("/run/app.sock"), "/app.sock"),
        (Path::new("/k/pods/u/etc-hosts"), "/etc/hosts"),
        (Path::new("/k/pods/u/volume-subpaths/c/a/0"), "/conf"),
        (Path::new("/kubelet/app.conf"), "/app.conf"),
    ]);
    let binds = FileBind::of_pod(&SpecView::from_bytes(&spec).unwrap(), &["/k".into()]);
    let places: Vec<_> = binds.iter().map(|it| it.destination.to_str()).collect();
    assert_eq!(places, [Some("/app.sock"), Some("/app.conf")]);
}

/// A new mount on a shared mount would reach the host, and other containers. No caller can forget
/// the rule.
#[test_if(can_run)]
fn a_file_on_a_shared_mount_is_refused_by_default() {
    for (place, reason) in [
        ("/", RefusedReason::ParentIsShared),
        (PLACE, RefusedReason::MountIsShared),
    ] {
        let scene = Scene::new();
        let container = scene.start_with(|| live::change(Path::new(place), MsFlags::MS_SHARED));
        rename_over(&scene, "1");
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 0, "{place}: {refreshed:?}");
        assert_eq!(refusal(&refreshed), reason, "{place}");
        assert_eq!(container.read(PLACE).as_deref(), Some("0"));
    }
}

/// `-v /srv:/etc:rshared -v app.conf:/etc/app.conf`: a mount that is attached in the container
/// appears on the host, and a detach removes the host's.
#[test_if(can_run)]
fn a_refresh_below_a_peer_of_a_mount_of_the_host_changes_no_mount_of_the_host() {
    let scene = Scene::new();
    let srv = scene.folder.path().join("elsewhere");
    mount_tmpfs(&srv);
    live::change(&srv, MsFlags::MS_SHARED);
    fs::write(srv.join("app.conf"), "").unwrap();
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let peer = open_tree(rustix::fs::CWD, &srv, flags).unwrap();
    let conf = Inside::of(scene.at("app.conf"), "conf");
    let container = Container::start_keeping(
        &scene.folder.path().join("root"),
        &[conf],
        &[peer.as_fd()],
        || {
            fs::create_dir("/etc").unwrap();
            let empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            move_mount(&peer, "", rustix::fs::CWD, "/etc", empty).unwrap();
            bind(Path::new("/conf"), Path::new(PLACE));
            umount2("/conf", MntFlags::MNT_DETACH).unwrap();
        },
    );
    assert_eq!(container.propagation_at("/etc"), ["shared"]);
    let on_host = || fs::read_to_string(srv.join("app.conf")).unwrap();
    assert_eq!(on_host(), "0", "the runtime's own bind reaches the host");
    rename_over(&scene, "1");
    let host = mounts_of_host();
    let refreshed = scene.refresh(&container);
    assert_eq!(
        on_host(),
        "0",
        "the refresh reached the host: {refreshed:?}"
    );
    assert_eq!(mounts_of_host(), host, "{refreshed:?}");
    assert!(
        matches!(
            refusal(&refreshed),
            RefusedReason::ParentIsShared | RefusedReason::MountIsShared
        ),
        "{refreshed:?}"
    );
}
