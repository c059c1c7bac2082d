//! Random histories of a volume. Payloads are written, swapped, half written and stranded. Files
//! are replaced, removed and created again; mounts are lost and made again. Servers die or forget
//! handles; guards are killed in between.
//!
//! After every create the container gets the file that the kubelet would bind, if such a file
//! exists. The model knows the true file, which the guard never sees.

#![allow(
    clippy::disallowed_methods,
    reason = "how long it runs is the tester's choice"
)]

mod world;

use std::path::Path;

use bindguard_core::evidence::FileKind;
use bindguard_core::judge::{
    Finding, Plan, Rebind, RepairMethod, StaleCause, Unmounted, Verdict, judge_subpath,
};
use bindguard_core::kubelet::{Plugin, VolumeSubpath};
use bindguard_core::places::SourceKind;
use bindguard_core::policy::{Policy, Vanished};
use bindguard_core::spec::SpecEdit;
use proptest::prelude::*;
use world::{Event, Storage, Veiled, World};

const SUBPATH: &str = "/var/lib/kubelet/pods/u/volume-subpaths/v/c/0";

fn world() -> impl Strategy<Value = World> {
    let volume = prop::sample::select(vec![
        (Some("kubernetes.io~configmap"), Storage::Node),
        (Some("kubernetes.io~secret"), Storage::Memory),
        (Some("kubernetes.io~empty-dir"), Storage::Node),
        (Some("kubernetes.io~empty-dir"), Storage::Memory),
        (Some("kubernetes.io~local-volume"), Storage::Disk),
        (Some("kubernetes.io~csi"), Storage::Server),
        (None, Storage::Host),
    ]);
    let sub_path = prop::sample::select(vec!["app.conf", "deep/er"]);
    let kind = prop::sample::select(vec![FileKind::File, FileKind::Directory]);
    (volume, sub_path, kind).prop_map(|((folder, storage), sub_path, kind)| {
        let plugin = folder.map_or(Plugin::HOST_PATH, |folder| {
            Plugin::from_folder(folder.as_ref()).unwrap()
        });
        World::new(plugin, storage, sub_path, kind)
    })
}

fn event() -> impl Strategy<Value = Event> {
    let veiled = prop::sample::select(vec![
        Veiled::Mount,
        Veiled::Identity,
        Veiled::Volume,
        Veiled::Target,
        Veiled::File,
    ]);
    prop_oneof![
        6 => (prop::bool::weighted(0.8), any::<bool>())
            .prop_map(|(with_key, strands_old)| Event::Update { with_key, strands_old }),
        1 => Just(Event::HalfUpdate),
        4 => prop::bool::weighted(0.2).prop_map(|other_kind| Event::Replace { other_kind }),
        2 => Just(Event::Remake),
        2 => Just(Event::Remove),
        6 => Just(Event::Bind),
        1 => Just(Event::Unbind),
        1 => Just(Event::Unmount),
        2 => Just(Event::Mount),
        1 => Just(Event::Die),
        1 => Just(Event::Forget),
        2 => Just(Event::GuardKilled),
        1 => veiled.prop_map(|veiled| Event::Veil(Some(veiled))),
        2 => Just(Event::Veil(None)),
        6 => Just(Event::Create),
    ]
}

fn subpath() -> VolumeSubpath {
    VolumeSubpath::from_path(Path::new(SUBPATH), [Path::new("/var/lib/kubelet")]).unwrap()
}

/// The findings of a spec that binds the subpath and two foreign sources.
fn findings(world: &World) -> [Finding; 3] {
    let finding = |bind, source: &str, kind, verdict| Finding {
        bind: Some(bind),
        source: source.into(),
        destination: Some("/etc/x".into()),
        kind,
        verdict,
    };
    [
        finding(0, "/srv/data", SourceKind::Foreign, Verdict::Foreign),
        finding(
            1,
            SUBPATH,
            SourceKind::Subpath(subpath()),
            judge_subpath(&subpath(), &world.evidence()),
        ),
        finding(2, "/etc/hosts", SourceKind::Foreign, Verdict::Foreign),
    ]
}

fn plan(world: &World, policy: &Policy) -> Plan {
    let plan = Plan::from_findings(&findings(world), policy);
    assert!(
        plan.rebinds.iter().all(|order| order.bind == Some(1)),
        "{plan:?}"
    );
    assert!(!plan.edits_bind(0) && !plan.edits_bind(2), "{plan:?}");
    assert!(
        !world.is_veiled() || plan.is_empty(),
        "planned on what was not read: {plan:?}"
    );
    assert!(
        world.answers() || plan.is_empty(),
        "planned on what does not answer: {plan:?}"
    );
    plan
}

