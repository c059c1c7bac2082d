//! A runtime that mounts something else than the spec says is found before the container's program
//! runs: reported, or refused where the policy says so.
//!
//! crun 1.29 can bind its own root filesystem in place of the host's root (containers/crun#2262).
//! The runtime of these stories reads a spec with a changed mount; the last story has unchanged
//! runtimes.

use bindguard_integration::ctr::{Container, Ctr};
use bindguard_integration::journal;
use bindguard_integration::mount_calls::private;
use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, Gate, ObedientRuntime};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// The change of the runtime's spec, and the words of the report.
const DIFFERENCES: [(&str, &str); 5] = [
    ("s,/run/right,/run/left,", "its destination shows"),
    ("s,\"rbind\"\\,\"ro\",\"rbind\",", "is not ro"),
    (
        "s,\"nosuid\"\\,\"nodev\"\\,\"noexec\"\\,\"rbind\",\"rbind\",",
        "is not nosuid,nodev,noexec",
    ),
    (
        "s,\"rbind\"\\,\"ro\"\\,\"rprivate\",\"rbind\"\\,\"ro\"\\,\"rshared\",",
        "propagates mounts",
    ),
    (
        "s,\\,{\"destination\":\"/data\"[^}]*},,",
        "nothing is mounted at its destination, or another mount hides its mount",
    ),
];

/// ctr writes the options in this order, which the expressions above need.
const OPTIONS: [&str; 6] = ["nosuid", "nodev", "noexec", "rbind", "ro", "rprivate"];

/// A mount namespace of snapd.
const PINNED: &str = "/run/snapd/ns/app.mnt";

fn reported(generation: Generation) {
    Setup::on(generation).faulty_runtime().story(|node| {
        two_folders()?;
        for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
            for (number, (edit, words)) in DIFFERENCES.iter().enumerate() {
                let id = format!("{runtime:?}-{number}").to_lowercase();
                is_reported(node, runtime, &id, edit, words)
                    .with_context(|| format!("{edit} under {runtime:?}"))?;
            }
        }
        Ok(())
    });
}

on_newest_and_older!(reported);

#[test]
fn refused() {
    Setup::on(Generation::NEWEST)
        .faulty_runtime()
        .policy("[guard]\ndeadline-ms = 20000\n[checks]\nproof = \"refuse\"\n")
        .story(|node| {
            two_folders()?;
            for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
                let next = ObedientRuntime::of(&node.programs());
                next.next("create", Fault::ReadsAnotherSpec(DIFFERENCES[0].0))?;
                let ctr = node.ctr();
                let id = format!("refused-{runtime:?}").to_lowercase();
                let run = container(&ctr, runtime, &id)
                    .runs(&["touch", "/out/it-ran"])
                    .mount(Bind::new("/run/out", "/out").options(&["rbind", "rw"]));
                let words = run.start()?.failure()?;
                ensure!(
                    words.contains("did not mount /run/right as the spec says"),
                    "{words}"
                );
                ensure!(!Path::new("/run/out/it-ran").exists(), "its program ran");
                let line = only_line_with_a_pid(&id)?;
                ensure!(line["refused"].is_string(), "{line}");
            }
            Ok(())
        });
}

/// A comparison in full that hangs or dies is recorded, and refused where the policy says so.
#[test]
fn a_comparison_that_comes_to_no_end() {
    Setup::on(Generation::NEWEST)
        .faulty_runtime()
        .story(|node| {
            two_folders()?;
            for (name, end, reason) in [
                ("late", "exec sleep 1000", "no answer within"),
                ("killed", "kill -9 $$", "exit status 137"),
            ] {
                comparison_ends_with(node, end)?;
                for policy in ["report", "refuse"] {
                    let text =
                        format!("[guard]\ndeadline-ms = 3000\n[checks]\nproof = '{policy}'\n");
                    fs::write(node.disk().join("bindguard.toml"), text)
                        .context("write the policy")?;
                    let id = format!("{name}-{policy}");
                    let next = ObedientRuntime::of(&node.programs());
                    next.next("create", Fault::ReadsAnotherSpec(DIFFERENCES[0].0))?;
                    let ctr = node.ctr();
                    let started = container(&ctr, Runtime::Bindguard, &id).start()?;
                    match policy {
                        "report" => ctr.remove(&id).and(started.success()).map(drop)?,
                        _ => ensure!(started.failure()?.contains("could not be compared")),
                    }
                    until("the journal has the line", || {
                        Ok(!lines_with_a_pid(&id)?.is_empty())
                    })?;
                    let line = only_line_with_a_pid(&id)?;
                    let problem = line["problems"][0].as_str().unwrap_or_default();
                    ensure!(problem.contains(reason) && line["unproven"] == 1, "{line}");
                    ensure!(
                        line["refused"].is_string() == (policy == "refuse"),
                        "{line}"
                    );
                }
            }
            Ok(())
        });
}

