//! The files of `config/` are read by their programs: containerd, systemd-tmpfiles, logrotate,
//! dpkg. (The OCI hook is Podman's: see `podman_and_docker.rs`. The manifests are read in
//! `config/tests`.)

use bindguard_integration::prelude::*;
use std::cell::RefCell;
use std::os::unix::fs::PermissionsExt;

use bindguard_integration::mount_calls::own_copy;
use bindguard_integration::programs::Matrix;
use bindguard_integration::{engines, privilege};

#[test]
fn containerd_reads_the_snippets() -> Result<()> {
    let matrix = Matrix::locate()?;
    for generation in Generation::ALL {
        let newest = generation >= Generation::V2_1;
        for name in ["config-v2.toml", "config-v3.toml"]
            .into_iter()
            .take(if newest { 2 } else { 1 })
        {
            let mut command = Command::new(matrix.program(generation, "containerd"));
            command
                .arg("--config")
                .arg(shipped("containerd").join(name))
                .args(["config", "dump"]);
            let done = run(command)?;
            ensure!(
                !done.stderr.contains("gnor"),
                "{generation} ignores some of {name}: {}",
                done.stderr
            );
            let dump = done.success()?.replace('\'', "\"");
            for part in [
                "runtimes.bindguard]",
                "runtimes.runc]",
                "\"/usr/local/bin/containerd-shim-bindguard-v2\"",
            ] {
                ensure!(
                    dump.contains(part),
                    "{generation} with {name} has no {part}: {dump}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn systemd_makes_the_folders() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        if !privilege::has_program("systemd-tmpfiles") {
            privilege::skipped("no systemd-tmpfiles");
            return Ok(());
        }
        let (root, file) = (
            node.disk().join("root"),
            shipped("tmpfiles.d/bindguard.conf"),
        );
        fs::create_dir_all(&root)?;
        let root_flag = format!("--root={}", root.display());
        fs::create_dir_all(root.join("etc"))?;
        for name in ["passwd", "group"] {
            fs::copy(Path::new("/etc").join(name), root.join("etc").join(name))?;
        }
        host([
            "systemd-tmpfiles",
            "--create",
            &root_flag,
            &file.display().to_string(),
        ])?;
        for (folder, mode) in [("run/bindguard", 0o755), ("var/log/bindguard", 0o750)] {
            let folder = root.join(folder);
            let found =
                fs::metadata(&folder).with_context(|| format!("look at {}", folder.display()))?;
            ensure!(
                found.permissions().mode() & 0o7777 == mode,
                "{}: {:o}",
                folder.display(),
                found.permissions().mode()
            );
        }
        Ok(())
    });
}

#[test]
fn logrotate_turns_the_journal_over() {
    if let Some(why) = engines::missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let journal = node.disk().join("journal.jsonl");
        fs::write(&journal, "{}\n")?;
        let text = fs::read_to_string(shipped("logrotate.d/bindguard"))?;
        let here = text.replace(
            "/var/log/bindguard/journal.jsonl",
            &journal.display().to_string(),
        );
        ensure!(here != text, "the file is about another journal");
        let file = node.disk().join("logrotate.conf");
        fs::write(&file, here)?;
        let rotate = |more: &[&str]| {
            let mut command = Command::new(engines::program("logrotate"));
            command
                .args(more)
                .arg("--state")
                .arg(node.disk().join("logrotate.state"))
                .arg(&file);
            run(command)
        };
        let ended = rotate(&["--debug"])?;
        ensure!(
            ended.status.success() && !ended.stderr.contains("error"),
            "{}",
            ended.stderr
        );
        rotate(&["--force"])?.success()?;
        ensure!(!journal.exists(), "the journal was not moved away");
        Ok(())
    });
}

const CONFIG: &str = "/etc/bindguard/config.toml";
const MINE: &str = "# mine\n";

fn package() -> Option<PathBuf> {
    let package = std::env::var_os("BINDGUARD_DEB").map(PathBuf::from);
    let package = package.filter(|file| file.is_file());
    if package.is_none() {
        privilege::skipped("no package in BINDGUARD_DEB: run make deb");
    }
    package
}

/// The folders that dpkg writes, for this story alone.
fn own_folders() -> Result<()> {
    ["/usr", "/var/log"]
        .iter()
        .try_for_each(|folder| own_copy(folder, &Path::new("/run/own-too").join(&folder[1..])))
}

