//! A private host-root bind of a running container keeps each mount that the host had at its start.
//! A refresh gives the container the mounts of now, which receive the host's umounts.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_core::policy::{Mode, Policy, ReadOnlyBinds};
use bindguard_core::refresh::RefusedReason;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::MountResult;
use bindguard_core::source::KindName;
use bindguard_guard::refresh::{
    AttachMethod, HostRoots, NotReleased, NotReplaced, RefreshAct, Refreshed, Release,
    ReleaseOutcome, Released, TuckRecords, refresh_container, release_copies,
};
use bindguard_guard::{Attempt, admit, prove_container};
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{Folder, helper};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use serde_json::json;

use crate::refresh_scene;

/// False, with a printed reason, without privilege or `MOVE_MOUNT_BENEATH`.
fn can_run() -> bool {
    let has_beneath = live::kernel() >= (6, 5);
    if !has_beneath {
        bindguard_testing::skipped("no MOVE_MOUNT_BENEATH before Linux 6.5");
    }
    has_beneath && refresh_scene::can_run()
}

/// A folder of the host with a kubelet's root and a disk in it, which a container has at `/host`.
pub(crate) struct Scene {
    pub(crate) host: Folder,
    root: tempfile::TempDir,
    pub(crate) policy: Policy,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let scene = Self {
            host: Folder::new(),
            root: tempfile::tempdir().unwrap(),
            policy: Policy::default(),
        };
        for folder in ["kubelet/pods", "bundle", "disk", "later"] {
            fs::create_dir_all(scene.host.path().join(folder)).unwrap();
        }
        scene.write_spec(&["rprivate"], &[]);
        mount_tmpfs(&scene.disk());
        fs::write(scene.disk().join("file"), "disk").unwrap();
        scene
    }

    pub(crate) fn disk(&self) -> PathBuf {
        self.host.path().join("disk")
    }

    /// The spec of a container with these capabilities and these options of its bind, beside
    /// `rbind`.
    fn write_spec(&self, options: &[&str], capabilities: &[&str]) {
        let options = [&["rbind"], options].concat();
        let bind = json!({
            "type": "bind", "source": self.host.path(), "destination": "/host",
            "options": options,
        });
        let spec = json!({
            "ociVersion": "1.2.0", "mounts": [bind],
            "process": {"capabilities": {"bounding": capabilities}},
            "linux": {"rootfsPropagation": "rslave"},
        });
        fs::write(self.bundle().join("config.json"), spec.to_string()).unwrap();
    }

    pub(crate) fn bundle(&self) -> PathBuf {
        self.host.path().join("bundle")
    }

    pub(crate) fn start(&self) -> Container {
        self.start_with(|| {})
    }

    fn start_with(&self, more: impl FnOnce()) -> Container {
        Container::start_with(self.root.path(), &[self.bind()], more)
    }

    fn bind(&self) -> Inside {
        Inside::tree(self.host.path().to_owned(), "host")
    }

    /// A node whose policy only reports, and a privileged container.
    pub(crate) fn for_record() -> Self {
        let mut scene = Self::new();
        scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
        scene.policy.host_root = Mode::Report;
        scene
    }

    /// Starts the container as bindguard's shim does.
    fn start_recorded(&self) -> Container {
        // The proof comes after the runtime's mounts, and before the container's own.
        let container = self.start_unproved();
        self.prove(&container);
        container
    }

    /// The same without the proof.
    pub(crate) fn start_unproved(&self) -> Container {
        let (bundle, places) = (self.bundle(), self.places());
        let admission = admit(&bundle, &self.policy, &places, Attempt::First);
        assert!(admission.is_provable, "{admission:?}");
        self.start()
    }

    pub(crate) fn prove(&self, container: &Container) {
        let pid = container.process.pid();
        let proved = prove_container(&self.bundle(), pid, &self.policy, &self.places());
        assert!(proved.report.problems.is_empty(), "{proved:?}");
    }

    /// Starts a container as bindguard's shim does, then calls `more` in the container.
    pub(crate) fn recorded(more: impl FnOnce() + Send) -> (Self, Container) {
        let scene = Self::for_record();
        let container = scene.start_recorded();
        container.run_inside(more);
        (scene, container)
    }

    pub(crate) fn places(&self) -> Places {
        Places {
            kubelet_roots: vec![self.host.path().join("kubelet")],
            ..Places::default()
        }
    }

    pub(crate) fn release(&self, container: &Container, extent: Release) -> Vec<Released> {
        let roots = HostRoots::open(&self.bundle(), &self.policy, &self.places()).unwrap();
        let (process, spec) = (&container.process, Some(container.spec()));
        let host = mounts_of_host();
        let released = release_copies(helper(), process, spec, &roots, |_, _| true, extent);
        assert_eq!(mounts_of_host(), host);
        released.unwrap()
    }

    pub(crate) fn refresh(&self, container: &Container) -> Refreshed {
        self.act(container, RefreshAct::Replace(Notify::None))
    }

    fn act(&self, container: &Container, act: RefreshAct) -> Refreshed {
        let roots = HostRoots::open(&self.bundle(), &self.policy, &self.places()).unwrap();
        refresh_container(
            helper(),
            &container.process,
            Some(container.spec()),
            &roots,
            act,
            &TuckRecords::at(&self.host.path().join("tucks")),
        )
        .unwrap()
    }

    /// Refreshes, and expects that nothing changes for this reason.
    fn is_refused(&self, container: &Container, expected: RefusedReason) {
        let (mounts, host) = (container.mounts(), mounts_of_host());
        let refreshed = self.refresh(container);
        let looked = self.act(container, RefreshAct::Look);
        assert_eq!(reason(&refreshed), expected);
        assert_eq!(refreshed.mounts[0].kind, Some(KindName::HostRoot));
        // Only a try shows what the kernel permits.
        if expected != RefusedReason::NeedsBeneath {
            assert_eq!(reason(&looked), expected);
        }
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
    }
}

