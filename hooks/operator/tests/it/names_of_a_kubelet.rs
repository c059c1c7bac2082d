//! A kubelet whose root has several names, surveyed and repaired by an operator.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::Outcome;
use bindguard_operator::{RepairAct, named_subpath, repair_node, survey_node};
use bindguard_testing::scene::Scene;
use bindguard_testing::{own_namespace, test_if};

#[test_if(own_namespace)]
fn a_node_is_surveyed_once_and_repaired_by_any_of_its_names() {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir").with_replaced("app.conf");
    let (real, link) = (
        scene.folder.path().join("kubelet"),
        scene.folder.path().join("link"),
    );
    symlink(&real, &link).unwrap();
    let under = |root: &Path| root.join("pods/uid-1/volume-subpaths/data/app/0");
    for roots in [
        vec![link.clone(), real.clone()],
        vec![link.clone()],
        vec![real.clone(), link.clone()],
    ] {
        let places = Places {
            kubelet_roots: roots.clone(),
            ..Places::default()
        };
        let report = survey_node(&Policy::default(), &places, &Default::default(), |_| true);
        let stale: Vec<_> = report
            .binds
            .iter()
            .filter(|bind| bind.bind.verdict().as_str() == "stale")
            .collect();
        let [stale] = &stale[..] else {
            panic!("{roots:?}: {report:?}")
        };
        assert_eq!(stale.bind.source(), under(&roots[0]));
        assert!(stale.origin.is_some(), "{roots:?}: {report:?}");
        assert!(
            report
                .problems
                .iter()
                .all(|problem| !problem.contains("not checked")),
            "{:?}",
            report.problems
        );
    }
    let places = Places {
        kubelet_roots: vec![link],
        ..Places::default()
    };
    let named = named_subpath(&under(&real), &places).unwrap();
    let report = repair_node(
        &Policy::default(),
        &places,
        &Default::default(),
        RepairAct::Rebind,
        |subpath| *subpath == named,
    );
    assert_eq!(
        report.binds[0].bind.outcome,
        Some(Outcome::Rebound { tries: 1 }),
        "{report:?}"
    );
    assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "new");
}

/// minikube binds `/var/lib/kubelet` from its disk, and its mounts reach both names.
#[test_if(own_namespace)]
fn a_root_that_is_bound_from_another_folder_is_surveyed_once() {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir").with_replaced("app.conf");
    let (real, bound) = (
        scene.folder.path().join("kubelet"),
        scene.folder.path().join("bound"),
    );
    fs::create_dir(&bound).unwrap();
    let flags = rustix::mount::MountPropagationFlags::SHARED;
    rustix::mount::mount_bind_recursive(&real, &bound).unwrap();
    rustix::mount::mount_change(&bound, flags).unwrap();
    for roots in [vec![real.clone()], vec![real.clone(), bound.clone()]] {
        let places = Places {
            kubelet_roots: roots.clone(),
            ..Places::default()
        };
        let report = survey_node(&Policy::default(), &places, &Default::default(), |_| true);
        let subpaths = report.binds.iter().filter(|bind| bind.is_stale());
        assert_eq!(subpaths.count(), 1, "{roots:?}: {report:?}");
        assert_eq!(report.problems, [] as [&str; 0], "{roots:?}");
    }
}
