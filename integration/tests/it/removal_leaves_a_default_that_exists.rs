//! The default that `install` recorded, or that another tool has set since, is gone: the GPU toolkit
//! took its runtime's table or its program away. A containerd whose default is none of its runtimes
//! serves no CRI, and the node is NotReady.
//!
//! After every write of every verb the effective default is one of the effective runtimes, and its
//! program exists. runc takes the place of a default that is gone. Without runc nothing is written,
//! and the exit status says so.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::engines::{Docker, Podman, missing};
use bindguard_integration::{on_every_config_version, privilege};
use toml::{Table, Value};

const SLEEP: [&str; 2] = ["sleep", "1000000"];
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// A control: the default of a toolkit that is still there comes back.
mod a_default_that_is_still_there {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            let text = scene.write("nvidia", &[scene.runc(), scene.nvidia()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            scene.default_works("bindguard")?;
            scene.bindguard(&["uninstall", "--restart"])?.success()?;
            scene.default_works("nvidia")?;
            ensure!(scene.text()? == text, "not the bytes that were there");
            Ok(())
        });
    }

    on_every_config_version!(story);
}

/// The toolkit's removal deletes its tables and its program. It leaves the default alone, because
/// the default is `bindguard`.
mod the_toolkit_is_removed {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("nvidia", &[scene.runc(), scene.nvidia()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            scene.remove_toolkit()?;
            let first = scene.bindguard(&["uninstall", "--restart"])?;
            scene.default_works("runc").with_context(|| shown(&first))?;
            says_nvidia_is_gone(&first)?;
            let second = scene.bindguard(&["uninstall", "--restart"])?;
            ensure!(second.code() == 0, "the second call: {second:?}");
            scene.default_works("runc").context("after the second call")
        });
    }

    on_every_config_version!(story);
}

/// No pod starts now: the handler's program is the toolkit's.
mod install_heals_a_toolkit_that_was_removed {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("nvidia", &[scene.runc(), scene.nvidia()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            scene.remove_toolkit()?;
            let probe = scene.bindguard(&["install", "--default", "--dry-run"])?;
            ensure!(
                probe.code() != 0,
                "a node on which no pod starts is ready: {probe:?}"
            );
            let healed = scene.bindguard(&["install", "--default"])?;
            ensure!(healed.code() == 0, "{healed:?}");
            scene
                .default_works("bindguard")
                .with_context(|| shown(&healed))?;
            says_nvidia_is_gone(&healed)?;
            scene.bindguard(&["uninstall", "--restart"])?.success()?;
            scene.default_works("runc")
        });
    }

    on_every_config_version!(story);
}

/// A driver's update, or a package that was removed by hand: the tables stay.
mod only_the_toolkits_program_is_gone {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("nvidia", &[scene.runc(), scene.nvidia()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            fs::remove_file(&scene.program)?;
            let probe = scene.bindguard(&["install", "--default", "--dry-run"])?;
            ensure!(
                probe.code() != 0,
                "a node on which no pod starts is ready: {probe:?}"
            );
            let healed = scene.bindguard(&["install", "--default"])?;
            ensure!(healed.code() == 0, "{healed:?}");
            scene
                .default_works("bindguard")
                .with_context(|| shown(&healed))?;
            says_nvidia_is_gone(&healed)?;
            let removed = scene.bindguard(&["uninstall", "--restart"])?;
            ensure!(removed.code() == 0, "{removed:?}");
            scene
                .default_works("runc")
                .with_context(|| shown(&removed))?;
            ensure!(
                scene.text()?.contains(&scene.nvidia()),
                "the toolkit's own tables are not bindguard's to remove"
            );
            Ok(())
        });
    }

    on_every_config_version!(story);
}

/// The node's own default is gone before bindguard comes: a new pod would not start, with or without
/// bindguard.
mod installed_beside_a_default_that_is_gone {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("nvidia", &[scene.runc()])?;
            let installed = scene.bindguard(&["install"])?;
            ensure!(installed.code() == 0, "{installed:?}");
            says_nvidia_is_gone(&installed)?;
            scene.default_works("runc")?;
            scene.bindguard(&["uninstall", "--restart"])?.success()?;
            scene.default_works("runc")
        });
    }

    on_every_config_version!(story);
}