/// Carries out a re-bind as the guard does, with a new check after each step; stops after the first
/// step if `is_killed`.
fn carry_out(world: &mut World, policy: &Policy, is_killed: bool) {
    for _ in 0..8 {
        let orders = plan(world, policy).rebinds;
        let [order] = &orders[..] else { return };
        step(world, order, is_killed);
        if is_killed {
            return;
        }
    }
    panic!("it never comes to an end: {world:?}");
}

fn step(world: &mut World, order: &Rebind, is_killed: bool) {
    match order.remedy.method {
        RepairMethod::Remake => world.make_directory(&order.remedy.sub_path),
        RepairMethod::Rebind if world.stack.len() > 1 => world.detach(),
        RepairMethod::Rebind => {
            world.attach_beneath(&order.remedy.sub_path);
            if !is_killed {
                world.detach();
            }
        }
        RepairMethod::PointSpecAtVolume => panic!("planned as a re-bind: {order:?}"),
    }
}

/// True if the target that the kubelet would bind today can be bound over the topmost mount.
fn is_there_to_bind(world: &World) -> bool {
    let kind = world.stack.last().map(|top| top.file.kind);
    world.truth().is_some_and(|truth| Some(truth.kind) == kind)
}

/// Checks the bind of a container that is created now.
fn check(world: &World, policy: &Policy) {
    let [_, finding, _] = &findings(world);
    let top = world.stack.last();
    match &finding.verdict {
        Verdict::Current => {
            let top = top.expect("current without a mount");
            assert_eq!(
                (world.stack.len(), top.deleted, world.shows_dead_mount()),
                (1, false, false),
                "{world:?}"
            );
            assert_eq!(
                world.shown(),
                world.truth(),
                "current, and not what the kubelet would bind: {world:?}"
            );
        }
        Verdict::Orphaned { .. } => {
            assert!(
                !is_there_to_bind(world),
                "orphaned, and there is something to bind: {world:?}"
            );
            let shows_placeholder =
                world.is_kubelets() && top.is_some_and(|top| top.is_placeholder);
            assert!(
                !shows_placeholder || world.truth().is_none(),
                "orphaned, and its key is there: {world:?}"
            );
        }
        Verdict::Unmounted(Unmounted::Subpath) => assert!(world.stack.is_empty()),
        Verdict::Unmounted(Unmounted::Volume { .. }) => assert!(!world.is_there(), "{world:?}"),
        Verdict::Unknown(_) => assert!(world.is_veiled() || !world.answers(), "{world:?}"),
        Verdict::Dead(_) => {
            assert!(world.shows_dead_mount(), "{world:?}");
            assert!(
                world.is_veiled() || !world.answers() || !is_there_to_bind(world),
                "dead, and not repaired: {world:?}"
            );
        }
        // For a folder of the host, only a deletion can be detected.
        Verdict::Foreign => {
            let top = top.expect("foreign without a mount");
            assert!(
                world.is_of_the_host() && !top.deleted && world.stack.len() == 1,
                "{world:?}"
            );
        }
        // No runtime can bind a deleted root, even if other evidence could not be read.
        Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Err(_),
        } => {
            assert!(top.is_some_and(|top| top.deleted), "{world:?}");
            assert!(
                world.is_veiled() || !world.answers(),
                "stale, and not repaired: {world:?}"
            );
        }
        // A directory cannot be bound over a file: the spec edit names the volume's own path, which
        // leads to the directory.
        Verdict::Stale {
            remedy: Ok(remedy), ..
        } if remedy.method == RepairMethod::PointSpecAtVolume => {
            assert!(matches!(
                &plan(world, policy).edits[..],
                [SpecEdit::Source { bind: 1, .. }]
            ));
            assert!(world.truth().is_some());
        }
        verdict => panic!("{verdict:?} after an admission of {world:?}"),
    }
}

/// The number of cases; `PROPTEST_CASES=100000` runs more.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(1500)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn after_any_history_a_container_gets_the_file_that_the_kubelet_would_bind(
        mut world in world(),
        events in prop::collection::vec(event(), 1..60),
        remakes: bool,
    ) {
        let vanished_directories = if remakes { Vanished::Remake } else { Vanished::Leave };
        let policy = Policy { vanished_directories, ..Policy::default() };
        for event in events {
            world.happen(event);
            match event {
                Event::GuardKilled => carry_out(&mut world, &policy, true),
                Event::Create => {
                    carry_out(&mut world, &policy, false);
                    check(&world, &policy);
                }
                _ => {}
            }
        }
    }
}