/// The rule by which the only mount was not replaced.
fn reason(refreshed: &Refreshed) -> RefusedReason {
    match &refreshed.mounts[..] {
        [only] => match &only.outcome {
            Err(NotReplaced::Refused(refused)) => refused.reason,
            other => panic!("{other:?}"),
        },
        others => panic!("{others:?}"),
    }
}

fn mount_tmpfs(place: &Path) {
    let (kind, none) = (Some("tmpfs"), MsFlags::empty());
    mount(kind, place, kind, none, None::<&str>).unwrap();
}

fn remount(place: &Path, flags: MsFlags) {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags;
    mount(None::<&str>, place, None::<&str>, flags, None::<&str>).unwrap();
}

pub(crate) fn mounts_of_host() -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    table.lines().map(str::to_owned).collect()
}

#[test]
fn a_private_bind_releases_what_the_host_unmounted() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = scene.start();
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    mount_tmpfs(&scene.host.path().join("later"));
    fs::write(scene.host.path().join("later/file"), "later").unwrap();
    assert_eq!(container.read("host/disk/file").as_deref(), Some("disk"));
    let host = mounts_of_host();
    let looked = scene.act(&container, RefreshAct::Look);
    assert!(
        matches!(looked.mounts[..], [ref only] if matches!(only.outcome, Ok(MountResult::Stale))),
        "{looked:?}"
    );
    let refreshed = scene.refresh(&container);
    assert_eq!(refresh_scene::methods(&refreshed), [AttachMethod::Beneath]);
    assert_eq!(mounts_of_host(), host);
    assert_eq!(container.mounts_at("/host").len(), 1);
    assert_eq!(container.propagation_at("/host"), ["master"]);
    assert!(container.mounts_at("/host/disk").is_empty());
    assert_eq!(container.read("host/later/file").as_deref(), Some("later"));
    // From now on the host's mounts and umounts arrive.
    umount2(&scene.host.path().join("later"), MntFlags::empty()).unwrap();
    assert!(container.mounts_at("/host/later").is_empty());
    mount_tmpfs(&scene.disk());
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
    let (mounts, host) = (container.mounts(), mounts_of_host());
    assert!(scene.refresh(&container).mounts.is_empty(), "a second time");
    assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
}