/// The default after the removal cannot be evaluated, before the removal neither: that is no reason
/// to keep bindguard.
#[test]
fn a_file_that_containerd_cannot_read() {
    on(Generation::NEWEST, |scene| {
        scene.write("runc", &[scene.runc()])?;
        scene.bindguard(&["install", "--default"])?.success()?;
        let broken = scene
            .text()?
            .replace("[plugins", "oom_score = \"x\"\n[plugins");
        fs::write(&scene.file, broken)?;
        let removed = scene.bindguard(&["uninstall", "--restart"])?;
        ensure!(
            removed.code() == 0 && removed.stdout.contains("is not known"),
            "{removed:?}"
        );
        ensure!(!scene.text()?.contains("bindguard"), "{}", scene.text()?);
        Ok(())
    });
}

/// The toolkit came after bindguard and made itself the default; bindguard took the default over.
mod the_toolkit_came_later {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("runc", &[scene.runc()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            scene.set_default("nvidia")?;
            fs::write(&scene.file, scene.text()? + &scene.nvidia())?;
            scene.default_works(scene.default_beside_a_drop_in("nvidia"))?;
            scene.bindguard(&["install", "--default"])?.success()?;
            scene.default_works("bindguard")?;
            scene.remove_toolkit()?;
            let removed = scene.bindguard(&["uninstall", "--restart"])?;
            ensure!(removed.code() == 0, "{removed:?}");
            scene.default_works("runc").with_context(|| shown(&removed))
        });
    }

    on_every_config_version!(story);
}

/// The default is the toolkit's own, and its table is gone: bindguard did not write the default, and
/// a removal that ends with 0 would leave a node that never becomes ready.
mod a_default_that_another_tool_left_behind {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("runc", &[scene.runc()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            scene.set_default("nvidia")?;
            for call in ["first", "second"] {
                let removed = scene.bindguard(&["uninstall", "--restart"])?;
                says_the_truth(scene, &removed).with_context(|| format!("the {call} call"))?;
            }
            Ok(())
        });
    }

    on_every_config_version!(story);
}

/// `nvidia-ctk runtime configure` copies the table of the default runtime: with it, the path of
/// bindguard's shim. The programs are needed as long as the files name them.
mod the_toolkit_copied_the_handler {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("runc", &[scene.runc()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            let shim = "/usr/local/bin/containerd-shim-bindguard-v2";
            let section = scene.section;
            let copy = scene.nvidia().replace(
                &format!("[{section}.runtimes.nvidia.options]"),
                &format!("  runtime_path = \"{shim}\"\n[{section}.runtimes.nvidia.options]"),
            );
            scene.set_default("nvidia")?;
            fs::write(&scene.file, scene.text()? + &copy)?;
            scene.default_works(scene.default_beside_a_drop_in("nvidia"))?;
            for call in ["first", "second"] {
                let removed = scene.bindguard(&["uninstall", "--restart"])?;
                let works = scene.effective_default();
                ensure!(
                    works.is_ok(),
                    "the {call} call: {:#}: {removed:?}",
                    works.unwrap_err()
                );
            }
            Ok(())
        });
    }

    on_every_config_version!(story);
}

/// containerd 1.7 uses a file's runtimes instead of the built-in runtimes: here runc is none
/// of them. Nothing is written, and the exit status is not 0.
#[test]
fn nothing_is_written_without_runc() {
    on(Generation::V1_7, |scene| {
        let kata = format!(
            "[{}.runtimes.kata]\n  runtime_type = \"io.containerd.kata.v2\"\n",
            scene.section
        );
        scene.write("nvidia", &[kata, scene.nvidia()])?;
        scene.bindguard(&["install", "--default"])?.success()?;
        scene.remove_toolkit()?;
        let before = scene.text()?;
        for call in ["first", "second"] {
            let refused = scene.bindguard(&["uninstall", "--restart"])?;
            ensure!(refused.code() != 0, "the {call} call: {refused:?}");
            ensure!(
                scene.text()? == before,
                "the {call} call wrote: {}",
                scene.text()?
            );
            ensure!(
                Path::new("/usr/local/bin/bindguard-runtime").exists(),
                "the {call} call removed the program of the default"
            );
            says_nvidia_is_gone(&refused)?;
        }
        let refused = scene.bindguard(&["install", "--default"])?;
        ensure!(refused.code() == 2, "install: {refused:?}");
        says_nvidia_is_gone(&refused)
    });
}