/// Puts a script in the place of the guard: `end` instead of a comparison, which has a pid as its
/// last argument.
fn comparison_ends_with(node: &Node, end: &str) -> Result<()> {
    let guard = node.programs().join(GUARD);
    let real = node.programs().join("real-guard");
    if !real.exists() {
        fs::rename(&guard, &real).context("move the guard")?;
    }
    let real = fs::canonicalize(&real).context("resolve the guard")?;
    let script = format!(
        r#"#!/bin/sh
for last do :; done
case "$*" in *bindguard-prove*)
    case $last in *[!0-9]*) ;; *) {end} ;; esac
esac
exec {} "$@"
"#,
        real.display()
    );
    write_program(&guard, &script)
}

/// The stock shim calls no guard. The agent compares right before the start, as an NRI plugin, with
/// the sources that it saw at the create.
fn reported_by_the_plugin(generation: Generation) {
    Setup::on(generation).nri().faulty_runtime().story(|node| {
        two_folders()?;
        let agent = Agent::start(node, "agent.nri.enabled = true\n")?;
        let (cri, sandbox) = pod_beside_the_plugin(node, &agent)?;
        let right = start_under_the_stock_shim(&cri, &sandbox, "right")?;
        let next = ObedientRuntime::of(&node.programs());
        next.next("create", Fault::ReadsAnotherSpec(DIFFERENCES[0].0))?;
        let wrong = start_under_the_stock_shim(&cri, &sandbox, "wrong")?;
        until("the difference is journaled", || {
            Ok(!lines_with_a_pid(&wrong)?.is_empty())
        })?;
        let line = only_line_with_a_pid(&wrong)?;
        let bind = &line["binds"][0];
        ensure!(
            line["kind"] == "nri-create" && bind["verdict"] == "wrong",
            "{line}"
        );
        ensure!(bind["destination"] == "/data", "{line}");
        ensure!(lines_with_a_pid(&right)?.is_empty(), "a false alarm");
        let wrong = "bindguard_nri_binds_total{verdict=\"wrong\",outcome=\"none\"}";
        ensure!(agent.figure(wrong) == 1.0, "it is not counted");
        cri.remove_pod(&sandbox)
    });
}

#[test]
fn reported_by_the_plugin_of_containerd_1_7() {
    reported_by_the_plugin(Generation::V1_7);
}

#[test]
fn reported_by_the_plugin_of_the_newest_containerd() {
    reported_by_the_plugin(Generation::NEWEST);
}

#[test]
fn refused_by_the_plugin() {
    Setup::on(Generation::NEWEST)
        .nri()
        .faulty_runtime()
        .story(|node| {
            two_folders()?;
            let config = "agent.nri.enabled = true\nchecks.proof = 'refuse'\n";
            let agent = Agent::start(node, config)?;
            let (cri, sandbox) = pod_beside_the_plugin(node, &agent)?;
            let next = ObedientRuntime::of(&node.programs());
            next.next("create", Fault::ReadsAnotherSpec(DIFFERENCES[0].0))?;
            let started = start_under_the_stock_shim(&cri, &sandbox, "wrong");
            let error = started.err().context("its program ran")?;
            let words = format!("{error:#}");
            ensure!(
                words.contains("did not mount /run/right as the spec says"),
                "{words}"
            );
            start_under_the_stock_shim(&cri, &sandbox, "right")?;
            cri.remove_pod(&sandbox)
        });
}