/// dpkg is dpkg itself, on a root that is thrown away. Triggers are left out: mandb would read all
/// manuals of the machine each time.
#[test]
fn the_package_comes_and_goes() {
    let Some(package) = package() else { return };
    Setup::on(Generation::V1_7).bare().cri().story(|node| {
        own_folders()?;
        let package = package.display().to_string();
        let before = fs::read(node.containerd_config())?;
        host(["dpkg", "--no-triggers", "--install", &package])?;
        host(["/usr/bin/bindguard", "config", "check", CONFIG])?;
        the_agent_is_there_and_off()?;
        configure_containerd(node)?;
        node.restart_containerd(Signal::SIGTERM)?;
        let pod = Pod::run(node)?;
        upgraded(&package)?;
        pod.restarted(node)?;

        refused(node, "handler bindguard kept for 1 pod (default/web)")?;
        node.restart_containerd(Signal::SIGTERM)?;
        pod.restarted(node)?;
        node.cri()?.remove_pod(&pod.sandbox)?;
        refused(node, "until a restarted service names them no more")?;
        node.restart_containerd(Signal::SIGTERM)?;
        host(["dpkg", "--no-triggers", "--remove", "bindguard"])?;
        ensure!(
            fs::read(node.containerd_config())? == before,
            "containerd still names what is gone"
        );
        ensure!(
            !Path::new("/usr/bin/bindguard-runtime").exists(),
            "a program is left"
        );
        ensure!(
            fs::read_to_string(CONFIG)?.ends_with(MINE),
            "remove is not purge"
        );
        host(["dpkg", "--no-triggers", "--purge", "bindguard"])?;
        for left in [
            "/usr/bin/bindguard-agent",
            "/etc/bindguard",
            "/etc/logrotate.d/bindguard",
            "/var/log/bindguard",
            "/var/lib/bindguard",
            "/usr/share/doc/bindguard",
        ] {
            ensure!(!Path::new(left).exists(), "{left} is left");
        }
        Ok(())
    });
}

/// An operator removes bindguard and goes away: the timer of the package finishes the work when the
/// pods have ended. It never begins a removal.
#[test]
fn the_timer_of_the_package_finishes_a_removal() {
    let Some(package) = package() else { return };
    Setup::on(Generation::NEWEST).bare().cri().story(|node| {
        own_folders()?;
        let before = fs::read(node.containerd_config())?;
        host([
            "dpkg",
            "--no-triggers",
            "--install",
            &package.display().to_string(),
        ])?;
        the_timer_is_on()?;
        runs_out_of_work(node)?;
        installed_by_default(node)?;
        let installed = fs::read(node.containerd_config())?;
        runs_out_of_work(node)?;
        ensure!(
            fs::read(node.containerd_config())? == installed,
            "the timer removes an installation"
        );
        let by_class = Pod::run(node)?;
        let by_default = node.cri()?.run_pod("", "by-default", "uid-default")?;

        let removed = packaged(node, &["uninstall"])?;
        ensure!(removed.code() == 1, "{removed:?}");
        node.restart_containerd(Signal::SIGTERM)?;
        let waits = removal_service(node)?;
        ensure!(
            waits.code() == 0 && waits.stdout.contains("handler bindguard kept for 1 pod"),
            "pods are no failure: {waits:?}"
        );
        kept(node, &counts(1, 2))?;
        node.cri()?.remove_pod(&by_class.sandbox)?;
        let owed = removal_service(node)?;
        ensure!(
            owed.code() == 1 && owed.stdout.contains("systemctl restart"),
            "nobody learns about the restart: {owed:?}"
        );
        ensure!(fs::read(node.containerd_config())? == before);
        node.restart_containerd(Signal::SIGTERM)?;
        until("the pod of the class is gone", || {
            Ok(removal_service(node)?.stdout.contains("kept for 1 pod"))
        })?;
        kept(node, &counts(0, 1))?;
        node.cri()?.remove_pod(&by_default)?;
        until("nothing is kept", || {
            ensure!(removal_service(node)?.code() == 0);
            Ok(!fs::exists(RECORD)?)
        })?;
        kept(node, &Value::Null)?;
        runs_out_of_work(node)?;

        fs::create_dir_all(Path::new(RECORD).parent().context(RECORD)?)?;
        fs::write(RECORD, "no record")?;
        let failed = removal_service(node)?;
        ensure!(
            failed.code() == 2 && failed.stderr.contains(RECORD),
            "{failed:?}"
        );
        fs::remove_file(RECORD)?;
        host(["dpkg", "--no-triggers", "--remove", "bindguard"])?;
        Ok(())
    });
}

const RECORD: &str = "/var/lib/bindguard/install.json";
const TIMER: &str = "bindguard-removal.timer";

/// Also without a running systemd: a node image is made in a folder.
fn the_timer_is_on() -> Result<()> {
    let wanted = Path::new("/lib/systemd/system/timers.target.wants").join(TIMER);
    ensure!(wanted.is_file(), "{} is no timer", wanted.display());
    if !privilege::has_program("systemd-analyze") {
        privilege::skipped("no systemd-analyze");
        return Ok(());
    }
    host(["systemd-analyze", "verify", TIMER])?;
    Ok(())
}

/// Runs the program that systemd starts for the timer.
fn removal_service(node: &Node) -> Result<Finished> {
    let unit = fs::read_to_string("/lib/systemd/system/bindguard-removal.service")?;
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let mut words = line.context("find ExecStart")?.split(' ');
    let mut command = node.command(words.next().context("find the program")?)?;
    command.args(words);
    run(command)
}

