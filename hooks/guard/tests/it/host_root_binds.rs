//! Binds of the host's root, or of directories with the mounts of other containers: the guard makes
//! such binds rslave if policy and the requested propagation allow.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use bindguard_core::places::Places;
use bindguard_core::policy::{Policy, ReadOnlyBinds, Scope};
use bindguard_core::report::{BindReport, Outcome};
use bindguard_guard::{Admission, Attempt, admit, admit_spec, check_bundle};
use bindguard_testing::{Folder, Pod, mount_of, own_namespace, test_if};
use nix::mount::{MsFlags, mount};
use serde_json::json;

fn admitted(pod: &Pod) -> Admission {
    admit(&pod.bundle(), &pod.policy(), &pod.places(), Attempt::First)
}

#[test_if(own_namespace)]
fn the_scope_says_which_binds_are_made_rslave() {
    let pod = Pod::with_keys(0);
    let holding = Folder::new();
    fs::create_dir(holding.path().join("disk")).unwrap();
    mount(
        Some("tmpfs"),
        &holding.path().join("disk"),
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    let made_rslave = |host_root_scope| {
        pod.write_spec(&[
            mount_of(Path::new("/"), "/host", "rprivate"),
            mount_of(&pod.directory().join("../.."), "/kubelet", "rprivate"),
            mount_of(holding.path(), "/holding", "rprivate"),
            mount_of(&holding.path().join("disk"), "/disk", "rprivate"),
        ]);
        let policy = Policy {
            host_root_scope,
            ..pod.policy()
        };
        let rslave = |bind: &BindReport| bind.outcome == Some(Outcome::MadeRslave);
        admit(&pod.bundle(), &policy, &pod.places(), Attempt::First)
            .report
            .binds
            .iter()
            .filter(|bind| rslave(bind))
            .count()
    };
    assert_eq!(
        [
            Scope::HostRoot,
            Scope::RuntimeDirectories,
            Scope::AnySubmounts
        ]
        .map(made_rslave),
        [1, 2, 3]
    );
    nix::mount::umount2(
        &holding.path().join("disk"),
        nix::mount::MntFlags::MNT_DETACH,
    )
    .unwrap();
}

/// Issue 14: a log collector's `/var/lib/docker/containers` holds the `/dev/shm` of every
/// container.
#[test_if(own_namespace)]
fn a_folder_inside_a_runtimes_directory_counts_when_it_holds_mounts_of_several_containers() {
    let (pod, docker) = (Pod::with_keys(0), Folder::new());
    let id = |name: &str| docker.path().join("containers").join(name);
    for shm in ["c1/mounts/shm", "c2/mounts/shm"].map(id) {
        fs::create_dir_all(&shm).unwrap();
        mount(
            Some("tmpfs"),
            &shm,
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap();
    }
    let volume = docker.path().join("volumes/db/_data");
    fs::create_dir_all(volume.join("inner")).unwrap();
    mount(
        Some("tmpfs"),
        &volume.join("inner"),
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    fs::create_dir(docker.path().join("tmp")).unwrap();
    fs::write(docker.path().join("docker.sock"), "").unwrap();
    let links = Folder::new();
    symlink(docker.path(), links.path().join("docker")).unwrap();

    let places = Places {
        runtime_directories: vec![docker.path().to_owned()],
        ..pod.places()
    };
    let rslave = |policy: &Policy| {
        let below = [
            "containers",
            "volumes",
            "containers/c1",
            "containers/c1/mounts/shm",
            "volumes/db/_data",
            "tmp",
            "docker.sock",
        ];
        let mut mounts: Vec<_> = below
            .iter()
            .map(|path| mount_of(&docker.path().join(path), &format!("/{path}"), "rprivate"))
            .collect();
        mounts.push(mount_of(
            &links.path().join("docker/containers"),
            "/linked",
            "rprivate",
        ));
        mounts.push(json!({"type": "bind", "source": docker.path().join("containers"), "destination": "/plain", "options": ["bind"]}));
        pod.write_spec(&mounts);
        let report = admit(&pod.bundle(), policy, &places, Attempt::First).report;
        let made = report
            .binds
            .into_iter()
            .filter(|bind| bind.outcome == Some(Outcome::MadeRslave));
        made.map(|bind| bind.finding.destination.unwrap())
            .collect::<Vec<_>>()
    };
    let policy = pod.policy();
    assert_eq!(
        rslave(&policy),
        ["/containers", "/volumes", "/linked"].map(Path::new)
    );
    let root_alone = Policy {
        host_root_scope: Scope::HostRoot,
        ..policy
    };
    assert_eq!(rslave(&root_alone), Vec::<&Path>::new());
}

/// Whatever a bind requests: a mount that is or stays private gets no umount from the host.
#[test_if(own_namespace)]
fn only_a_bind_that_requests_shared_is_not_made_rslave() {
    let pod = Pod::with_keys(0);
    let outcome = |options: &[&str], source: &str| {
        let mount =
            json!({"type": "bind", "source": source, "destination": "/host", "options": options});
        pod.write_spec(&[mount]);
        let admission = admitted(&pod);
        let again = admitted(&pod).report;
        assert_eq!(
            (again.binds[0].verdict().as_str(), &again.binds[0].outcome),
            ("current", &None),
            "{again:?}"
        );
        admission.report.binds[0].outcome.clone()
    };
    // Every node has it; a virtual machine that runs this test need not.
    fs::create_dir_all("/var/lib").unwrap();
    for source in ["/", "//", "/.", "/var/lib/../lib", "/proc/thread-self/root"] {
        for options in [
            &["rbind"][..],
            &["rbind", "RSLAVE"],
            &["slave", "rbind", "bind"],
            &["rbind", "rslave", "rprivate"],
            &["rbind", "rprivate", "rslave"],
            &["private", "rbind", "private"],
            &["rbind", "unbindable"],
            &["ro", "runbindable", "rbind"],
        ] {
            assert_eq!(
                outcome(options, source),
                Some(Outcome::MadeRslave),
                "{options:?} {source}"
            );
        }
        for options in [
            &["rbind", "rslave", "rslave"][..],
            &["rbind", "rshared"],
            &["rbind", "rprivate", "shared"],
        ] {
            assert_eq!(outcome(options, source), None, "{options:?} {source}");
        }
    }
}

/// crun would make such a bind recursive because of the r of rslave, and every runtime would let in
/// the mounts that the host makes later.
#[test_if(own_namespace)]
fn a_bind_that_is_not_recursive_is_left_as_it_is() {
    let pod = Pod::with_keys(0);
    let is_edited = |options: &[&str], words_recurse| {
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["/bin/sleep", "60"], "cwd": "/"},
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/host", "type": "bind", "source": "/", "options": options},
            ],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]},
        });
        let spec = spec.to_string();
        fs::write(pod.config(), &spec).unwrap();
        let policy = Policy {
            words_recurse,
            ..pod.policy()
        };
        let report = admit(&pod.bundle(), &policy, &pod.places(), Attempt::First).report;
        let is_made = report.binds[0].outcome == Some(Outcome::MadeRslave);
        // The same answer as an NRI plugin, before there is a bundle.
        let deadline = Duration::from_secs(10);
        admit_spec(
            spec.as_bytes(),
            &policy,
            &pod.places(),
            deadline,
            |_, edits| {
                assert_eq!(!edits.is_empty(), is_made, "{edits:?}");
                Vec::new()
            },
        );
        let written = fs::read_to_string(pod.config()).unwrap();
        assert_eq!(is_made, written != spec, "{options:?}");
        is_made
    };
    for options in [
        &[][..],
        &["bind", "ro"],
        // Podman's `bind-nonrecursive`
        &["bind", "private", "rw"],
        &["bind", "ro", "slave"],
        &["unbindable", "bind"],
    ] {
        for words_recurse in [false, true] {
            assert!(!is_edited(options, words_recurse), "{options:?}");
        }
    }
    // Docker's `bind-nonrecursive`, which crun binds recursively.
    for options in [&["bind", "rprivate"][..], &["runbindable", "bind", "ro"]] {
        assert!(!is_edited(options, false), "{options:?}");
        assert!(is_edited(options, true), "{options:?}");
    }
}

