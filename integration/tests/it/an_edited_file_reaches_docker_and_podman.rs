//! moby#15793: an editor replaces a file that a container of Docker or Podman binds. With the
//! agent, a container that opted in reads the new file; `bindguard refresh --container` refreshes
//! any container once.

use bindguard_integration::prelude::*;
use std::fs::OpenOptions;
use std::io::Write;

use bindguard_integration::doc_commands::{Rehearsal, repository};
use bindguard_integration::engines::{ContainerEngine, Docker, Podman, missing};
use bindguard_integration::privilege;

const LABEL: &str = "bindguard.refresh=true";
const NOTIFY: &str = "bindguard.refresh-notify=signal:SIGHUP";
const PLACE: &str = "/etc/app.conf";
const SLEEP: [&str; 2] = ["sleep", "1000000"];

#[test]
fn docker() {
    story(|node| {
        let docker = Docker::start(node)?;
        let agent = Agent::start(node, "")?;
        each_editor(node, &docker, &["--label", LABEL])?;
        a_container_that_starts_again(node, &docker, &["--label", LABEL])?;
        a_paused_container(node, &docker, &["--label", LABEL, "--label", NOTIFY])?;
        only_a_container_that_opted_in(node, &docker, &["--label", LABEL])?;
        ensure!(
            agent.figure("bindguard_refreshes_total{outcome=\"failed\"}") == 0.0,
            "{}",
            agent.get("/metrics")
        );
        Ok(())
    });
}

#[test]
fn podman() {
    story(|node| {
        let podman = Podman::on(node)?;
        let agent = Agent::start(node, "")?;
        // Without its API: the annotation is in the spec.
        for runtime in ["runc", "crun"] {
            let flags = ["--annotation", LABEL, "--runtime", runtime];
            each_editor(node, &podman, &flags)?;
            a_container_that_starts_again(node, &podman, &flags)?;
        }
        a_paused_container(
            node,
            &podman,
            &["--annotation", LABEL, "--annotation", NOTIFY],
        )?;
        only_a_container_that_opted_in(node, &podman, &["--annotation", LABEL])?;
        a_rootless_container_is_refused(node)?;
        let mut api = podman.serve()?;
        let with_label = each_editor(node, &podman, &["--label", LABEL]);
        let _ = api.kill().and_then(|()| api.wait().map(drop));
        with_label?;
        ensure!(
            agent.figure("bindguard_refreshes_total{outcome=\"failed\"}") == 0.0,
            "{}",
            agent.get("/metrics")
        );
        Ok(())
    });
}

fn story(story: impl FnOnce(&Node) -> Result<()>) {
    if let Some(why) = missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V1_7).bare().story(|node| {
        let crun =
            bindguard_integration::programs::Matrix::locate()?.program(Generation::V1_7, "crun");
        std::os::unix::fs::symlink(crun, node.programs().join("crun"))
            .context("put crun beside runc")?;
        story(node)
    });
}

/// A file on the node that a container binds.
struct File(PathBuf);

impl File {
    fn new(node: &Node, directory: &str) -> Result<Self> {
        let file = node.disk().join(directory).join("app.conf");
        fs::create_dir_all(file.parent().unwrap_or(&file))?;
        fs::write(&file, "one")?;
        Ok(Self(file))
    }

    fn bind(&self) -> String {
        format!("{}:{PLACE}:ro", self.0.display())
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.0.with_file_name(name)
    }

    /// As `sed -i` and most editors do.
    fn rename_over(&self, text: &str) -> Result<()> {
        fs::write(self.beside(".app.conf.swp"), text)?;
        fs::rename(self.beside(".app.conf.swp"), &self.0).context("rename the new file")
    }

    /// As vim does with a backup. It writes for a while.
    fn rename_away(&self, text: &str) -> Result<()> {
        fs::rename(&self.0, self.beside("app.conf~"))?;
        let mut file = OpenOptions::new()
            .create_new(true)
            .write(true)
            .open(&self.0)?;
        for part in text.as_bytes() {
            file.write_all(&[*part])?;
            thread::sleep(Duration::from_millis(20));
        }
        drop(file);
        fs::remove_file(self.beside("app.conf~")).context("remove the backup")
    }

    fn link(&self, text: &str) -> Result<()> {
        fs::write(self.beside(text), text)?;
        fs::remove_file(&self.0)?;
        std::os::unix::fs::symlink(text, &self.0).context("link the new file")
    }
}

/// Replaces the file by a file with this text.
type Edit<'a> = &'a dyn Fn(&str) -> Result<()>;