/// The default without a record is containerd's own, runc: on this node runc is no runtime.
#[test]
fn by_content_without_runc() {
    on(Generation::V1_7, |bare| {
        // without a record only the file of the running containerd is searched
        let scene = Scene {
            file: bare.node.containerd_config().to_owned(),
            program: bare.program.clone(),
            ..*bare
        };
        scene.write("nvidia", &[scene.nvidia()])?;
        scene.bindguard(&["install", "--default"])?.success()?;
        fs::remove_dir_all("/var/lib/bindguard")?;
        let before = scene.text()?;
        let removed = scene.bindguard(&["uninstall", "--by-content", "--restart"])?;
        if scene.text()? == before {
            ensure!(removed.code() != 0, "nothing is done: {removed:?}");
        }
        let works = scene.effective_default();
        works.map(drop).with_context(|| shown(&removed))
    });
}

/// `/var` was lost, and bindguard installed again with other options. What that install found is not
/// the node's own state: a removal that restores these bytes names programs that are gone.
mod a_record_that_was_made_anew {
    use super::*;

    fn story(generation: Generation) {
        on(generation, |scene| {
            scene.write("runc", &[scene.runc()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            fs::remove_dir_all("/var/lib/bindguard")?;
            scene
                .bindguard(&["install", "--default", "--wrapper"])?
                .success()?;
            for call in ["first", "second"] {
                let removed = scene.bindguard(&["uninstall", "--restart"])?;
                says_the_truth(scene, &removed).with_context(|| format!("the {call} call"))?;
                // who added the line `imports` is lost with the record
                let text = scene.text()?.replace("/conf.d/*.toml", "");
                ensure!(
                    !text.contains("runtimes.bindguard") && !text.contains("\"bindguard\""),
                    "bindguard is still there after the {call} call: {text}{}",
                    shown(&removed)
                );
                let drop_in = scene.node.disk().join("conf.d/zz-bindguard.toml");
                ensure!(
                    !drop_in.exists(),
                    "the drop-in is left after the {call} call"
                );
            }
            Ok(())
        });
    }

    on_every_config_version!(story);
}

/// The default is in the main file, and the toolkit's table in a drop-in, which the toolkit's
/// removal deletes. bindguard's own drop-in has nothing to restore.
#[test]
fn the_table_was_in_a_drop_in() {
    on(Generation::NEWEST, |scene| {
        let folder = scene.node.disk().join("conf.d");
        fs::create_dir(&folder)?;
        let drop_in = folder.join("10-nvidia.toml");
        fs::write(&drop_in, format!("version = 3\n{}", scene.nvidia()))?;
        let main = scene.write("nvidia", &[scene.runc()])?;
        fs::write(
            &scene.file,
            format!("imports = [\"conf.d/*.toml\"]\n{main}"),
        )?;
        scene.default_works("nvidia")?;
        scene.bindguard(&["install", "--default"])?.success()?;
        scene.default_works("bindguard")?;
        fs::remove_file(&drop_in)?;
        fs::remove_file(&scene.program)?;
        for call in ["first", "second"] {
            let removed = scene.bindguard(&["uninstall", "--restart"])?;
            says_the_truth(scene, &removed).with_context(|| format!("the {call} call"))?;
        }
        scene.default_works("runc")
    });
}

/// The default itself was in the toolkit's drop-in: with the file goes the default. A control.
#[test]
fn the_default_was_in_a_drop_in() {
    on(Generation::NEWEST, |scene| {
        let folder = scene.node.disk().join("conf.d");
        fs::create_dir(&folder)?;
        let drop_in = folder.join("10-nvidia.toml");
        let section = scene.section;
        let default = format!("[{section}]\n  default_runtime_name = \"nvidia\"\n");
        fs::write(
            &drop_in,
            format!("version = 3\n{default}{}", scene.nvidia()),
        )?;
        let main = scene.write("runc", &[scene.runc()])?;
        fs::write(
            &scene.file,
            format!("imports = [\"conf.d/*.toml\"]\n{main}"),
        )?;
        scene.default_works("nvidia")?;
        scene.bindguard(&["install", "--default"])?.success()?;
        scene.default_works("bindguard")?;
        fs::remove_file(&drop_in)?;
        scene.bindguard(&["uninstall", "--restart"])?.success()?;
        scene.default_works("runc")
    });
}

/// `uninstall` is killed at every change to the file system. After each kill the default is a
/// runtime, and the next call completes the removal.
#[test]
fn a_removal_that_is_killed() {
    if !privilege::has_program("strace") {
        return privilege::skipped("no strace");
    }
    on(Generation::NEWEST, |scene| {
        let changes = "rename,renameat,renameat2,unlink,unlinkat,rmdir";
        for step in 1.. {
            scene.write("nvidia", &[scene.runc(), scene.nvidia()])?;
            scene.bindguard(&["install", "--default"])?.success()?;
            scene.remove_toolkit()?;
            let mut command = scene.node.command("strace")?;
            let kill = format!("inject={changes}:signal=SIGKILL:when={step}");
            command.args(["-qq", "-e", &format!("trace={changes}"), "-e", &kill]);
            command.arg("-o").arg(scene.node.disk().join("steps"));
            command.arg(scene.node.under_test().join("bindguard"));
            command.args(["uninstall", "--restart"]);
            let ended = run(command)?;
            // until its first change the default is bindguard, whose program the toolkit has removed
            if let Err(error) = scene.effective_default() {
                let error = format!("{error:#}");
                ensure!(
                    !error.contains("is none of"),
                    "killed at change {step}: {error}"
                );
            }
            // A child of the killed one may still be running: then the programs stay.
            until("the removal is complete", || {
                Ok(scene.bindguard(&["uninstall", "--restart"])?.code() == 0)
            })
            .with_context(|| format!("after change {step}"))?;
            scene
                .default_works("runc")
                .with_context(|| format!("after change {step}"))?;
            write_toolkit(scene.node)?;
            if ended.code() != 137 {
                ensure!(step > 3, "no change was made: {ended:?}");
                return Ok(());
            }
        }
        Ok(())
    });
}

/// The whole way, with pods: containerd serves the CRI after the removal, with and without pods that
/// keep the handler.
mod pods_start_after_the_removal {
    use super::*;

    fn without_pods(generation: Generation) {
        with_cri(generation, |node, program| {
            remove_toolkit(node, program)?;
            let removed = node.bindguard(["uninstall"])?;
            a_pod_starts(node).with_context(|| shown(&removed))?;
            until("nothing needs the programs", || {
                Ok(node.bindguard(["uninstall"])?.code() == 0)
            })?;
            node.restart_containerd(Signal::SIGTERM)?;
            a_pod_starts(node)
        });
    }

    mod with_a_pod_of_the_handler {
        use super::*;

        fn story(generation: Generation) {
            with_cri(generation, |node, program| {
                let kept = node.cri()?.run_pod("bindguard", "kept", "kept")?;
                remove_toolkit(node, program)?;
                let removed = node.bindguard(["uninstall"])?;
                ensure!(
                    removed.code() == 1 && removed.stdout.contains("kept for 1 pod"),
                    "{removed:?}"
                );
                a_pod_starts(node).with_context(|| shown(&removed))?;
                // containerd keeps the options of an older sandbox; the handler has to work for
                // new pods, because their controllers still select it
                let cri = node.cri()?;
                let new = cri.run_pod("bindguard", "another", "another")?;
                cri.start_container(&new, "app", &SLEEP, &[])
                    .with_context(|| shown(&removed))?;
                cri.remove_pod(&new)?;
                // the older pod ends through its own runtime
                write_toolkit(node)?;
                cri.remove_pod(&kept)
            });
        }

        on_every_config_version!(story);
    }

    on_every_config_version!(without_pods);
}

/// Each create fails: the commands that a person runs first must name the program.
#[test]
fn doctor_and_status_name_the_missing_program() {
    with_cri(Generation::NEWEST, |node, program| {
        fs::remove_file(program)?;
        ensure!(
            node.cri()?.run_pod("", "none", "none").is_err(),
            "a pod starts: this story shows nothing"
        );
        let doctor = node.bindguard(["doctor"])?;
        let name = program.display().to_string();
        ensure!(
            doctor.code() != 0 && doctor.stdout.contains(&name),
            "{doctor:?}"
        );
        let status = node.bindguard(["status"])?;
        ensure!(status.stdout.contains(&name), "{status:?}");
        Ok(())
    });
}

/// dockerd does not start with a default that is none of its runtimes, and with it no container.
#[test]
fn docker() {
    with_engines(|node| {
        let program = write_toolkit(node)?;
        let runtimes = format!("\"runtimes\": {{\"nvidia\": {{\"path\": {program:?}}}}}");
        let text = format!("{{\"default-runtime\": \"nvidia\", {runtimes}}}\n");
        let file = Path::new("/etc/docker/daemon.json");
        fs::create_dir_all("/etc/docker")?;
        fs::write(file, text)?;
        node.bindguard(["install", "docker", "--default"])?
            .success()?;
        let installed = fs::read_to_string(file)?;
        let nvidia = format!("\"nvidia\": {{\"path\": {program:?}}}, ");
        let without = installed.replace(&nvidia, "");
        ensure!(without != installed, "no entry of the toolkit: {installed}");
        fs::write(file, without)?;
        fs::remove_file(&program)?;

        let healed = node.bindguard(["install", "docker", "--default"])?;
        ensure!(healed.code() == 0, "install does not heal: {healed:?}");
        says_nvidia_is_gone(&healed)?;
        // dockerd itself decides, and bindguard-runtime has to call another runtime, too
        let docker = Docker::start(node)?;
        docker.run(&[], &["true"])?.success()?;
        let removed = node.bindguard(["uninstall"])?;
        says_nvidia_is_gone(&removed)?;
        docker.restart().with_context(|| {
            format!(
                "{}{}",
                shown(&removed),
                fs::read_to_string(file).unwrap_or_default()
            )
        })?;
        docker.run(&[], &["true"])?.success()?;
        Ok(())
    });
}

/// A person's own empty table is no entry of bindguard's: nothing is left to do on such a node.
#[test]
fn docker_with_an_empty_table_of_its_own() {
    Setup::on(Generation::V1_7).bare().story(|node| {
        let (file, text) = (Path::new("/etc/docker/daemon.json"), "{\"runtimes\": {}}\n");
        fs::create_dir_all("/etc/docker")?;
        fs::write(file, text)?;
        for words in [&["uninstall"][..], &["uninstall", "--by-content"]] {
            let done = node.bindguard(words)?;
            ensure!(done.code() == 0, "{words:?}: {done:?}");
            ensure!(
                fs::read_to_string(file)? == text,
                "{words:?} edits the file"
            );
        }
        Ok(())
    });
}

/// The name of the default is in Podman's main file, and the toolkit's entry was in a drop-in.
#[test]
fn podman() {
    with_engines(|node| {
        let podman = Podman::on(node)?;
        let program = write_toolkit(node)?;
        let main = Path::new("/etc/containers/containers.conf");
        let text =
            fs::read_to_string(main)?.replace("[engine]\n", "[engine]\nruntime = \"nvidia\"\n");
        fs::write(main, text)?;
        let drop_in = Path::new("/etc/containers/containers.conf.d/10-nvidia.conf");
        fs::create_dir_all("/etc/containers/containers.conf.d")?;
        fs::write(
            drop_in,
            format!("[engine.runtimes]\nnvidia = [{program:?}]\n"),
        )?;
        podman.run(&[], &[], &["true"])?.success()?;
        node.bindguard(["install", "podman", "--default"])?
            .success()?;
        podman.run(&[], &[], &["true"])?.success()?;
        fs::remove_file(drop_in)?;
        fs::remove_file(&program)?;
        let removed = node.bindguard(["uninstall"])?;
        let ended = podman.run(&[], &[], &["true"])?;
        ensure!(
            ended.status.success() || removed.code() != 0,
            "uninstall ends with 0, and no container starts: {ended:?} {removed:?}"
        );
        says_nvidia_is_gone(&removed)
    });
}

/// CRI-O does not start with a default that is none of its runtimes.
#[test]
fn crio() {
    Setup::on(Generation::V1_7).bare().story(|node| {
        let program = write_toolkit(node)?;
        fs::create_dir_all("/etc/crio/crio.conf.d")?;
        let main = "[crio.runtime]\ndefault_runtime = \"nvidia\"\n";
        fs::write("/etc/crio/crio.conf", main)?;
        let drop_in = Path::new("/etc/crio/crio.conf.d/10-nvidia.conf");
        let table = format!("[crio.runtime.runtimes.nvidia]\nruntime_path = {program:?}\n");
        fs::write(drop_in, table)?;
        node.bindguard(["install", "crio", "--default"])?
            .success()?;
        fs::remove_file(drop_in)?;
        fs::remove_file(&program)?;
        let removed = node.bindguard(["uninstall", "--restart"])?;
        let mut default = None;
        for entry in fs::read_dir("/etc/crio/crio.conf.d")? {
            let text = fs::read_to_string(entry?.path())?;
            if text.contains("default_runtime") {
                default = Some(text);
            }
        }
        let main = fs::read_to_string("/etc/crio/crio.conf")?;
        ensure!(
            removed.code() != 0 || default.is_some() || !main.contains("\"nvidia\""),
            "uninstall ends with 0, and CRI-O's default is no runtime: {removed:?}"
        );
        says_nvidia_is_gone(&removed)
    });
}

fn with_engines(story: impl FnOnce(&Node) -> Result<()>) {
    match missing() {
        Some(why) => privilege::skipped(&why),
        None => Setup::on(Generation::V1_7).bare().story(|node| {
            let matrix = bindguard_integration::programs::Matrix::locate()?;
            let crun = matrix.program(Generation::V1_7, "crun");
            symlink(crun, node.programs().join("crun")).context("put crun beside runc")?;
            story(node)
        }),
    }
}

/// An nvidia that is the default, and bindguard in front of it.
fn with_cri(generation: Generation, story: impl FnOnce(&Node, &Path) -> Result<()>) {
    Setup::on(generation).cri().bare().story(|node| {
        let program = write_toolkit(node)?;
        let section = "plugins.\"io.containerd.grpc.v1.cri\".containerd";
        let file = node.containerd_config();
        let text = fs::read_to_string(file)?;
        let named = text.replace(
            "default_runtime_name = \"runc\"",
            "default_runtime_name = \"nvidia\"",
        );
        ensure!(named != text, "no default in {text}");
        fs::write(file, named + &nvidia(section, &program))?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.bindguard(["install", "--default"])?.success()?;
        node.restart_containerd(Signal::SIGTERM)?;
        let sandbox = node.cri()?.run_pod("", "first", "first")?;
        node.cri()?.remove_pod(&sandbox)?;
        story(node, &program)
    });
}

fn remove_toolkit(node: &Node, program: &Path) -> Result<()> {
    let section = "plugins.\"io.containerd.grpc.v1.cri\".containerd";
    let file = node.containerd_config();
    let text = fs::read_to_string(file)?;
    let without = text.replace(&nvidia(section, program), "");
    ensure!(without != text, "no tables of the toolkit in {text}");
    fs::write(file, without)?;
    fs::remove_file(program).context("remove the toolkit's program")
}

fn a_pod_starts(node: &Node) -> Result<()> {
    node.restart_containerd(Signal::SIGTERM)?;
    let cri = node.cri().context("containerd serves no CRI")?;
    let sandbox = cri.run_pod("", "new", "new")?;
    cri.start_container(&sandbox, "app", &SLEEP, &[])?;
    cri.remove_pod(&sandbox)
}

/// containerd's file on a node with a GPU. containerd's program reads the file; no containerd runs
/// with it.
struct Scene<'n> {
    node: &'n Node,
    file: PathBuf,
    version: u8,
    section: &'static str,
    program: PathBuf,
}

fn on(generation: Generation, story: impl FnOnce(&Scene<'_>) -> Result<()>) {
    Setup::on(generation).bare().story(|node| {
        let (version, section) = if generation >= Generation::V2_1 {
            (3, "plugins.\"io.containerd.cri.v1.runtime\".containerd")
        } else {
            (2, "plugins.\"io.containerd.grpc.v1.cri\".containerd")
        };
        story(&Scene {
            node,
            file: node.disk().join("config.toml"),
            version,
            section,
            program: write_toolkit(node)?,
        })
    });
}

impl Scene<'_> {
    fn runc(&self) -> String {
        format!(
            "[{}.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n",
            self.section
        )
    }

    fn nvidia(&self) -> String {
        nvidia(self.section, &self.program)
    }

    /// Writes a main file with this default and these tables, and returns its text.
    fn write(&self, default: &str, tables: &[String]) -> Result<String> {
        let text = format!(
            "version = {}\n[{}]\n  default_runtime_name = \"{default}\"\n{}",
            self.version,
            self.section,
            tables.concat()
        );
        fs::write(&self.file, &text)?;
        Ok(text)
    }

    fn text(&self) -> Result<String> {
        fs::read_to_string(&self.file).with_context(|| format!("read {}", self.file.display()))
    }

    /// Another tool edits the default of the main file.
    fn set_default(&self, name: &str) -> Result<()> {
        let mut edited = String::new();
        for line in self.text()?.lines() {
            match line.split_once("default_runtime_name = ") {
                Some((indent, _)) => {
                    edited += &format!("{indent}default_runtime_name = \"{name}\"\n")
                }
                None => edited += &format!("{line}\n"),
            }
        }
        ensure!(edited.contains(name), "no default in {edited}");
        fs::write(&self.file, edited)?;
        Ok(())
    }

    /// The effective default after the edit: containerd 2 reads bindguard's drop-in last.
    fn default_beside_a_drop_in<'d>(&self, edited: &'d str) -> &'d str {
        if self.version > 2 {
            "bindguard"
        } else {
            edited
        }
    }

    fn remove_toolkit(&self) -> Result<()> {
        let text = self.text()?;
        let without = text.replace(&self.nvidia(), "");
        ensure!(without != text, "no tables of the toolkit in {text}");
        fs::write(&self.file, without)?;
        fs::remove_file(&self.program).context("remove the toolkit's program")
    }

    /// `uninstall` finds the file in its record.
    fn bindguard(&self, words: &[&str]) -> Result<Finished> {
        let file = self.file.display().to_string();
        let named = ["--containerd-config", file.as_str()];
        if words[0] == "install" {
            return self.node.bindguard([words, &named].concat());
        }
        self.node.bindguard(words)
    }

    /// The effective default: one of the effective runtimes, with programs that exist.
    fn effective_default(&self) -> Result<String> {
        let mut command = self.node.command("containerd")?;
        command
            .arg("--config")
            .arg(&self.file)
            .args(["config", "dump"]);
        let dump: Table = run(command)?.success()?.parse().context("parse the dump")?;
        let section = PLUGINS
            .iter()
            .find_map(|plugin| dump.get("plugins")?.get(plugin)?.get("containerd"))
            .context("find the CRI's section")?;
        let name = section.get("default_runtime_name").and_then(Value::as_str);
        let name = name.context("find the default runtime")?;
        let runtimes = section.get("runtimes").and_then(Value::as_table);
        let runtimes = runtimes.context("find the runtimes")?;
        let runtime = runtimes.get(name).with_context(|| {
            let names: Vec<&String> = runtimes.keys().collect();
            format!("the default runtime {name:?} is none of {names:?}: no CRI is served")
        })?;
        let option = runtime
            .get("options")
            .and_then(|options| options.get("BinaryName"));
        for path in [runtime.get("runtime_path"), option] {
            let path = path.and_then(Value::as_str).unwrap_or_default();
            ensure!(
                !path.starts_with('/') || Path::new(path).exists(),
                "the default runtime {name:?} calls {path}, which is gone: no pod starts"
            );
        }
        Ok(name.to_owned())
    }

    fn default_works(&self, wanted: &str) -> Result<()> {
        let found = self.effective_default()?;
        ensure!(
            found == wanted,
            "the default is {found:?}, not {wanted:?}: {}",
            self.text()?
        );
        Ok(())
    }
}

