//! Podman and Docker keep the name of a container's runtime in their own databases, and resolve it
//! at each start, exec, stop and kill. bindguard was the default while containers were made, and is
//! removed: every verb of the engine goes on working on them.
//!
//! The default goes back first. The name stays, and names the real runtime, until no container of
//! the engine has it. Rootless users of Podman have databases of their own, so Podman's name stays
//! until `uninstall --forget-name`.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::engines::{ContainerEngine, Docker, Podman, missing, program};
use bindguard_integration::privilege;

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const GUARD: &str = "/usr/local/bin/bindguard-runtime";
const DROP_IN: &str = "/etc/containers/containers.conf.d/zz-bindguard.conf";
const DAEMON_JSON: &str = "/etc/docker/daemon.json";
const NAMES: [&str; 4] = ["running", "always", "created", "stopped"];

mod podman {
    use super::*;

    /// A control: what the other stories demand is what Podman does where the name is the real
    /// runtime's.
    #[test]
    fn a_control() {
        story(|node| {
            let podman = Podman::on(node)?;
            let crun = node.programs().join("crun");
            fs::create_dir_all("/etc/containers/containers.conf.d")?;
            let text = format!(
                "[engine]\nruntime = \"bindguard\"\n[engine.runtimes]\nbindguard = [{crun:?}]\n"
            );
            fs::write(DROP_IN, text)?;
            make_containers(&podman, &created_by_podman(node))?;
            let mut failed = verbs_on_running(&podman)?;
            failed.extend(comes_back(&podman, "always").err());
            failed.extend(verbs_on_ended(&podman)?);
            for name in NAMES {
                podman.remove(name)?;
            }
            ensure!(failed.is_empty(), "{failed:#?}");
            Ok(())
        });
    }

    /// A container's state lies with the runtime that made the container: the name has to point at
    /// that very runtime.
    #[test]
    fn with_runc() {
        containers_go_on("runc");
    }

    #[test]
    fn with_crun() {
        containers_go_on("crun");
    }

    fn containers_go_on(runtime: &'static str) {
        story(|node| {
            let podman = Podman::on(node)?;
            set_runtime(node, runtime)?;
            let main = "/etc/containers/containers.conf";
            let default = format!("[engine]\nruntime = {runtime:?}\n");
            fs::write(
                main,
                fs::read_to_string(main)?.replacen("[engine]\n", &default, 1),
            )?;
            node.bindguard(["install", "podman", "--default"])?
                .success()?;
            make_containers(&podman, &created_by_podman(node))?;

            let first = node.bindguard(["uninstall"])?;
            let mut failed = verbs_on_running(&podman)?;
            failed.extend(comes_back(&podman, "always").err());
            ensure!(failed.is_empty(), "{failed:#?} after {first:?}");
            podmans_name_is_of_the_real_runtime(&podman)?;

            removal_ends(node, &NAMES)?;
            let failed = verbs_on_ended(&podman)?;
            ensure!(failed.is_empty(), "without the programs: {failed:#?}");
            for name in NAMES {
                podman.remove(name)?;
            }
            node.bindguard(["uninstall"])?.success()?;
            ensure!(
                Path::new(DROP_IN).exists(),
                "rootless users may have containers of this runtime"
            );
            node.bindguard(["uninstall", "--forget-name"])?.success()?;
            ensure!(!Path::new(DROP_IN).exists(), "the name stays");
            ensure!(!fs::exists("/var/lib/bindguard")?, "a record is left");
            Ok(())
        });
    }

    /// No container of root has the name. A rootless user's container may have it, and only that
    /// user can list it.
    #[test]
    fn the_name_stays_for_rootless_users() {
        story(|node| {
            let podman = Podman::on(node)?;
            set_runtime(node, "crun")?;
            node.bindguard(["install", "podman", "--default"])?
                .success()?;
            for call in ["first", "second"] {
                let done = node.bindguard(["uninstall"])?;
                ensure!(done.code() == 0, "the {call} call never ends: {done:?}");
                ensure!(
                    Path::new(DROP_IN).exists(),
                    "the {call} call removed the name: {done:?}"
                );
                ensure!(
                    done.stdout.contains("--forget-name"),
                    "the {call} call does not print how the name goes: {done:?}"
                );
            }
            podmans_name_is_of_the_real_runtime(&podman)
        });
    }

