//! Replacing a mount in a container's mount namespace, step by step, by both methods.

use bindguard_testing::test_if;
use std::path::Path;

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_sys::Handle;
use bindguard_sys::enter::{Action, Replacement};
use bindguard_sys::replace::{CloneSettings, clone_like};
use bindguard_testing::live::{Container, change};
use nix::mount::MsFlags;

use crate::enter_scene::{METHODS, PLACE, Scene, attached, can_run, enter, entered, stale_top};

#[test_if(can_run)]
fn both_ways_show_the_new_file_and_leave_one_mount_like_the_old_one() {
    for attach in METHODS {
        for parent in [MsFlags::MS_PRIVATE, MsFlags::MS_SLAVE, MsFlags::MS_SHARED] {
            let scene = Scene::new();
            let container = Container::start_with(&scene.root(), &scene.binds(), || {
                change(Path::new("/"), MsFlags::MS_SHARED);
                change(Path::new("/"), parent);
            })
            .reading();
            let look = || {
                let (mount, propagation) =
                    (container.mounts_at(PLACE), container.propagation_at("/"));
                (
                    container.mounts(),
                    mount[0].1.clone(),
                    propagation,
                    container.propagation_at(PLACE),
                )
            };
            let before = look();
            for version in 1..=20 {
                scene.update(version);
                let entered = entered(&container, &scene, version);
                if !attached(attach, &entered) {
                    break;
                }
                entered.call(Action::Detach, 0).unwrap();
                entered.call(Action::SetPropagation, 0).unwrap();
                assert_eq!(container.read("etc/conf").unwrap(), version.to_string());
            }
            assert_eq!(look(), before);
            let seen = container.stop();
            assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
        }
    }
}

/// Its mount namespace belongs to its own user namespace.
#[test_if(can_run)]
fn a_container_in_a_user_namespace_of_its_own() {
    for attach in METHODS {
        let scene = Scene::new();
        let container = Container::start_in_user_namespace(&scene.root(), &scene.binds()).reading();
        let look = || {
            (
                container.mounts(),
                container.mounts_at(PLACE)[0].1.clone(),
                container.propagation_at("/"),
            )
        };
        let before = look();
        for version in 1..=10 {
            scene.update(version);
            let entered = entered(&container, &scene, version);
            if !attached(attach, &entered) {
                break;
            }
            entered.call(Action::Detach, 0).unwrap();
            entered.call(Action::SetPropagation, 0).unwrap();
            assert_eq!(container.read("etc/conf").unwrap(), version.to_string());
        }
        assert_eq!(look(), before);
        let seen = container.stop();
        assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
    }
}

/// An idmapped mount belongs to a user namespace: the new mount gets the same mapping.
#[test_if(can_run)]
fn an_idmapped_mount_stays_idmapped() {
    for attach in METHODS {
        let scene = Scene::new();
        let container = Container::start_in_user_namespace(&scene.root(), &scene.binds()).reading();
        let mounts = container.mounts();
        for version in 1..=5 {
            scene.update(version);
            let (stale, parent) = stale_idmapped(&container);
            let (namespace, target) = (
                container.namespace(),
                Handle::of(&scene.file(version)).unwrap(),
            );
            let new = match clone_like(
                &target,
                &stale,
                Some(&namespace.users),
                CloneSettings::default(),
            ) {
                Ok(new) => new,
                Err(error) => {
                    return bindguard_testing::skipped(
                        &bindguard_core::error_chain(&error).to_string(),
                    );
                }
            };
            let replacement = Replacement {
                stale: &stale,
                parent: Some(&parent),
                new: Some(new),
            };
            let entered = enter(&container, replacement);
            entered.call(Action::Open, 0).unwrap();
            if !attached(attach, &entered) {
                break;
            }
            entered.call(Action::Detach, 0).unwrap();
            entered.call(Action::SetPropagation, 0).unwrap();
            assert_eq!(container.read("etc/conf").unwrap(), version.to_string());
            assert!(
                container.mounts_at(PLACE)[0].1.contains("idmapped"),
                "{:?}",
                container.mounts_at(PLACE)
            );
        }
        assert_eq!(container.mounts(), mounts);
        let seen = container.stop();
        assert_eq!((seen.failed, seen.empty, seen.older), (0, 0, 0), "{seen:?}");
    }
}

/// The entry of the mount at the place, changed to idmapped: the first replacement idmaps the
/// mount.
fn stale_idmapped(container: &Container) -> (MountEntry, MountEntry) {
    let text = String::from_utf8(container.process.read("mountinfo").unwrap()).unwrap();
    let idmapped =
        |line: &str| match line.contains(" /etc/conf ro,nosuid") && !line.contains("idmapped") {
            true => line.replacen(" /etc/conf ro,", " /etc/conf ro,idmapped,", 1) + "\n",
            false => line.to_owned() + "\n",
        };
    let table =
        MountTable::from_mountinfo(text.lines().map(idmapped).collect::<String>().as_bytes())
            .unwrap();
    let stale = table.stack_at(Path::new(PLACE)).last().unwrap().clone();
    assert!(stale.attributes.is_idmapped(), "{stale:?}");
    let parent = table.mount(stale.parent).unwrap().clone();
    (stale, parent)
}

/// The agent is killed: the child ends, and the next child finishes the replacement.
#[test_if(can_run)]
fn killed_between_attach_and_detach_leaves_whole_content_and_the_next_one_finishes() {
    for attach in METHODS {
        let scene = Scene::new();
        let container = Container::start(&scene.root(), &scene.binds());
        let before = (container.mounts(), container.propagation_at("/"));
        scene.update(1);
        let first = entered(&container, &scene, 1);
        if !attached(attach, &first) {
            continue;
        }
        drop(first);
        assert_eq!(
            (
                container.read("etc/conf").as_deref(),
                container.mounts_at(PLACE).len()
            ),
            (Some("0"), 2)
        );
        let (stale, parent) = stale_top(&container);
        let replacement = Replacement {
            stale: &stale,
            parent: Some(&parent),
            new: None,
        };
        let second = enter(&container, replacement);
        second.call(Action::Open, 0).unwrap();
        second.call(Action::Detach, 0).unwrap();
        assert_eq!(container.read("etc/conf").as_deref(), Some("1"));
        assert_eq!((container.mounts(), container.propagation_at("/")), before);
    }
}

/// The kubelet removes the new file as well, before the stale mount is detached: the kernel
/// detaches it then.
#[test_if(can_run)]
fn a_stale_mount_that_the_kernel_detached_is_no_error() {
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    scene.update(1);
    let entered = entered(&container, &scene, 1);
    if !attached(METHODS[0], &entered) {
        return;
    }
    scene.update(2);
    assert_eq!(
        container.mounts_at(PLACE).len(),
        1,
        "the unlink detached it"
    );
    entered.call(Action::Detach, 0).unwrap();
    assert_eq!(
        (
            container.read("etc/conf").as_deref(),
            container.mounts_at(PLACE).len()
        ),
        (Some("1"), 1)
    );
}

#[test_if(can_run)]
fn a_file_removed_before_it_was_attached_is_an_error() {
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    scene.update(1);
    let entered = entered(&container, &scene, 1);
    scene.update(2);
    for attach in METHODS {
        let error = attach(&entered).unwrap_err();
        assert!(
            error.is_target_gone() || error.is_not_possible(),
            "{error:?}"
        );
    }
    assert_eq!(container.read("etc/conf").as_deref(), Some("0"));
}