/// An agent that is started between the create and the start knows none of the sources.
#[test]
fn not_proven_by_a_plugin_that_did_not_see_the_create() {
    Setup::on(Generation::NEWEST).nri().story(|node| {
        two_folders()?;
        let mounts = [mount("/run/right".as_ref(), "/data", PropagationPrivate)];
        for (policy, is_started) in [("report", true), ("refuse", false)] {
            let config = format!("agent.nri.enabled = true\nchecks.proof = '{policy}'\n");
            let agent = Agent::start(node, &config)?;
            let (cri, sandbox) = pod_beside_the_plugin(node, &agent)?;
            let created = cri.create_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
            agent.kill()?;
            let agent = Agent::start(node, &config)?;
            until("the plugin is registered", || {
                Ok(agent.figure("bindguard_nri_connected") == 1.0)
            })?;
            let started = cri.start_created(&created, "app");
            ensure!(started.is_ok() == is_started, "{policy}: {started:?}");
            if let Err(error) = started {
                let words = format!("{error:#}");
                ensure!(
                    words.contains("its create was not checked by this agent"),
                    "{words}"
                );
            }
            let unproven = agent.figure("bindguard_unproven_binds_total");
            ensure!(unproven > 0.0, "{policy}: {}", agent.get("/metrics"));
            cri.remove_pod(&sandbox)?;
        }
        Ok(())
    });
}

fn pod_beside_the_plugin(node: &Node, agent: &Agent) -> Result<(Cri, Sandbox)> {
    until("the plugin is registered", || {
        Ok(agent.figure("bindguard_nri_connected") == 1.0)
    })?;
    let cri = node.cri()?;
    let sandbox = cri.run_pod("runc", "web", "uid-web")?;
    Ok((cri, sandbox))
}

fn start_under_the_stock_shim(cri: &Cri, sandbox: &Sandbox, name: &str) -> Result<String> {
    let mounts = [mount("/run/right".as_ref(), "/data", PropagationPrivate)];
    cri.start_container(sandbox, name, &["sleep", "1000000"], &mounts)
}

/// The source of the spec leads to a new folder when the runtime mounts the source, as after an
/// update: stale, perhaps, but not wrong.
#[test]
fn a_source_that_changes_meanwhile_is_no_difference() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .policy("[guard]\ndeadline-ms = 20000\n")
        .story(|node| {
            two_folders()?;
            let gate = Gate::of(&node.programs());
            gate.close()?;
            thread::scope(|scope| {
                let ctr = node.ctr();
                let create = scope.spawn(move || {
                    let bind = Bind::new("/run/right", "/data").options(&OPTIONS);
                    ctr.container("changed").mount(bind).start()?.success()
                });
                gate.wait_for_call()?;
                fs::rename("/run/right", "/run/old").context("rename the folder")?;
                fs::rename("/run/left", "/run/right").context("rename the other folder")?;
                gate.open()?;
                create.join().expect("the create panicked").map(drop)
            })?;
            ensure!(lines_with_a_pid("changed")?.is_empty());
            node.ctr().remove("changed")
        });
}

/// Binds of every kind that a runtime mounts rightly cause no line: stacked, nested, of mount
/// points, of files, of links, with many mounts in the container.
#[test]
fn what_is_right_causes_no_line() {
    Setup::on(Generation::NEWEST).story(|node| {
        two_folders()?;
        fs::write("/run/right/file", "text").context("write a file")?;
        std::os::unix::fs::symlink("/run/right", "/run/link").context("make a link")?;
        for number in 0..320 {
            let folder = format!("/run/left/{number}");
            fs::create_dir(&folder).with_context(|| format!("create {folder}"))?;
            tmpfs(Path::new(&folder), "")?;
        }
        fs::create_dir("/run/right/nested").context("make the mount point")?;
        let ctr = node.ctr();
        for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
            container(&ctr, runtime, "right")
                .mount(Bind::new("/run/right", "/data/nested").options(&["rbind", "rw"]))
                .mount(Bind::new("/run/link", "/linked").options(&["rbind", "rslave"]))
                .mount(Bind::new("/run/right/file", "/file").options(&["bind", "ro"]))
                .mount(Bind::new("/run/left", "/many").options(&["rbind", "rshared"]))
                .mount(Bind::new("/run/left", "/linked").options(&["rbind", "rprivate", "ro"]))
                .start()?
                .success()?;
            ensure!(lines_with_a_pid("right")?.is_empty());
            node.ctr().remove("right")?;
        }
        for number in 0..320 {
            unmount(Path::new(&format!("/run/left/{number}")))?;
        }
        Ok(())
    });
}