    /// The operator decides, also against containers that have the name.
    #[test]
    fn the_name_is_forgotten_on_request() {
        story(|node| {
            let podman = Podman::on(node)?;
            set_runtime(node, "crun")?;
            node.bindguard(["install", "podman", "--default"])?
                .success()?;
            create(&podman, &created_by_podman(node), "created")?;
            let done = node.bindguard(["uninstall", "--forget-name"])?;
            ensure!(done.code() == 0, "{done:?}");
            ensure!(!Path::new(DROP_IN).exists(), "the name stays: {done:?}");
            ensure!(
                done.stdout.contains("created"),
                "the container that loses its runtime is not named: {done:?}"
            );
            Ok(())
        });
    }

    /// An install takes a removal back that has kept the name.
    #[test]
    fn installed_again_after_the_removal() {
        story(|node| {
            let podman = Podman::on(node)?;
            set_runtime(node, "crun")?;
            node.bindguard(["install", "podman", "--default"])?
                .success()?;
            let fresh = fs::read_to_string(DROP_IN)?;
            node.bindguard(["uninstall"])?.success()?;
            podmans_name_is_of_the_real_runtime(&podman)?;
            node.bindguard(["install", "podman", "--default"])?
                .success()?;
            ensure!(fs::read_to_string(DROP_IN)? == fresh, "another drop-in");
            node.bindguard(["uninstall", "--forget-name"])?.success()?;
            ensure!(!Path::new(DROP_IN).exists(), "the name stays");
            Ok(())
        });
    }

    fn created_by_podman(node: &Node) -> Created {
        let group = format!("/{}", node.name());
        let flags = [
            "--network",
            "host",
            "--cgroup-parent",
            &group,
            "--ulimit",
            "nofile=1024:1024",
            "--ulimit",
            "nproc=1000:1000",
        ];
        let rootfs = node.disk().join("podman-rootfs").display().to_string();
        Created {
            flags: flags.map(str::to_owned).to_vec(),
            image: vec!["--rootfs".to_owned(), rootfs],
        }
    }
}

mod docker {
    use super::*;

    /// A control: what the other stories demand is what Docker does where the name is the real
    /// runtime's.
    #[test]
    fn a_control() {
        story(|node| {
            fs::create_dir_all("/etc/docker")?;
            let runc = node.programs().join("runc");
            let text = format!(
                "{{\"default-runtime\": \"bindguard\", \"runtimes\": {{\"bindguard\": {{\"path\": {runc:?}}}}}}}\n"
            );
            fs::write(DAEMON_JSON, text)?;
            let docker = Docker::start(node)?;
            make_containers(&docker, &created_by_docker())?;
            docker.restart()?;
            until("the container with a policy runs again", || {
                is_running(&docker, "always")
            })?;
            let mut failed = Vec::new();
            failed.extend(failure(&docker, &["start", "running"])?);
            failed.extend(verbs_on_running(&docker)?);
            failed.extend(comes_back(&docker, "always").err());
            failed.extend(verbs_on_ended(&docker)?);
            for name in NAMES {
                docker.remove(name)?;
            }
            ensure!(failed.is_empty(), "{failed:#?}");
            Ok(())
        });
    }

    /// dockerd ends its containers when it ends, and starts those with a restart policy again.
    #[test]
    fn containers_go_on() {
        go_on("{}\n");
    }

    /// Containers outlive dockerd under their shims.
    #[test]
    fn containers_go_on_with_live_restore() {
        go_on("{\n  \"live-restore\": true\n}\n");
    }

    fn go_on(daemon_json: &'static str) {
        story(|node| {
            let docker = installed_as_default(node, daemon_json)?;
            make_containers(&docker, &created_by_docker())?;

            let first = node.bindguard(["uninstall"])?;
            ensure!(
                first.stdout.contains("systemctl restart docker"),
                "{first:?}"
            );
            docker.restart()?;
            let is_live = daemon_json.contains("live-restore");
            let mut failed = Vec::new();
            let names = if is_live { &NAMES[..2] } else { &NAMES[1..2] };
            for name in names {
                let runs = until(&format!("{name} runs after the restart of dockerd"), || {
                    is_running(&docker, name)
                });
                failed.extend(runs.err().map(|error| format!("{error:#}")));
            }
            if !is_live {
                failed.extend(failure(&docker, &["start", "running"])?);
            }
            failed.extend(verbs_on_running(&docker)?);
            failed.extend(comes_back(&docker, "always").err());
            ensure!(failed.is_empty(), "{failed:#?} after {first:?}");
            dockers_name_is_of_the_real_runtime(&docker)?;

            removal_ends(node, &NAMES)?;
            let failed = verbs_on_ended(&docker)?;
            ensure!(failed.is_empty(), "without the programs: {failed:#?}");
            for name in NAMES {
                docker.remove(name)?;
            }
            node.bindguard(["uninstall", "--restart"])?.success()?;
            ensure!(
                fs::read_to_string(DAEMON_JSON)? == daemon_json,
                "not the bytes that were there: {}",
                fs::read_to_string(DAEMON_JSON)?
            );
            docker.restart()
        });
    }

