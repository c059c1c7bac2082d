//! A container whose init is in its own namespaces, or changes namespaces during a refresh. Nothing
//! is mounted in a namespace that the container's runtime did not make. No refreshed mount allows
//! more than the stale mount.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;

use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{
    HeldProcess, NamespaceError, PodVolumes, REPLACE_TIMEOUT, RefreshAct, RefreshError, Refreshed,
    refresh_container,
};
use bindguard_testing::hostile_process;
use bindguard_testing::hostile_process::{HostileProcess, Step, errno};
use bindguard_testing::live;
use bindguard_testing::{helper, rounds, test_if};
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{ForkResult, fork, setresgid, setresuid};
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

use crate::refresh_scene::{Scene, can_run};

const PLACE: &str = "/etc/app/0";

/// Another place, to which the process may bind the file in namespaces of its own. The mount there
/// is not locked.
const COPY: &str = "/copy";

/// The flags that every stale mount of these tests has.
const FLAGS: MsFlags = MsFlags::MS_RDONLY
    .union(MsFlags::MS_NOSUID)
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

/// Attempts to widen what the mount at the place allows. The numbers of [`STEPS`].
const ATTEMPTS: std::ops::Range<usize> = 0..6;
const ENTER_OWN: usize = 6;
const RESTRICT: usize = 7;
const BIND_COPY: usize = 8;
const DROP_PRIVILEGES: usize = 9;
const READ_COPY: usize = 10;
const READ: usize = 11;
const WIDEN: [usize; 2] = [12, 13];
pub(crate) const MAKE_OTHER: usize = 14;
pub(crate) const FLIP: usize = 15;
const CHANGE_ROOT: usize = 16;
pub(crate) const STEPS: [Step; 17] = [
    || remount_without(MsFlags::MS_RDONLY),
    || remount_without(MsFlags::MS_NOSUID),
    || remount_without(MsFlags::MS_NODEV),
    || remount_without(MsFlags::MS_NOEXEC),
    || append_to(COPY),
    || errno(umount2(PLACE, MntFlags::MNT_DETACH)),
    || {
        let (own, user) = (
            CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS,
            nix::unistd::getuid().as_raw(),
        );
        errno(unshare(own)) | hostile_process::map_to_root(user)
    },
    || remount(PLACE, FLAGS),
    || {
        errno(mount(
            Some(PLACE),
            COPY,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        ))
    },
    become_user,
    || read(COPY),
    || read(PLACE),
    || remount(PLACE, MsFlags::MS_NOSUID),
    || remount(PLACE, MsFlags::MS_RDONLY),
    make_other_namespace,
    flip_for_ever,
    || errno(nix::unistd::chroot("/etc")),
];

/// The descriptors of the process's first mount namespace, and of that of its child.
const FIRST: i32 = 601;
const OTHER: i32 = 602;

/// A child in namespaces of its own, where it binds the file to another place. Returns its pid.
fn make_other_namespace() -> i32 {
    hostile_process::keep("self/ns/mnt", FIRST);
    let (read, write) = nix::unistd::pipe().unwrap();
    // SAFETY: the child makes plain syscalls, and never returns.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => {
            drop(write);
            assert_eq!(nix::unistd::read(&read, &mut [0]), Ok(1));
            hostile_process::keep(&format!("{child}/ns/mnt"), OTHER);
            child.as_raw()
        }
        ForkResult::Child => {
            let ends = rustix::process::set_parent_process_death_signal(Some(
                rustix::process::Signal::KILL,
            ));
            let done = [ENTER_OWN, BIND_COPY].map(|step| STEPS[step]());
            if done == [0, 0] && ends.is_ok() {
                let _ = nix::unistd::write(&write, &[1]);
            }
            drop(write);
            loop {
                nix::unistd::pause();
            }
        }
    }
}