/// The top mount keeps what the old mount and the spec deny; so does each mount below.
#[test]
fn the_new_mounts_are_as_restricted_as_the_old_ones() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    // The runtime's mount is nosuid, and has lost the `ro` of the spec.
    scene.write_spec(&["rprivate", "ro", "rnodev"], &[]);
    let nested = scene.disk().join("nested");
    fs::create_dir(&nested).unwrap();
    mount_tmpfs(&nested);
    let container = scene.start_with(|| {
        let strict = MsFlags::MS_RDONLY | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        remount(Path::new("/host/disk/nested"), strict);
    });
    let host = mounts_of_host();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(mounts_of_host(), host);
    for (place, options) in [
        ("/host", "ro,nosuid,nodev,relatime"),
        ("/host/disk", "rw,nodev,relatime"),
        ("/host/disk/nested", "ro,nodev,noexec,noatime"),
    ] {
        let mounts = container.mounts_at(place);
        assert_eq!(mounts.len(), 1, "{place}");
        assert_eq!(mounts[0].1, options, "{place}");
        assert_eq!(container.propagation_at(place), ["master"], "{place}");
    }
    umount2(&nested, MntFlags::empty()).unwrap();
    assert!(container.mounts_at("/host/disk/nested").is_empty());
}

#[test]
fn mounts_of_the_container_stay() {
    if !can_run() {
        return;
    }
    for place in ["/host/later", "/host/disk"] {
        let scene = Scene::new();
        scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
        let container = scene.start_with(|| mount_tmpfs(Path::new(place)));
        scene.is_refused(&container, RefusedReason::NestedMount);
    }
    let scene = Scene::new();
    let container = scene.start_with(|| mount_tmpfs(Path::new("/host")));
    let before = container.mounts_at("/host");
    let refreshed = scene.refresh(&container);
    assert_eq!(refreshed.replaced(), 0, "{refreshed:?}");
    assert_eq!(container.mounts_at("/host"), before);
}

/// A process with `CAP_SYS_ADMIN` could have mounted the disk itself.
#[test]
fn a_copy_stays_if_the_container_may_have_mounted_it() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
    let container = scene.start();
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    scene.is_refused(&container, RefusedReason::NestedMount);
    assert_eq!(container.read("host/disk/file").as_deref(), Some("disk"));
}

#[test]
fn policy_and_the_spec_decide_as_at_a_create() {
    if !can_run() {
        return;
    }
    let refused = |options: &[&str], policy: Policy, reason| {
        let mut scene = Scene::new();
        scene.write_spec(options, &[]);
        scene.policy = policy;
        let container = scene.start();
        scene.is_refused(&container, reason);
    };
    let policy = Policy::default();
    let rro = RefusedReason::RecursivelyReadOnly;
    refused(&["rprivate", "rro"], policy, rro);
    refused(
        &["rprivate", "ro"],
        Policy {
            read_only_binds: ReadOnlyBinds::Keep,
            ..policy
        },
        RefusedReason::ReadOnlyKept,
    );
    let host_root = Mode::Report;
    refused(
        &["rprivate"],
        Policy {
            host_root,
            ..policy
        },
        RefusedReason::OnlyReported,
    );
    let mut scene = Scene::new();
    scene.policy.host_root = Mode::Off;
    assert!(scene.refresh(&scene.start()).mounts.is_empty(), "off");
}

#[test]
fn a_source_that_is_private_on_the_host_is_refused() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    live::change(Path::new("/"), MsFlags::MS_PRIVATE | MsFlags::MS_REC);
    let container = scene.start();
    scene.is_refused(&container, RefusedReason::PrivateOnHost);
}