fn runs_out_of_work(node: &Node) -> Result<()> {
    let nothing = removal_service(node)?;
    ensure!(
        nothing.code() == 0 && nothing.stdout.starts_with("nothing "),
        "{nothing:?}"
    );
    Ok(())
}

fn installed_by_default(node: &Node) -> Result<()> {
    packaged(node, &["install", "--default"])?.success()?;
    node.restart_containerd(Signal::SIGTERM)
}

fn packaged(node: &Node, words: &[&str]) -> Result<Finished> {
    let mut command = node.command("/usr/bin/bindguard")?;
    command.args(words);
    run(command)
}

fn counts(handler: usize, programs: usize) -> Value {
    json!({ "handler_kept_for_pods": handler, "programs_kept_for_pods": programs })
}

fn kept(node: &Node, wanted: &Value) -> Result<()> {
    let status = packaged(node, &["status", "--json"])?.stdout;
    let status: Value = serde_json::from_str(&status).with_context(|| status.clone())?;
    ensure!(status["removal"] == *wanted, "{status}");
    Ok(())
}

/// Its service runs the package's program, once an operator has enabled it.
fn the_agent_is_there_and_off() -> Result<()> {
    host(["/usr/bin/bindguard-agent", "--version"])?;
    let files = host(["dpkg-query", "--listfiles", "bindguard"])?;
    let unit = files
        .lines()
        .find(|file| file.ends_with("/system/bindguard-agent.service"))
        .context("find the unit")?;
    let text = fs::read_to_string(unit).with_context(|| format!("read {unit}"))?;
    ensure!(
        text.contains("\nExecStart=/usr/bin/bindguard-agent\n"),
        "{text}"
    );
    let wanted = Path::new("/etc/systemd/system/multi-user.target.wants/bindguard-agent.service");
    ensure!(
        wanted.symlink_metadata().is_err(),
        "the package enables the agent"
    );
    for part in [
        "/man1/bindguard-agent.1",
        "/completions/bindguard-agent",
        "/_bindguard-agent",
        "/bindguard-agent.fish",
    ] {
        ensure!(files.contains(part), "no {part} in {files}");
    }
    Ok(())
}

/// The same version again is an upgrade to dpkg, too: what the operator wrote into the config
/// stays.
fn upgraded(package: &str) -> Result<()> {
    let text = fs::read_to_string(CONFIG)? + MINE;
    fs::write(CONFIG, &text)?;
    host(["dpkg", "--no-triggers", "--install", package])?;
    ensure!(
        fs::read_to_string(CONFIG)? == text,
        "the upgrade took the operator's config"
    );
    Ok(())
}

/// dpkg does not remove what is needed, says why, and has the package installed as before.
fn refused(node: &Node, why: &str) -> Result<()> {
    let mut remove = node.command("dpkg")?;
    remove.args(["--remove", "bindguard"]);
    let ended = run(remove)?;
    ensure!(
        !ended.status.success() && ended.stdout.contains(why),
        "not refused because {why:?}: {ended:?}"
    );
    ensure!(
        ended.stderr.contains("remove the package again"),
        "{ended:?}"
    );
    let state = host([
        "dpkg-query",
        "--show",
        "--showformat=${db:Status-Status}",
        "bindguard",
    ])?;
    ensure!(
        state == "installed" && Path::new("/usr/bin/bindguard-runtime").exists(),
        "{state}"
    );
    Ok(())
}

/// A pod that runs through the package's programs.
struct Pod {
    sandbox: Sandbox,
    container: RefCell<String>,
}

impl Pod {
    const WORDS: [&str; 2] = ["sleep", "1000000"];

    fn run(node: &Node) -> Result<Self> {
        let cri = node.cri()?;
        let sandbox = cri.run_pod("bindguard", "web", "uid-package")?;
        let container = RefCell::new(cri.start_container(&sandbox, "app", &Self::WORDS, &[])?);
        ensure!(
            node.shims_of(Path::new("/usr/bin/containerd-shim-bindguard-v2"))? == 1,
            "another shim"
        );
        Ok(Self { sandbox, container })
    }

    /// Its container ends and is created again, as the kubelet does.
    fn restarted(&self, node: &Node) -> Result<()> {
        let cri = node.cri()?;
        let old = self.container.borrow().clone();
        cri.stop(&old, 0)?;
        cri.remove(&old)?;
        *self.container.borrow_mut() =
            cri.start_container(&self.sandbox, "app", &Self::WORDS, &[])?;
        Ok(())
    }
}

/// Runs `install` of the package, which moves none of the package's programs.
fn configure_containerd(node: &Node) -> Result<()> {
    let mut install = node.command("/usr/bin/bindguard")?;
    install.arg("install");
    let ended = run(install)?.success()?;
    ensure!(
        ended.contains("/usr/bin/containerd-shim-bindguard-v2") && !ended.contains("create"),
        "{ended}"
    );
    Ok(())
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../config")
        .join(name)
}