/// Two threads alternate between the namespaces in opposite order. `/proc/PID/ns/mnt` is the
/// namespace of the main thread.
fn flip_for_ever() -> i32 {
    let flip = |order: [i32; 2]| {
        unshare(CloneFlags::CLONE_FS).unwrap();
        for namespace in order.into_iter().cycle() {
            // SAFETY: both descriptors stay open until the process ends.
            setns(
                unsafe { BorrowedFd::borrow_raw(namespace) },
                CloneFlags::CLONE_NEWNS,
            )
            .unwrap();
        }
    };
    std::thread::spawn(move || flip([FIRST, OTHER]));
    flip([OTHER, FIRST]);
    0
}

fn remount_without(flag: MsFlags) -> i32 {
    let result = remount(COPY, FLAGS.difference(flag));
    if result == 0 {
        remount(COPY, FLAGS);
    }
    result
}

fn become_user() -> i32 {
    let user = (1000.into(), 1000.into());
    let become_user = setresgid(user.1, user.1, user.1).and(setresuid(user.0, user.0, user.0));
    // As after an exec.
    errno(become_user)
        | rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable)
            .err()
            .map_or(0, |errno| errno.raw_os_error())
}

fn read(path: &str) -> i32 {
    fs::read(path)
        .err()
        .map_or(0, |error| error.raw_os_error().unwrap())
}

fn append_to(path: &str) -> i32 {
    fs::OpenOptions::new()
        .append(true)
        .open(path)
        .err()
        .map_or(0, |error| error.raw_os_error().unwrap())
}

fn remount(place: &str, flags: MsFlags) -> i32 {
    errno(mount(
        None::<&str>,
        place,
        None::<&str>,
        MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags,
        None::<&str>,
    ))
}

fn refresh(
    scene: &Scene,
    process: &HeldProcess,
    spec: &SpecUsers,
) -> Result<Refreshed, RefreshError> {
    scene.rebind();
    let volumes = PodVolumes::open(&scene.pod.directory()).unwrap();
    refresh_container(
        helper(),
        REPLACE_TIMEOUT,
        process,
        Some(spec),
        &[&volumes],
        RefreshAct::Replace(Notify::None),
        &scene.records(),
    )
}

/// The kernel locks the flags of mounts that it copies to another user namespace. A mount that is
/// attached there later has no locked flags.
#[test_if(can_run)]
fn a_container_in_namespaces_of_its_own_gets_no_mount_that_it_can_make_writable() {
    let scene = Scene::with_keys(1);
    fs::write(scene.root.path().join("copy"), "").unwrap();
    let mut container = HostileProcess::start(scene.root.path(), &scene.binds(1), None, &STEPS);
    assert_eq!(
        [RESTRICT, ENTER_OWN, BIND_COPY].map(|step| container.does(step)),
        [0; 3]
    );
    let attempts = |container: &mut HostileProcess| {
        ATTEMPTS
            .map(|step| container.does(step))
            .collect::<Vec<_>>()
    };
    let before = attempts(&mut container);
    assert!(before.iter().all(|errno| *errno != 0), "{before:?}");
    scene.pod.update(1);
    let refreshed = refresh(&scene, &container.process, &live::spec_of(None));
    assert_eq!(attempts(&mut container), before, "after {refreshed:?}");
    let refused = RefreshError::Namespace(NamespaceError::OtherOwner(container.process.pid()));
    assert_eq!(
        format!("{:?}", refreshed.unwrap_err()),
        format!("{refused:?}")
    );
}

/// Root of a user namespace may remount the runtime's mounts there. Flags that the kernel locked
/// stay locked.
#[test_if(can_run)]
fn a_refreshed_mount_keeps_the_locked_flags_of_a_container_with_a_user_namespace() {
    let scene = Scene::with_keys(1);
    // The flags of the host's mount are those that the kernel locks.
    let locked = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
    mount(
        None::<&str>,
        &scene.pod.subpath(0),
        None::<&str>,
        locked,
        None::<&str>,
    )
    .unwrap();
    let mut container =
        HostileProcess::start(scene.root.path(), &scene.binds(1), Some(IDS), &STEPS);
    for version in 1..=3 {
        assert_eq!(
            WIDEN.map(|step| container.does(step)),
            [libc::EPERM; 2],
            "before update {version}"
        );
        scene.pod.update(version);
        let refreshed = refresh(&scene, &container.process, &live::spec_of(Some(IDS))).unwrap();
        assert!(
            refreshed.is_current() && refreshed.replaced() == 1,
            "{refreshed:?}"
        );
    }
    assert_eq!(WIDEN.map(|step| container.does(step)), [libc::EPERM; 2]);
}