/// Exit code 0 promises a node on which pods start.
fn says_the_truth(scene: &Scene<'_>, finished: &Finished) -> Result<()> {
    if let Err(error) = scene.effective_default() {
        ensure!(finished.code() != 0, "{error:#}: {finished:?}");
        says_nvidia_is_gone(finished)?;
    }
    Ok(())
}

fn says_nvidia_is_gone(finished: &Finished) -> Result<()> {
    ensure!(
        shown(finished).contains("nvidia"),
        "the message does not name the default that is gone: {finished:?}"
    );
    Ok(())
}

fn shown(finished: &Finished) -> String {
    format!(
        "exit code {}: {}{}",
        finished.code(),
        finished.stdout,
        finished.stderr
    )
}

fn write_toolkit(node: &Node) -> Result<PathBuf> {
    let program = node.programs().join("nvidia-container-runtime");
    let runc = node.programs().join("runc");
    write_program(
        &program,
        &format!("#!/bin/sh\nexec {} \"$@\"\n", runc.display()),
    )?;
    Ok(program)
}

fn nvidia(section: &str, program: &Path) -> String {
    format!(
        "[{section}.runtimes.nvidia]\n  runtime_type = \"io.containerd.runc.v2\"\n[{section}.runtimes.nvidia.options]\n  BinaryName = {program:?}\n"
    )
}
