//! Only children that hang are limited, for each pod (`enter_hanging`): the agents of other tests
//! have children as well, so the test runs in a separate process.

use std::env;
use std::process::Command;

use bindguard_sys::enter::Entered;
use bindguard_testing::live::Container;
use bindguard_testing::{helper, test_if};

use crate::enter_scene::{ANSWER_TIMEOUT, Scene, can_run, far};

#[test]
fn children_that_do_not_hang_are_not_limited() {
    let mut own = Command::new(env::current_exe().unwrap());
    own.args([
        "--exact",
        "enter_limit::in_a_process_of_its_own",
        "--ignored",
    ]);
    let ended = own.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

#[test_if(can_run)]
#[ignore = "another test starts it"]
fn in_a_process_of_its_own() {
    let scene = Scene::new();
    let container = Container::start(&scene.root(), &scene.binds());
    let namespace = container.namespace();
    let enter = || Entered::enter(helper(), &namespace, Vec::new(), ANSWER_TIMEOUT, far());
    let children: Vec<Entered> = (0..100).map(|_| enter().unwrap()).collect();
    drop(children);
    assert!(enter().is_ok());
}
