//! The number of children that wait in containers is limited. Each process has a limit of its own,
//! so the test runs in a separate process.

use std::env;
use std::process::Command;

use bindguard_sys::enter::{EnterError, Entered};
use bindguard_testing::helper;
use bindguard_testing::live::Container;

use crate::enter_scene::{ANSWER_TIMEOUT, Scene, can_run, far};

#[test]
fn at_most_32_children_wait_in_containers() {
    let mut own = Command::new(env::current_exe().unwrap());
    own.args([
        "--exact",
        "enter_limit::in_a_process_of_its_own",
        "--ignored",
    ]);
    let ended = own.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

#[test]
#[ignore = "another test starts it"]
fn in_a_process_of_its_own() {
    if !can_run() {
        return;
    }
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    let namespace = container.namespace();
    let enter = || Entered::enter(helper(), &namespace, Vec::new(), ANSWER_TIMEOUT, far());
    let mut children: Vec<Entered> = (0..32).map(|_| enter().unwrap()).collect();
    let refused = enter().unwrap_err();
    assert!(matches!(refused, EnterError::NoChild(_)), "{refused:?}");
    children.pop();
    assert!(enter().is_ok(), "one ended");
}