#[test]
fn a_mount_that_would_reach_the_host_is_refused() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = scene.start_with(|| live::change(Path::new("/"), MsFlags::MS_SHARED));
    scene.is_refused(&container, RefusedReason::ParentIsShared);
}

/// The kernel locks the flags of its mounts, but not those of a mount that is attached later.
#[test]
fn a_container_with_a_user_namespace_is_refused() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start_in_user_namespace(scene.root.path(), &[scene.plain_bind()]);
    scene.is_refused(&container, RefusedReason::NeedsBeneath);
}

impl Scene {
    /// A namespace of another user may not copy the mounts below without each other.
    fn plain_bind(&self) -> Inside {
        umount2(&self.disk(), MntFlags::empty()).unwrap();
        Inside::of(self.host.path().to_owned(), "host")
    }
}

/// Without a step that makes the old mounts private, their detach unmounts the host's.
#[test]
fn mounts_below_that_are_peers_of_the_hosts_are_detached_alone() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let nested = scene.disk().join("nested");
    fs::create_dir(&nested).unwrap();
    mount_tmpfs(&nested);
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE;
    let peers = open_tree(rustix::fs::CWD, scene.disk(), flags).unwrap();
    let attach = || {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&peers, c"", rustix::fs::CWD, "/host/disk", flags).unwrap();
    };
    let binds = [scene.bind()];
    let container = Container::start_keeping(scene.root.path(), &binds, &[peers.as_fd()], attach);
    let table = fs::read_to_string(format!("/proc/{}/mountinfo", container.process.pid()));
    let is_peer = |line: &&str| line.contains(" /host/disk/nested ") && line.contains(" shared:");
    assert_eq!(table.unwrap().lines().filter(is_peer).count(), 1);
    drop(peers);
    let host = mounts_of_host();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert_eq!(mounts_of_host(), host);
    assert_eq!(container.mounts_at("/host/disk/nested").len(), 1);
    assert_eq!(container.propagation_at("/host/disk/nested"), ["master"]);
}

/// A container with `CAP_SYS_ADMIN` mounts over the bind and in the bind while refreshes run.
#[test]
fn a_container_that_mounts_all_the_time_reaches_nothing_of_the_host() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
    let mount_for_ever = || {
        std::thread::spawn(|| {
            let flags = MsFlags::MS_SHARED | MsFlags::MS_REC;
            loop {
                for place in ["/host/later", "/host", "/host/disk"].map(Path::new) {
                    // A refresh may take the place away at any moment.
                    let (kind, none) = (Some("tmpfs"), None::<&str>);
                    let _ = mount(kind, place, kind, MsFlags::empty(), none);
                    let _ = mount(none, place, none, flags, none);
                    let _ = umount2(place, MntFlags::MNT_DETACH);
                }
                let (none, private) = (None::<&str>, MsFlags::MS_PRIVATE | MsFlags::MS_REC);
                let _ = mount(none, "/host", none, private, none);
            }
        });
    };
    let host = mounts_of_host();
    for _ in 0..refresh_scene::rounds(10, 500) {
        // Soon the container has unmounted the bind itself.
        let container = scene.start_with(mount_for_ever);
        for _ in 0..4 {
            let refreshed = scene.refresh(&container);
            assert!(refreshed.abandoned.is_none(), "{refreshed:?}");
            assert_eq!(mounts_of_host(), host);
        }
    }
    let file = fs::read_to_string(scene.disk().join("file"));
    assert_eq!(file.unwrap(), "disk");
}