    /// No container had the name when `uninstall` looked. The running dockerd still has bindguard as
    /// its default until its restart.
    #[test]
    fn a_container_is_created_between_the_removal_and_the_restart() {
        story(|node| {
            let docker = installed_as_default(node, "{}\n")?;
            let first = node.bindguard(["uninstall"])?;
            create(&docker, &created_by_docker(), "late")?;
            docker.restart()?;
            let started = docker.verb(&["start", "late"])?;
            ensure!(started.status.success(), "{started:?} after {first:?}");
            let mut second = None;
            until(
                "the container ends the removal of the programs only",
                || {
                    let done = node.bindguard(["uninstall"])?;
                    let is_named = done.stdout.contains("late");
                    second = Some(done);
                    Ok(is_named)
                },
            )
            .with_context(|| format!("{second:?}"))?;
            let failed = failure(&docker, &["restart", "--time", "0", "late"])?;
            ensure!(failed.is_none(), "{failed:?} after {second:?}");
            docker.remove("late")
        });
    }

    /// Without dockerd its data root is not known: here only dockerd's command line names the data
    /// root. What is not known keeps the name.
    #[test]
    fn a_stopped_dockerd_keeps_the_name() {
        story(|node| {
            let docker = installed_as_default(node, "{}\n")?;
            create(&docker, &created_by_docker(), "created")?;
            drop(docker);
            for call in ["first", "second"] {
                let done = node.bindguard(["uninstall"])?;
                ensure!(
                    fs::read_to_string(DAEMON_JSON)?.contains("\"bindguard\""),
                    "the {call} call removed the name: {done:?}"
                );
            }
            let docker = Docker::start(node)?;
            dockers_name_is_of_the_real_runtime(&docker)?;
            let failed = failure(&docker, &["start", "created"])?;
            ensure!(failed.is_none(), "{failed:?}");
            docker.remove("created")
        });
    }

    /// A container whose record is damaged may have the name. One entry that is not understood must
    /// not count as none.
    #[test]
    fn a_damaged_database_keeps_the_name() {
        story(|node| {
            let docker = installed_as_default(node, "{}\n")?;
            create(&docker, &created_by_docker(), "created")?;
            let id = docker
                .verb(&["inspect", "--format", "{{.Id}}", "created"])?
                .success()?;
            let folder = node.disk().join("docker/containers").join(id.trim());
            let file = folder.join("hostconfig.json");
            let whole = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
            ensure!(
                String::from_utf8_lossy(&whole).contains("\"Runtime\":\"bindguard\""),
                "the container does not have the name"
            );
            fs::write(&file, "{")?;
            let done = node.bindguard(["uninstall", "--restart"])?;
            ensure!(
                fs::read_to_string(DAEMON_JSON)?.contains("\"bindguard\""),
                "the name is gone: {done:?}"
            );
            fs::write(&file, whole)?;
            docker.restart()?;
            let failed = failure(&docker, &["start", "created"])?;
            ensure!(failed.is_none(), "{failed:?} after {done:?}");
            docker.remove("created")
        });
    }

    /// After the removal the running dockerd knows the name, as that of the real runtime: an install
    /// is active only when dockerd has read its file again.
    #[test]
    fn installed_again_after_the_removal() {
        story(|node| {
            let docker = installed_as_default(node, "{}\n")?;
            let fresh = fs::read_to_string(DAEMON_JSON)?;
            create(&docker, &created_by_docker(), "created")?;
            node.bindguard(["uninstall"])?;
            docker.restart()?;
            dockers_name_is_of_the_real_runtime(&docker)?;
            node.bindguard(["install", "docker", "--default"])?
                .success()?;
            let parsed = |text: &str| serde_json::from_str::<Value>(text);
            let now = fs::read_to_string(DAEMON_JSON)?;
            ensure!(parsed(&now)? == parsed(&fresh)?, "another file: {now}");
            let owed = || -> Result<Value> {
                let status = node.bindguard(["status", "--json"])?;
                let status: Value = serde_json::from_str(&status.stdout)?;
                Ok(status["restart_owed"].clone())
            };
            ensure!(
                owed()? == json!(["systemctl reload docker"]),
                "no reload is owed: {}",
                owed()?
            );
            docker.reload()?;
            ensure!(owed()? == json!([]), "a reload is owed: {}", owed()?);
            node.bindguard(["uninstall", "--forget-name", "--restart"])?;
            ensure!(
                fs::read_to_string(DAEMON_JSON)? == "{}\n",
                "not the bytes that were there: {}",
                fs::read_to_string(DAEMON_JSON)?
            );
            docker.remove("created")
        });
    }