/// Issue 14: Kubernetes requires propagation None for recursive read-only mounts, and the runtime
/// makes what is mounted below at that moment read-only, not what arrives later.
#[test_if(own_namespace)]
fn a_recursively_read_only_bind_is_reported_and_never_changed() {
    let pod = Pod::with_keys(0);
    let bind = |options: &[&str]| json!({"type": "bind", "source": "/", "destination": "/host", "options": options});
    let rrw = &["rbind", "rprivate", "rro", "rrw"];
    for options in [
        &["rbind", "rprivate", "rro"][..],
        &["rbind", "ro", "rro"],
        &["rro", "rbind", "slave"],
        rrw,
    ] {
        pod.write_spec(&[bind(options)]);
        let spec = fs::read(pod.config()).unwrap();
        let report = admitted(&pod).report;
        assert_eq!(
            (report.binds[0].verdict().as_str(), &report.binds[0].outcome),
            ("pinning", &None),
            "{options:?}"
        );
        assert!(
            report.binds[0].reason().unwrap().contains("rro"),
            "{report:?}"
        );
        assert_eq!(fs::read(pod.config()).unwrap(), spec, "{options:?}");
    }
}

/// Issue 14: rslave lets later mounts of the host into the container, where `ro` does not cover
/// them.
#[test_if(own_namespace)]
fn read_only_binds_are_kept_and_reported_where_policy_says_so() {
    let pod = Pod::with_keys(0);
    let directory = pod.directory();
    let mut writable = mount_of(
        directory.ancestors().nth(2).unwrap(),
        "/writable",
        "rprivate",
    );
    writable["options"] = json!(["rbind", "rprivate", "rw"]);
    let outcomes_with = |read_only_binds| {
        pod.write_spec(&[
            mount_of(Path::new("/"), "/host", "rprivate"),
            writable.clone(),
        ]);
        let policy = Policy {
            read_only_binds,
            ..pod.policy()
        };
        let report = admit(&pod.bundle(), &policy, &pod.places(), Attempt::First).report;
        report
            .binds
            .into_iter()
            .map(|bind| bind.outcome)
            .collect::<Vec<_>>()
    };
    let rslave = Some(Outcome::MadeRslave);
    assert_eq!(
        outcomes_with(ReadOnlyBinds::MakeRslave),
        [rslave.clone(), rslave.clone()]
    );
    assert_eq!(outcomes_with(ReadOnlyBinds::Keep), [None, rslave]);
    let kept = check_bundle(
        &pod.bundle(),
        &Policy {
            read_only_binds: ReadOnlyBinds::Keep,
            ..pod.policy()
        },
        &pod.places(),
    );
    let words = kept.binds[0].log_message().unwrap();
    assert!(
        words.contains("policy keeps read-only binds") && words.ends_with("left as it is"),
        "{words}"
    );
}

