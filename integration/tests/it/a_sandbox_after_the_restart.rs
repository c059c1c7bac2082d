//! After `install --restart` restarted containerd, one sandbox of the node's pause image runs through
//! the handler, and is removed. If it does not start, the former default comes back: a node must not
//! keep a default under which no pod starts.

use bindguard_integration::prelude::*;
use std::os::unix::process::ExitStatusExt;

use bindguard_integration::programs::Matrix;

/// The text of each sandbox's create, and of each attempt that the story wants to hold or to break.
const RUNTIME: &str = r#"#!/bin/sh
cd "${0%/*}"
case " $* " in
*" create "*)
  echo create >> creates
  if [ -e broken ] && tr '\0' ' ' < /proc/$PPID/cmdline | grep -q bindguard; then
    echo '{"level":"error","msg":"broken by the story"}' >&2
    exit 1
  fi ;;
*" kill "*)
  if [ -e hold ]; then
    touch held
    while [ -e hold ]; do sleep 0.02; done
  fi ;;
esac
exec ./runc "$@"
"#;

on_newest_and_older!(it_runs_and_is_removed);

fn it_runs_and_is_removed(generation: Generation) {
    on(generation, |node| {
        let done = install(node, &["--default"])?;
        ensure!(done.code == 0, "{done:?}");
        // by containerd's log
        let ran = || Ok::<_, anyhow::Error>(node.log()?.matches("returns sandbox id").count());
        ensure!(ran()? == 1, "no sandbox was tried: {done:?}");
        ensure!(!done.text.contains("not tried"), "{done:?}");
        nothing_is_left(node)?;
        // nothing is to do, so nothing is tried
        node.bindguard(["install", "--default", "--restart"])?
            .success()?;
        ensure!(ran()? == 1, "a second sandbox without a restart");
        Ok(())
    });
}

#[test]
fn it_fails_and_the_former_default_comes_back() {
    on(Generation::NEWEST, |node| {
        fs::write(node.programs().join("broken"), "")?;
        let failed = install(node, &["--default"])?;
        let says = |text: &str| failed.text.contains(text);
        ensure!(
            failed.code == 2
                && says("the former default runtime is back")
                && says("no pod starts through the handler bindguard"),
            "{failed:?}"
        );
        nothing_is_left(node)?;
        let files = node.containerd_files()?;
        ensure!(
            !files.contains("default_runtime_name = \"bindguard\"")
                && files.contains("runtimes.bindguard"),
            "{files}"
        );
        let cri = node.cri()?;
        let pod = cri.run_pod("", "after", "after")?;
        cri.remove_pod(&pod)?;
        Ok(())
    });
}

/// No default is taken back, and the failure is not forgotten.
#[test]
fn it_fails_again_with_the_next_install() {
    on(Generation::V1_7, |node| {
        fs::write(node.programs().join("broken"), "")?;
        for _ in 0..2 {
            let failed = install(node, &[])?;
            ensure!(
                failed.code == 2 && failed.text.contains("no pod starts through the handler"),
                "{failed:?}"
            );
            nothing_is_left(node)?;
        }
        fs::remove_file(node.programs().join("broken"))?;
        let done = install(node, &[])?;
        ensure!(done.code == 0, "{done:?}");
        Ok(())
    });
}

#[test]
fn no_image_is_pulled() {
    on(Generation::NEWEST, |node| {
        let file = node.containerd_config();
        let text = fs::read_to_string(file)?;
        let absent = "nowhere.invalid/pause:1";
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for line in &mut lines {
            if line.contains("sandbox_image") {
                *line = format!("  sandbox_image = \"{absent}\"");
            }
        }
        fs::write(file, lines.join("\n") + "\n")?;
        let done = install(node, &["--default"])?;
        ensure!(
            done.code == 0
                && done
                    .text
                    .contains(&format!("was not tried: the image {absent}")),
            "{done:?}"
        );
        ensure!(creates(node) == 0);
        Ok(())
    });
}

/// The sandbox runs, and its removal has begun. Ctrl-C of a terminal ends the installer, and so does
/// SIGKILL: the sandbox still goes.
#[test]
fn the_installer_is_killed_meanwhile() {
    on(Generation::NEWEST, |node| {
        let hold = node.programs().join("hold");
        fs::write(&hold, "")?;
        let killed = with_restarts(node, &[], |child| {
            if node.programs().join("held").exists() {
                child.kill().context("kill the installer")?;
            }
            Ok(())
        })?;
        ensure!(killed.code == 9, "{killed:?}");
        ensure!(creates(node) == 1 && !containers(node)?.is_empty());
        fs::remove_file(&hold)?;
        until("the sandbox is gone", || Ok(containers(node)?.is_empty()))?;
        // no answer of the sandbox was seen: it is tried again
        let done = install(node, &[])?;
        ensure!(done.code == 0 && creates(node) == 2, "{done:?}");
        nothing_is_left(node)
    });
}

fn on(generation: Generation, story: impl FnOnce(&Node) -> Result<()>) {
    Setup::on(generation).cri().bare().story(|node| {
        let folder = node.programs();
        write_program(&folder.join("slow-runc"), RUNTIME)?;
        write_program(
            &folder.join("systemctl"),
            "#!/bin/sh\ncd \"${0%/*}\"\ntouch wanted\nwhile [ -e wanted ]; do sleep 0.02; done\n",
        )?;
        let file = node.containerd_config();
        let options = format!(
            "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n  BinaryName = {:?}\n",
            folder.join("slow-runc")
        );
        let text = fs::read_to_string(file)?;
        fs::write(file, text + &options)?;
        node.restart_containerd(Signal::SIGTERM)?;
        story(node)
    });
}

#[derive(Debug)]
struct Done {
    code: i32,
    text: String,
}

fn install(node: &Node, words: &[&str]) -> Result<Done> {
    with_restarts(node, words, |_| Ok(()))
}

/// `install --restart`. The story does what the installer requests of systemctl.
fn with_restarts(
    node: &Node,
    words: &[&str],
    mut meanwhile: impl FnMut(&mut Child) -> Result<()>,
) -> Result<Done> {
    let output = node.disk().join("output");
    let log = fs::File::create(&output)?;
    let mut command: Command = node.command(node.under_test().join(CLI))?;
    command
        .args(["install", "--restart"])
        .args(words)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let mut child = command.spawn().context("start the installer")?;
    let mut status = None;
    let wanted: PathBuf = node.programs().join("wanted");
    until("the installer has ended", || {
        if wanted.exists() {
            node.restart_containerd(Signal::SIGTERM)?;
            fs::remove_file(&wanted)?;
        }
        meanwhile(&mut child)?;
        status = child.try_wait()?;
        Ok(status.is_some())
    })?;
    let status = status.context("the status")?;
    Ok(Done {
        code: status.code().or(status.signal()).unwrap_or_default(),
        text: fs::read_to_string(output)?,
    })
}

fn creates(node: &Node) -> usize {
    let log = fs::read_to_string(node.programs().join("creates"));
    log.map_or(0, |log| log.lines().count())
}

fn containers(node: &Node) -> Result<String> {
    let ctr = Matrix::locate()?.program(node.generation(), "ctr");
    let mut command = Command::new(ctr);
    command.args(["-n", "k8s.io", "containers", "ls", "-q"]);
    Ok(run(command)?.success()?.trim().to_owned())
}

fn nothing_is_left(node: &Node) -> Result<()> {
    let left = containers(node)?;
    ensure!(left.is_empty(), "a sandbox is left: {left}");
    Ok(())
}