#[test_if(can_run)]
fn a_container_with_other_ids_than_its_spec_is_refused() {
    let scene = Scene::with_keys(1);
    let container = HostileProcess::start(scene.root.path(), &scene.binds(1), Some(IDS), &STEPS);
    scene.pod.update(1);
    for (ids, refused) in [
        (
            Some("0 100000 65535"),
            NamespaceError::OtherIds(container.process.pid()),
        ),
        (None, NamespaceError::OtherOwner(container.process.pid())),
    ] {
        let error = refresh(&scene, &container.process, &live::spec_of(ids)).unwrap_err();
        assert_eq!(
            format!("{error:?}"),
            format!("{:?}", RefreshError::Namespace(refused))
        );
    }
    let plain = scene.start(1);
    let error = refresh(&scene, &plain.process, &live::spec_of(Some(IDS))).unwrap_err();
    let refused = RefreshError::Namespace(NamespaceError::OtherOwner(plain.process.pid()));
    assert_eq!(format!("{error:?}"), format!("{refused:?}"));
    assert!(
        refresh(&scene, &container.process, &live::spec_of(Some(IDS)))
            .unwrap()
            .is_current()
    );
}

/// The spec of a container in another container's user namespace names the namespace by a path.
#[test_if(can_run)]
fn a_user_namespace_at_a_path_is_compared() {
    let scene = Scene::with_keys(1);
    let containers = [1, 2]
        .map(|_| HostileProcess::start(scene.root.path(), &scene.binds(1), Some(IDS), &STEPS));
    let spec = |container: &HostileProcess| {
        let path = format!("/proc/{}/ns/user", container.process.pid());
        let linux = format!(r#"{{"namespaces":[{{"type":"user","path":"{path}"}}]}}"#);
        SpecUsers::from_spec(format!(r#"{{"linux":{linux}}}"#).as_bytes()).unwrap()
    };
    scene.pod.update(1);
    let other = refresh(&scene, &containers[0].process, &spec(&containers[1])).unwrap_err();
    assert!(
        matches!(
            &other,
            RefreshError::Namespace(NamespaceError::OtherPath { .. })
        ),
        "{other:?}"
    );
    assert!(
        refresh(&scene, &containers[0].process, &spec(&containers[0]))
            .unwrap()
            .is_current()
    );
}

/// The process enters another namespace at any moment of a refresh: the refresh checks, reads and
/// enters the same namespace.
#[test_if(can_run)]
fn a_process_that_changes_namespaces_in_a_loop_gets_no_mount_in_the_other_one() {
    let scene = Scene::with_keys(1);
    fs::write(scene.root.path().join("copy"), "").unwrap();
    let mut container = HostileProcess::start(scene.root.path(), &scene.binds(1), None, &STEPS);
    let other = container.does(MAKE_OTHER);
    let mounts = || {
        let table = fs::read_to_string(format!("/proc/{other}/mountinfo")).unwrap();
        // The roots of its mounts change by themselves: the kubelet removes the old file.
        table
            .lines()
            .map(|line| line.split(' ').next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let before = mounts();
    container.begins(FLIP);
    let (mut refreshed, mut refused) = (0, 0);
    for version in 1..=rounds(100, 10_000) {
        scene.pod.update_keeping_old(version);
        match refresh(&scene, &container.process, &live::spec_of(None)) {
            Ok(done) => refreshed += done.replaced(),
            Err(RefreshError::Namespace(NamespaceError::OtherOwner(_))) => refused += 1,
            Err(other) => panic!("{other:?}"),
        }
        assert_eq!(mounts(), before, "after update {version}");
    }
    assert!(
        refreshed > 10 && refused > 10,
        "{refreshed} refreshed, {refused} refused"
    );
}

/// As with `hostUsers: false`: the volume's files belong to root of the container's user namespace,
/// by an idmapped mount.
const IDS: &str = "0 100000 65536";

/// The process makes a user namespace that maps its own id to root. A mount with this mapping would
/// show root's files as files of the process.
#[test_if(can_run)]
fn a_process_in_a_nested_user_namespace_gets_no_file_that_it_may_not_read() {
    let scene = Scene::with_keys(1);
    fs::write(scene.root.path().join("copy"), "").unwrap();
    let secret = || {
        fs::set_permissions(
            scene.pod.volume().join("..data/0"),
            fs::Permissions::from_mode(0o400),
        )
        .unwrap()
    };
    secret();
    let mut container =
        HostileProcess::start(scene.root.path(), &scene.binds(1), Some(IDS), &STEPS);
    if let Err(error) = idmap_stale(&scene, &container.process) {
        return live_skipped(&error);
    }
    assert_eq!(container.does(READ), 0, "root of the container reads it");
    assert_eq!(
        [DROP_PRIVILEGES, ENTER_OWN, BIND_COPY].map(|step| container.does(step)),
        [0; 3]
    );
    assert_eq!(
        [READ, READ_COPY].map(|step| container.does(step)),
        [libc::EACCES; 2]
    );
    scene.pod.update(1);
    secret();
    let refreshed = refresh(&scene, &container.process, &live::spec_of(Some(IDS)));
    let reads = [READ, READ_COPY].map(|step| container.does(step));
    assert_eq!(reads, [libc::EACCES; 2], "after {refreshed:?}");
    let refused = RefreshError::Namespace(NamespaceError::OtherOwner(container.process.pid()));
    assert_eq!(
        format!("{:?}", refreshed.unwrap_err()),
        format!("{refused:?}")
    );
}

fn live_skipped(why: &io::Error) {
    eprintln!("SKIPPED: no idmapped mount: {why}");
}

/// Replaces the stale mount by a mount that is idmapped with the process's user namespace, as a
/// runtime does.
fn idmap_stale(scene: &Scene, process: &HeldProcess) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let mount =
        rustix::mount::open_tree(rustix::fs::CWD, scene.pod.volume().join("..data/0"), flags)?;
    let users = File::open(format!("/proc/{}/ns/user", process.pid()))?;
    idmap(&mount, &users)?;
    let namespace = File::open(format!("/proc/{}/ns/mnt", process.pid()))?;
    // SAFETY: the child makes plain syscalls, and ends without returning.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            assert_eq!(
                nix::sys::wait::waitpid(child, None)?,
                nix::sys::wait::WaitStatus::Exited(child, 0)
            );
            Ok(())
        }
        ForkResult::Child => {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            let entered = setns(&namespace, CloneFlags::CLONE_NEWNS)
                .and_then(|()| umount2(PLACE, MntFlags::MNT_DETACH));
            let moved = rustix::mount::move_mount(&mount, c"", rustix::fs::CWD, PLACE, flags);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(entered.is_err() || moved.is_err())) }
        }
    }
}

/// mount_setattr(2): read-only, with this user namespace's ids.
pub(crate) fn idmap(mount: &OwnedFd, users: &File) -> io::Result<()> {
    let request = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | libc::MOUNT_ATTR_RDONLY,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: users.as_raw_fd() as u64,
    };
    // SAFETY: the request is of the size that is passed with it and the path ends with a zero; the
    // kernel keeps neither.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const request,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The mount table is that of the namespace, not that of the process's root.
#[test_if(can_run)]
fn a_process_that_changed_its_root_is_refreshed() {
    let scene = Scene::with_keys(1);
    let mut container = HostileProcess::start(scene.root.path(), &scene.binds(1), None, &STEPS);
    assert_eq!(container.does(CHANGE_ROOT), 0);
    scene.pod.update(1);
    let refreshed = refresh(&scene, &container.process, &live::spec_of(None)).unwrap();
    assert!(
        refreshed.is_current() && refreshed.replaced() == 1,
        "{refreshed:?}"
    );
    let inside = format!("/proc/{}/root/app/0", container.process.pid());
    assert_eq!(fs::read_to_string(inside).unwrap(), "1");
}