#[test_if(own_namespace)]
fn a_host_root_behind_a_link_is_one() {
    let pod = Pod::with_keys(0);
    let holding = tempfile::tempdir().unwrap();
    symlink(
        pod.directory().join("../.."),
        holding.path().join("kubelet"),
    )
    .unwrap();
    let binds = ["kubelet", "kubelet/pods", "kubelet/pods/uid-1", "."];
    pod.write_spec(
        &binds.map(|path| mount_of(&holding.path().join(path), &format!("/{path}"), "rprivate")),
    );
    let report = admitted(&pod).report;
    let source_and_outcome = |bind: &BindReport| (bind.source().to_owned(), bind.outcome.clone());
    let expected = |path| (holding.path().join(path), Some(Outcome::MadeRslave));
    assert_eq!(
        report
            .binds
            .iter()
            .map(source_and_outcome)
            .collect::<Vec<_>>(),
        ["kubelet", "kubelet/pods"].map(expected)
    );
}

/// k0s, MicroK8s and each operator can move the folder: containerd's bundle shows it.
#[test_if(own_namespace)]
fn the_state_folder_of_the_runtime_that_creates_the_container_is_one() {
    let pod = Pod::with_keys(0);
    let disk = Folder::new();
    for (folder, state) in [
        ("run/io.containerd.runtime.v2.task/k8s.io/c", "run"),
        ("storage/overlay-containers/c/userdata", "storage"),
    ] {
        let bundle = disk.path().join(folder);
        fs::create_dir_all(&bundle).unwrap();
        let sources = [disk.path().join(state), disk.path().join("other")];
        fs::create_dir_all(&sources[1]).unwrap();
        pod.write_spec(
            &sources
                .each_ref()
                .map(|source| mount_of(source, "/m", "rprivate")),
        );
        fs::copy(pod.bundle().join("config.json"), bundle.join("config.json")).unwrap();
        let binds = admit(&bundle, &pod.policy(), &pod.places(), Attempt::First)
            .report
            .binds;
        let made_rslave: Vec<_> = binds
            .iter()
            .filter(|bind| bind.outcome == Some(Outcome::MadeRslave))
            .map(BindReport::source)
            .collect();
        assert_eq!(made_rslave, [sources[0].as_path()], "{folder}");
    }
}