    /// No container has the name. dockerd is restarted once, and everything goes in one call.
    #[test]
    fn nothing_is_left_without_containers() {
        story(|node| {
            let docker = installed_as_default(node, "{}\n")?;
            // the story plays systemd only after the call
            let first = node.bindguard(["uninstall", "--restart"])?;
            docker.restart()?;
            let second = node.bindguard(["uninstall"])?;
            ensure!(second.code() == 0, "{second:?} after {first:?}");
            ensure!(fs::read_to_string(DAEMON_JSON)? == "{}\n", "{second:?}");
            ensure!(
                !second.stdout.contains("systemctl"),
                "a second restart: {second:?}"
            );
            ensure!(!fs::exists("/var/lib/bindguard")?, "a record is left");
            Ok(())
        });
    }

    /// The record is lost, and the entries are removed by their content.
    #[test]
    fn a_lost_record_keeps_the_name() {
        story(|node| {
            let docker = installed_as_default(node, "{}\n")?;
            create(&docker, &created_by_docker(), "created")?;
            fs::remove_dir_all("/var/lib/bindguard")?;
            let first = node.bindguard(["uninstall", "--by-content"])?;
            docker.restart()?;
            dockers_name_is_of_the_real_runtime(&docker)?;
            let failed = failure(&docker, &["start", "created"])?;
            ensure!(failed.is_none(), "{failed:?} after {first:?}");
            docker.remove("created")?;
            node.bindguard(["uninstall", "--by-content"])?;
            ensure!(
                !fs::read_to_string(DAEMON_JSON)?.contains("bindguard"),
                "the name stays: {}",
                fs::read_to_string(DAEMON_JSON)?
            );
            Ok(())
        });
    }

    fn installed_as_default<'n>(node: &'n Node, daemon_json: &str) -> Result<Docker<'n>> {
        set_runtime(node, "runc")?;
        fs::create_dir_all("/etc/docker")?;
        fs::write(DAEMON_JSON, daemon_json)?;
        let docker = Docker::start(node)?;
        node.bindguard(["install", "docker", "--default"])?
            .success()?;
        docker.reload()?;
        Ok(docker)
    }

    fn created_by_docker() -> Created {
        Created {
            flags: ["--network", "host"].map(str::to_owned).to_vec(),
            image: vec!["busybox".to_owned()],
        }
    }

    fn dockers_name_is_of_the_real_runtime(docker: &Docker<'_>) -> Result<()> {
        let text = fs::read_to_string(DAEMON_JSON)?;
        let file: Value = serde_json::from_str(&text).context("parse daemon.json")?;
        ensure!(
            file.get("default-runtime").is_none(),
            "the default stays: {text}"
        );
        let path = file["runtimes"]["bindguard"]["path"].as_str();
        ensure!(
            path.is_some_and(|path| !path.contains("bindguard")),
            "the name is not of the real runtime: {text}"
        );
        docker
            .run(&["--runtime", "bindguard"], &["true"])?
            .success()
            .map(drop)
    }
}

/// The flags of a container, and its image.
struct Created {
    flags: Vec<String>,
    image: Vec<String>,
}

fn create(engine: &impl ContainerEngine, created: &Created, name: &str) -> Result<()> {
    let mut words = vec!["create", "--name", name];
    words.extend(created.flags.iter().map(String::as_str));
    words.extend(created.image.iter().map(String::as_str));
    words.extend(SLEEP);
    engine.verb(&words)?.success().map(drop)
}

/// A container in each state that an engine has, all of them made while bindguard is the default.
fn make_containers(engine: &impl ContainerEngine, created: &Created) -> Result<()> {
    engine.start(&["--name", "running"], &SLEEP)?;
    engine.start(&["--name", "always", "--restart", "always"], &SLEEP)?;
    create(engine, created, "created")?;
    engine.start(&["--name", "stopped"], &SLEEP)?;
    let stop = engine.verb(&["stop", "--time", "0", "stopped"])?;
    stop.success().map(drop)
}

/// Verbs on containers that ran through bindguard-runtime at the removal. Returns those that fail.
fn verbs_on_running(engine: &impl ContainerEngine) -> Result<Vec<String>> {
    let mut failed = Vec::new();
    for words in [
        &["exec", "running", "true"][..],
        &["exec", "always", "true"],
        &["pause", "running"],
        &["unpause", "running"],
        &["restart", "--time", "0", "running"],
        &["exec", "running", "true"],
        &["kill", "running"],
        &["wait", "running"],
        &["start", "running"],
        &["stop", "--time", "0", "running"],
        &["start", "running"],
    ] {
        failed.extend(failure(engine, words)?);
    }
    Ok(failed)
}