/// As after a kill between the attach and the detach.
#[test]
fn a_refresh_that_was_interrupted_is_finished() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = scene.start();
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE;
    let new = open_tree(rustix::fs::CWD, scene.host.path(), flags).unwrap();
    let namespace = container.namespace();
    let attach = || {
        unshare(CloneFlags::CLONE_FS).unwrap();
        let links = fs::File::open("/proc/thread-self/fd").unwrap();
        setns(&namespace, CloneFlags::CLONE_NEWNS).unwrap();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_BENEATH;
        move_mount(&new, c"", rustix::fs::CWD, "/host", flags).unwrap();
        rustix::process::fchdir(&links).unwrap();
        let slave = MsFlags::MS_SLAVE | MsFlags::MS_REC;
        live::change(Path::new(&new.as_raw_fd().to_string()), slave);
    };
    std::thread::scope(|scope| scope.spawn(attach).join().unwrap());
    drop(new);
    let host = mounts_of_host();
    assert_eq!(container.mounts_at("/host").len(), 2);
    let refreshed = scene.refresh(&container);
    assert_eq!(refresh_scene::methods(&refreshed), [AttachMethod::Finished]);
    assert_eq!(container.mounts_at("/host").len(), 1);
    assert_eq!(container.propagation_at("/host"), ["master"]);
    assert!(container.mounts_at("/host/disk").is_empty());
    assert_eq!(mounts_of_host(), host);
}

/// False, with a printed reason, where the kernel does not list another namespace's mounts with
/// unique ids.
pub(crate) fn can_record() -> bool {
    let has_ids = live::kernel() >= (6, 11);
    if !has_ids {
        bindguard_testing::skipped("no unique ids of another namespace's mounts before Linux 6.11");
    }
    has_ids && can_run()
}

/// The places and outcomes of copies.
fn outcomes(released: &[Released]) -> Vec<(&Path, &ReleaseOutcome)> {
    released
        .iter()
        .map(|copy| (copy.mount.mount_point.as_path(), &copy.outcome))
        .collect()
}

#[test]
fn recorded_copies_are_released_and_no_other_mount() {
    if !can_record() {
        return;
    }
    let (scene, container) = Scene::recorded(|| mount_tmpfs(Path::new("/host/later")));
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    let looked = scene.release(&container, Release::Look);
    for (place, outcome) in outcomes(&looked) {
        match outcome {
            ReleaseOutcome::Kept => assert_eq!(place, Path::new("/host/disk")),
            ReleaseOutcome::NotReleased(NotReleased::NotRecorded) => {
                assert_eq!(place, Path::new("/host/later"));
            }
            other => panic!("{}: {other:?}", place.display()),
        }
    }
    assert_eq!(looked.len(), 2);
    assert_eq!(container.read("host/disk/file").as_deref(), Some("disk"));
    let released = scene.release(&container, Release::Unmount);
    let is_released = |it: &&Released| matches!(it.outcome, ReleaseOutcome::Released);
    assert_eq!(released.iter().filter(is_released).count(), 1);
    assert!(container.mounts_at("/host/disk").is_empty());
    assert_eq!(container.mounts_at("/host/later").len(), 1);
    assert_eq!(scene.release(&container, Release::Unmount).len(), 1);
}

/// A node with many network namespaces: one child replaces at most 256 mounts.
#[test]
fn no_copy_is_left_out() {
    if !can_record() {
        return;
    }
    const COPIES: usize = 600;
    let scene = Scene::for_record();
    let places: Vec<_> = (0..COPIES)
        .map(|number| scene.disk().join(number.to_string()))
        .collect();
    for place in &places {
        fs::create_dir(place).unwrap();
        mount_tmpfs(place);
    }
    let container = scene.start_recorded();
    for place in &places {
        umount2(place, MntFlags::empty()).unwrap();
    }
    let looked = scene.release(&container, Release::Look);
    assert_eq!(looked.len(), COPIES);
    let is_kept = |it: &Released| matches!(it.outcome, ReleaseOutcome::Kept);
    assert!(looked.iter().all(is_kept), "{looked:?}");
    let released = scene.release(&container, Release::Unmount);
    let is_released = |it: &Released| matches!(it.outcome, ReleaseOutcome::Released);
    assert!(released.iter().all(is_released), "{released:?}");
    assert_eq!(scene.release(&container, Release::Look).len(), 0);
}

