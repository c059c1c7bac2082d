//! The number of children that wait in containers is limited. In a file of its own: the limit is that of the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

#[allow(dead_code, reason = "not every test file needs all of it")]
mod enter_scene;
mod folder;
#[allow(dead_code, reason = "not every test file needs all of it")]
mod live;
#[allow(dead_code, reason = "not every test file needs all of it")]
mod namespace;

use bindguard_sys::enter::{EnterError, Entered};
use enter_scene::{PATIENCE, Scene, can_run};
use live::Container;

#[test]
fn at_most_32_children_wait_in_containers() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    let namespace = container.namespace();
    let enter = || Entered::enter(&namespace, Vec::new(), PATIENCE, enter_scene::far());
    let mut children: Vec<Entered> = (0..32).map(|_| enter().unwrap()).collect();
    let refused = enter().unwrap_err();
    assert!(matches!(refused, EnterError::NoChild(_)), "{refused:?}");
    children.pop();
    assert!(enter().is_ok(), "one ended");
}