/// snapd pins mount namespaces below `/run/snapd/ns`. Beside such a mount, crun 1.29 on Linux 7.0
/// or newer binds its own root filesystem in place of the host's (containers/crun#2262). Each
/// runtime either shows the host's root, or the proof reports the bind.
#[test]
fn a_host_root_with_a_pinned_mount_namespace() {
    for oci in [Oci::Runc(Generation::NEWEST), Oci::Crun(Generation::NEWEST)] {
        Setup::on(Generation::NEWEST)
            .oci(oci)
            .faulty_runtime()
            .policy("[guard]\ndeadline-ms = 20000\n")
            .story(|node| {
                pin_a_mount_namespace()?;
                for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
                    the_host_root_or_a_report(node, oci, runtime)
                        .with_context(|| format!("{oci} under {runtime:?}"))?;
                }
                unmount(PINNED)?;
                unmount("/run/snapd/ns")
            });
    }
}

/// As snapd does: a namespace can be pinned on a private mount only.
///
/// The kernel pins no namespace with a lower number than the caller's, so that no loop is possible.
/// Linux 6.18 takes the numbers per processor: a retry can succeed.
fn pin_a_mount_namespace() -> Result<()> {
    let folder = "/run/snapd/ns";
    fs::create_dir_all(folder).with_context(|| format!("create {folder}"))?;
    tmpfs(folder, "mode=755")?;
    private(folder)?;
    fs::write(PINNED, "").context("make the mount point of a namespace")?;
    until("a mount namespace is pinned", || {
        let mut unshare = Command::new("unshare");
        let output = unshare
            .arg(format!("--mount={PINNED}"))
            .arg("true")
            .output()
            .context("run unshare")?;
        Ok(output.status.success())
    })
}

fn the_host_root_or_a_report(node: &Node, oci: Oci, runtime: Runtime) -> Result<()> {
    let id = format!("monitor-{runtime:?}").to_lowercase();
    let ctr = node.ctr();
    ctr.container(&id)
        .runtime(runtime)
        .mount(Bind::new("/", "/host").options(&["rbind", "rslave"]))
        .start()?
        .success()?;
    let pid = ctr.pid(&id)?;
    let shows_the_host = Path::new(&format!("/proc/{pid}/root/host/run/snapd/ns")).exists();
    let reported = lines_with_a_pid(&id)?.iter().any(|line| {
        let binds = line["binds"].as_array().into_iter().flatten();
        binds
            .filter(|bind| bind["destination"] == "/host")
            .any(|bind| bind["verdict"] == "wrong")
    });
    println!("{oci} under {runtime:?}: shows the host's root: {shows_the_host}");
    ensure!(
        reported != shows_the_host,
        "shows the host's root: {shows_the_host}; reported: {reported}"
    );
    ctr.remove(&id)
}

fn container<'c>(ctr: &'c Ctr, runtime: Runtime, id: &str) -> Container<'c> {
    let bind = Bind::new("/run/right", "/data").options(&OPTIONS);
    ctr.container(id).runtime(runtime).mount(bind)
}

fn two_folders() -> Result<()> {
    for folder in ["/run/right", "/run/left", "/run/out"] {
        fs::create_dir_all(folder).with_context(|| format!("create {folder}"))?;
    }
    Ok(())
}

fn is_reported(
    node: &Node,
    runtime: Runtime,
    id: &str,
    edit: &'static str,
    words: &str,
) -> Result<()> {
    let next = ObedientRuntime::of(&node.programs());
    next.next("create", Fault::ReadsAnotherSpec(edit))?;
    let ctr = node.ctr();
    container(&ctr, runtime, id).start()?.success()?;
    let line = only_line_with_a_pid(id)?;
    let bind = &line["binds"][0];
    ensure!(
        bind["verdict"] == "wrong" && bind["destination"] == "/data",
        "{line}"
    );
    let reason = bind["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains(words), "{reason}");
    ctr.remove(id)
}

fn only_line_with_a_pid(id: &str) -> Result<Value> {
    let mut lines = lines_with_a_pid(id)?;
    ensure!(lines.len() == 1, "{id} has the lines {lines:?}");
    Ok(lines.remove(0))
}

/// The lines about the container after its create.
fn lines_with_a_pid(id: &str) -> Result<Vec<Value>> {
    let lines = journal::lines(JOURNAL)?.into_iter();
    Ok(lines
        .filter(|line| line["id"] == id && line["pid"].is_u64())
        .collect())
}