/// The agent refreshes the container at the same moment.
#[test]
fn a_release_waits_for_a_refresh() {
    if !can_record() {
        return;
    }
    let (scene, container) = Scene::recorded(|| {});
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    let other = fs::File::open(format!("/proc/{}/ns/mnt", container.process.pid())).unwrap();
    other.lock().unwrap();
    let refresh = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        // A process that was forked meanwhile has a copy of the descriptor.
        other.unlock().unwrap();
    });
    let released = scene.release(&container, Release::Unmount);
    refresh.join().unwrap();
    assert!(container.mounts_at("/host/disk").is_empty(), "{released:?}");
}

/// A runtime is called twice for one start, or by hand: the container's own mounts of meanwhile
/// are no copies.
#[test]
fn a_second_proof_does_not_make_mounts_of_the_container_copies() {
    if !can_record() {
        return;
    }
    let (scene, container) = Scene::recorded(|| mount_tmpfs(Path::new("/host/later")));
    scene.prove(&container);
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(
            released[..],
            [Released {
                outcome: ReleaseOutcome::NotReleased(NotReleased::NotRecorded),
                ..
            }]
        ),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/later").len(), 1);
}

#[test]
fn a_copy_with_a_mount_of_the_container_on_it_is_busy() {
    if !can_record() {
        return;
    }
    let (scene, container) = Scene::recorded(|| {
        fs::create_dir("/host/disk/own").unwrap();
        mount_tmpfs(Path::new("/host/disk/own"));
    });
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    for extent in [Release::Unmount, Release::Detach] {
        let released = scene.release(&container, extent);
        let busy = |it: &&Released| {
            matches!(
                it.outcome,
                ReleaseOutcome::NotReleased(NotReleased::Busy | NotReleased::NotRecorded)
            )
        };
        assert_eq!(released.iter().filter(busy).count(), 2, "{released:?}");
        assert_eq!(container.mounts_at("/host/disk/own").len(), 1);
    }
}

/// A detach hides the open file: the device stays busy.
#[test]
fn a_copy_in_use_is_busy_unless_it_is_detached() {
    if !can_record() {
        return;
    }
    let (scene, container) = Scene::recorded(|| {});
    let file = fs::File::open(format!(
        "/proc/{}/root/host/disk/file",
        container.process.pid()
    ));
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(
            released[..],
            [Released {
                outcome: ReleaseOutcome::NotReleased(NotReleased::Busy),
                ..
            }]
        ),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
    let released = scene.release(&container, Release::Detach);
    assert!(
        matches!(released[0].outcome, ReleaseOutcome::Released),
        "{released:?}"
    );
    assert!(container.mounts_at("/host/disk").is_empty());
    drop(file);
}

#[test]
fn a_copy_on_a_shared_mount_stays() {
    if !can_record() {
        return;
    }
    let (scene, container) =
        Scene::recorded(|| live::change(Path::new("/host"), MsFlags::MS_SHARED));
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(
            released[..],
            [Released {
                outcome: ReleaseOutcome::NotReleased(NotReleased::ParentIsShared),
                ..
            }]
        ),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
}

/// As under a shim without a guard.
#[test]
fn without_a_record_nothing_is_released() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = scene.start();
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(
            released[..],
            [Released {
                outcome: ReleaseOutcome::NotReleased(NotReleased::NoRecord),
                ..
            }]
        ),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
}

/// The record distinguishes the copies of the create from mounts that a privileged container made.
#[test]
fn a_privileged_container_is_refreshed_by_its_record() {
    if !can_record() {
        return;
    }
    let (mut scene, container) = Scene::recorded(|| {});
    scene.policy.host_root = Mode::Repair;
    umount2(&scene.disk(), MntFlags::empty()).unwrap();
    assert_eq!(scene.refresh(&container).replaced(), 1);
    assert!(container.mounts_at("/host/disk").is_empty());
    let (mut scene, container) = Scene::recorded(|| mount_tmpfs(Path::new("/host/later")));
    scene.policy.host_root = Mode::Repair;
    scene.is_refused(&container, RefusedReason::NestedMount);
}
