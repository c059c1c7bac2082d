//! `bindguard release`: copies of mounts that the host has unmounted, in private host-root binds.

use std::fs;
use std::path::Path;

use bindguard_core::report::ReleaseResult;
use bindguard_guard::refresh::{Release, Released};
use bindguard_testing::mount_tmpfs;
use bindguard_testing::{live, test_if, unmount};
use nix::mount::MsFlags;

use crate::refresh_scene::can_attach_beneath;
use crate::refresh_scene::host_root::{Scene, can_record};

/// True for a copy that stays because no record of the create shows that it is one.
pub(crate) fn is_without_record(copy: &Released) -> bool {
    is_refused(copy, "the create of the container was not recorded: ")
}

/// True for a copy that the record of the create lacks.
pub(crate) fn is_not_recorded(copy: &Released) -> bool {
    is_refused(copy, "the record of the create lacks the mount: ")
}

fn is_refused(copy: &Released, why: &str) -> bool {
    let error = copy.error.as_deref().unwrap_or_default();
    copy.result == ReleaseResult::Refused && error.starts_with(why)
}

#[test_if(can_record)]
fn recorded_copies_are_released_and_no_other_mount() {
    let (scene, container) = Scene::recorded(|| mount_tmpfs(Path::new("/host/later")));
    unmount(&scene.disk());
    let looked = scene.release(&container, Release::Look);
    for copy in &looked {
        let place = match copy.result {
            ReleaseResult::Kept => "/host/disk",
            _ if is_not_recorded(copy) => "/host/later",
            _ => panic!("{copy:?}"),
        };
        assert_eq!(copy.mount.mount_point, Path::new(place));
    }
    assert_eq!(looked.len(), 2);
    assert_eq!(container.read("host/disk/file").as_deref(), Some("disk"));
    let released = scene.release(&container, Release::Unmount);
    let is_released = |it: &&Released| it.result == ReleaseResult::Released;
    assert_eq!(released.iter().filter(is_released).count(), 1);
    assert!(container.mounts_at("/host/disk").is_empty());
    assert_eq!(container.mounts_at("/host/later").len(), 1);
    assert_eq!(scene.release(&container, Release::Unmount).len(), 1);
}

/// A node with many network namespaces: a child replaces at most 256 mounts.
#[test_if(can_record)]
fn no_copy_is_left_out() {
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
        unmount(place);
    }
    let looked = scene.release(&container, Release::Look);
    assert_eq!(looked.len(), COPIES);
    let is_kept = |it: &Released| it.result == ReleaseResult::Kept;
    assert!(looked.iter().all(is_kept), "{looked:?}");
    // On a busy machine the time of a call may end before the last copy.
    let is_released_or_late = |it: &Released| match it.result {
        ReleaseResult::Released => true,
        ReleaseResult::Refused => {
            is_refused(it, "no time was left after ")
                || is_refused(it, "the container did not answer within ")
        }
        ReleaseResult::Kept | ReleaseResult::Busy => false,
    };
    for _ in 0..5 {
        let released = scene.release(&container, Release::Unmount);
        assert!(released.iter().all(is_released_or_late), "{released:?}");
    }
    assert_eq!(scene.release(&container, Release::Look).len(), 0);
}

/// The agent refreshes the container at the same moment.
#[test_if(can_record)]
fn a_release_waits_for_a_refresh() {
    let (scene, container) = Scene::recorded(|| {});
    unmount(&scene.disk());
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

/// A runtime is called twice for the same start, or by hand: the container's own mounts of
/// meanwhile are no copies.
#[test_if(can_record)]
fn a_second_proof_does_not_make_mounts_of_the_container_copies() {
    let (scene, container) = Scene::recorded(|| mount_tmpfs(Path::new("/host/later")));
    scene.prove(&container);
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(&released[..], [copy] if is_not_recorded(copy)),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/later").len(), 1);
}

#[test_if(can_record)]
fn a_copy_with_a_mount_of_the_container_on_it_is_busy() {
    let (scene, container) = Scene::recorded(|| {
        fs::create_dir("/host/disk/own").unwrap();
        mount_tmpfs(Path::new("/host/disk/own"));
    });
    unmount(&scene.disk());
    for extent in [Release::Unmount, Release::Detach] {
        let released = scene.release(&container, extent);
        let busy = |it: &&Released| it.result == ReleaseResult::Busy || is_not_recorded(it);
        assert_eq!(released.iter().filter(busy).count(), 2, "{released:?}");
        assert_eq!(container.mounts_at("/host/disk/own").len(), 1);
    }
}

/// A detach hides the open file: the device stays busy.
#[test_if(can_record)]
fn a_copy_in_use_is_busy_unless_it_is_detached() {
    let (scene, container) = Scene::recorded(|| {});
    let file = fs::File::open(format!(
        "/proc/{}/root/host/disk/file",
        container.process.pid()
    ));
    unmount(&scene.disk());
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(&released[..], [copy] if copy.result == ReleaseResult::Busy),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
    let released = scene.release(&container, Release::Detach);
    assert!(
        released[0].result == ReleaseResult::Released,
        "{released:?}"
    );
    assert!(container.mounts_at("/host/disk").is_empty());
    drop(file);
}

#[test_if(can_record)]
fn a_copy_on_a_shared_mount_stays() {
    let (scene, container) =
        Scene::recorded(|| live::change(Path::new("/host"), MsFlags::MS_SHARED));
    unmount(&scene.disk());
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(&released[..], [copy] if is_refused(copy, "the parent mount is shared: ")),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
}

/// As under a shim without a guard.
#[test_if(can_attach_beneath)]
fn without_a_record_nothing_is_released() {
    let scene = Scene::new();
    let container = scene.start();
    unmount(&scene.disk());
    let released = scene.release(&container, Release::Unmount);
    assert!(
        matches!(&released[..], [copy] if is_without_record(copy)),
        "{released:?}"
    );
    assert_eq!(container.mounts_at("/host/disk").len(), 1);
}
