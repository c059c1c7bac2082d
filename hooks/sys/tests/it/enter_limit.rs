//! The number of children that wait in containers is limited. In a file of its own: the limit is
//! that of the process.

use bindguard_sys::enter::{EnterError, Entered};
use bindguard_testing::live::Container;

use crate::enter_scene::{PATIENCE, Scene, can_run, far};

#[test]
fn at_most_32_children_wait_in_containers() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    let namespace = container.namespace();
    let enter = || Entered::enter(&namespace, Vec::new(), PATIENCE, far());
    let mut children: Vec<Entered> = (0..32).map(|_| enter().unwrap()).collect();
    let refused = enter().unwrap_err();
    assert!(matches!(refused, EnterError::NoChild(_)), "{refused:?}");
    children.pop();
    assert!(enter().is_ok(), "one ended");
}