fn each_editor(node: &Node, engine: &impl ContainerEngine, flags: &[&str]) -> Result<()> {
    let file = File::new(node, "edited")?;
    let bind = file.bind();
    let id = engine.start(&[flags, &["--volume", &bind]].concat(), &SLEEP)?;
    let mounts = || {
        Ok::<_, anyhow::Error>(
            engine
                .verb(&["exec", &id, "cat", "/proc/self/mountinfo"])?
                .success()?
                .lines()
                .count(),
        )
    };
    let before = mounts()?;
    let edits: [(&str, Edit<'_>); 5] = [
        ("two", &|text| file.rename_over(text)),
        ("three", &|text| file.rename_away(text)),
        ("four", &|text| file.link(text)),
        ("five", &|text| file.rename_over(text)),
        ("six", &|text| {
            fs::write(&file.0, text).context("write in place")
        }),
    ];
    for (text, edit) in edits {
        edit(text)?;
        until(&format!("the container reads {text}"), || {
            Ok(engine.read(&id, PLACE)? == text)
        })?;
    }
    // Old content, whole.
    fs::remove_file(&file.0)?;
    ensure!(
        engine.read(&id, PLACE)? == "six",
        "a file that is gone changed the container"
    );
    ensure!(mounts()? == before, "mounts were left behind");
    engine.remove(&id)
}

fn a_container_that_starts_again(
    node: &Node,
    engine: &impl ContainerEngine,
    flags: &[&str],
) -> Result<()> {
    let file = File::new(node, "again")?;
    let bind = file.bind();
    let id = engine.start(&[flags, &["--volume", &bind]].concat(), &SLEEP)?;
    for text in ["two", "three", "four"] {
        engine.verb(&["restart", "--time", "0", &id])?.success()?;
        file.rename_over(text)?;
        until("the container reads the new file", || {
            Ok(engine.read(&id, PLACE)? == text)
        })?;
    }
    engine.remove(&id)
}

/// The mounts change while the container is frozen. The signal arrives when the container resumes.
fn a_paused_container(node: &Node, engine: &impl ContainerEngine, flags: &[&str]) -> Result<()> {
    let file = File::new(node, "paused")?;
    let bind = file.bind();
    let program =
        "trap 'echo got $(cat /etc/app.conf)' HUP; echo started; while :; do sleep 0.1; done";
    let id = engine.start(
        &[flags, &["--volume", &bind]].concat(),
        &["sh", "-c", program],
    )?;
    let logs = || engine.verb(&["logs", &id])?.success();
    until("the program runs", || Ok(logs()?.contains("started")))?;
    let pid = engine
        .verb(&["inspect", "--format", "{{.State.Pid}}", &id])?
        .success()?;
    let seen = format!("/proc/{}/root{PLACE}", pid.trim());
    // The agent follows it by now: the first edit arrives.
    file.rename_over("two")?;
    until("the program got the signal", || {
        Ok(logs()?.contains("got two"))
    })?;
    engine.verb(&["pause", &id])?.success()?;
    file.rename_over("three")?;
    until("the frozen container has the new file", || {
        Ok(fs::read_to_string(&seen)? == "three")
    })?;
    ensure!(!logs()?.contains("got three"), "a frozen program ran");
    engine.verb(&["unpause", &id])?.success()?;
    until("the program got the signal", || {
        Ok(logs()?.contains("got three"))
    })?;
    engine.remove(&id)
}

fn only_a_container_that_opted_in(
    node: &Node,
    engine: &impl ContainerEngine,
    flags: &[&str],
) -> Result<()> {
    let file = File::new(node, "not")?;
    let bind = file.bind();
    let id = engine.start(&["--volume", &bind], &SLEEP)?;
    let opted_in = engine.start(&[flags, &["--volume", &bind]].concat(), &SLEEP)?;
    file.rename_over("two")?;
    until("the container that opted in reads the new file", || {
        Ok(engine.read(&opted_in, PLACE)? == "two")
    })?;
    engine.remove(&opted_in)?;
    ensure!(
        engine.read(&id, PLACE)? == "one",
        "a container that did not opt in was entered"
    );

    let refresh =
        |words: &[&str]| node.bindguard(["refresh", "--container", &id[..12]].iter().chain(words));
    for what in [&[][..], &["--what", "host-files"]] {
        let dry_run = refresh(&[&["--dry-run"], what].concat())?;
        ensure!(
            dry_run.code() == 1
                && dry_run.stdout.contains(PLACE)
                && dry_run.stdout.contains("mounts checked, 1 stale before"),
            "{dry_run:?}"
        );
    }
    let diagnosed = node.bindguard(["diagnose"])?;
    ensure!(
        diagnosed.code() == 0
            && diagnosed.stdout.contains(&format!("  {id}  "))
            && diagnosed.stdout.contains(PLACE)
            && diagnosed.stdout.contains(&format!(
                "bindguard refresh --container {id} --what host-files"
            )),
        "{diagnosed:?}"
    );
    let other = refresh(&["--what", "volumes"])?;
    ensure!(
        other.code() == 0 && other.stdout.contains(" checked, 0 stale before"),
        "{other:?}"
    );
    let program = node.disk().join("dist").join(CLI);
    Rehearsal::on(node)
        .instead_of("bindguard ", &format!("{} ", program.display()))
        .folder(&repository())
        .with("ID", &id[..12])
        .prints("bindguard refresh --container ID", &["replaced"])
        .play("docs/docker.md")?;
    ensure!(
        engine.read(&id, PLACE)? == "two",
        "the container reads the old file"
    );
    fs::remove_file(&file.0)?;
    let gone = refresh(&["--json"])?;
    ensure!(
        gone.code() == 1 && gone.stdout.contains("key-gone"),
        "{gone:?}"
    );
    engine.remove(&id)
}

/// The state that crun keeps for a user: its host paths are in a mount namespace of that user.
fn a_rootless_container_is_refused(node: &Node) -> Result<()> {
    fs::create_dir_all("/run/user/1000/crun/5e1f")?;
    let refused = node.bindguard(["refresh", "--container", "5e1f"])?;
    ensure!(
        refused.code() == 2 && refused.stderr.contains("rootless container of user 1000"),
        "{refused:?}"
    );
    Ok(())
}