/// Verbs on containers that did not run at the removal.
fn verbs_on_ended(engine: &impl ContainerEngine) -> Result<Vec<String>> {
    let mut failed = Vec::new();
    for words in [
        &["start", "created"][..],
        &["exec", "created", "true"],
        &["restart", "--time", "0", "created"],
        &["start", "stopped"],
        &["exec", "stopped", "true"],
        &["kill", "stopped"],
        &["exec", "running", "true"],
        &["exec", "always", "true"],
    ] {
        failed.extend(failure(engine, words)?);
    }
    Ok(failed)
}

fn failure(engine: &impl ContainerEngine, words: &[&str]) -> Result<Option<String>> {
    let done = engine.verb(words)?;
    let is_failed = !done.status.success();
    Ok(is_failed.then(|| format!("{}: {}", words.join(" "), done.stderr.trim())))
}

/// The restart policy: the first process of the container dies, and the container runs again.
fn comes_back(engine: &impl ContainerEngine, name: &str) -> Result<(), String> {
    let pid_of = || -> Result<i32> {
        let format = ["inspect", "--format", "{{.State.Pid}}", name];
        Ok(engine.verb(&format)?.success()?.trim().parse()?)
    };
    let back = || -> Result<()> {
        let pid = pid_of()?;
        ensure!(pid > 0, "{name} does not run");
        kill(Pid::from_raw(pid), Signal::SIGKILL).context("kill its first process")?;
        until(&format!("{name} runs again"), || {
            Ok(pid_of()? != pid && is_running(engine, name)?)
        })
    };
    back().map_err(|error| format!("{error:#}"))
}

fn is_running(engine: &impl ContainerEngine, name: &str) -> Result<bool> {
    let words = ["inspect", "--format", "{{.State.Running}}", name];
    Ok(engine.verb(&words)?.success()?.trim() == "true")
}

/// The containers were restarted, so nothing runs through the programs: the removal ends with 0, and
/// a note counts and names the containers for which the name stays.
fn removal_ends(node: &Node, names: &[&str]) -> Result<()> {
    let mut last: Option<Finished> = None;
    until("nothing needs the programs", || {
        let done = node.bindguard(["uninstall"])?;
        let is_done = done.code() == 0;
        last = Some(done);
        Ok(is_done)
    })
    .with_context(|| format!("{last:?}"))?;
    let done = last.context("uninstall did not run")?;
    let count = format!("{} container", names.len());
    ensure!(
        done.stdout.contains(&count) && names.iter().any(|name| done.stdout.contains(name)),
        "the note does not count and name the containers: {done:?}"
    );
    ensure!(!Path::new(GUARD).exists(), "a program is left: {done:?}");
    Ok(())
}

fn podmans_name_is_of_the_real_runtime(podman: &Podman<'_>) -> Result<()> {
    let text = fs::read_to_string(DROP_IN).with_context(|| format!("read {DROP_IN}"))?;
    ensure!(
        !text.contains("bindguard-runtime"),
        "the name is not of the real runtime: {text}"
    );
    let words = ["info", "--format", "{{.Host.OCIRuntime.Name}}"];
    let default = podman.verb(&words)?.success()?;
    ensure!(default.trim() != "bindguard", "the default stays: {text}");
    podman
        .run(&["--runtime", "bindguard"], &[], &["true"])?
        .success()
        .map(drop)
}

fn story(story: impl FnOnce(&Node) -> Result<()>) {
    if let Some(why) = missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V1_7).bare().story(|node| {
        let crun =
            bindguard_integration::programs::Matrix::locate()?.program(Generation::V1_7, "crun");
        symlink(crun, node.programs().join("crun")).context("put crun beside runc")?;
        symlink(program("podman"), node.programs().join("podman")).context("put podman on PATH")?;
        story(node)
    });
}

/// The runtime that bindguard-runtime becomes.
fn set_runtime(node: &Node, runtime: &str) -> Result<()> {
    let text = format!(
        "[runtime]\npath = {:?}\n[kubelet]\nroots = [{:?}]\n",
        node.programs().join(runtime),
        node.kubelet().root()
    );
    fs::create_dir_all("/etc/bindguard")
        .and_then(|()| fs::write("/etc/bindguard/config.toml", text))
        .context("write bindguard's config")
}
