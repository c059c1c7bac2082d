//! A user of the node chooses names: of a process, a program, a folder. Root neither runs nor
//! believes what carries such a name.

use bindguard_integration::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use bindguard_integration::privilege::{has_program, skipped};
use bindguard_integration::process::{LIMIT, run_with_input};
use nix::unistd::chown;

const DAEMONS: [&str; 5] = [
    "containerd",
    "dockerd",
    "crio",
    "bindguard-agent",
    "containerd-shim",
];

/// The programs of a user that are older than containerd: `doctor` and the installer look for the
/// oldest process of a name. Each would note who runs it, and then never end.
#[test]
fn processes_with_the_names_of_daemons() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let eve = Eve::of(node)?;
        let mut processes = Vec::new();
        node.without_containerd(Signal::SIGTERM, || {
            for name in DAEMONS {
                processes.push(eve.start(name)?);
                eve.replace(name)?;
            }
            eve.nothing_ran("status", &node.bindguard(["status"])?)?;
            eve.nothing_ran("install", &node.bindguard(["install"])?)
        })?;
        let config = node.containerd_config().display().to_string();
        for words in [
            &["doctor"][..],
            &["status"],
            &["install", "--dry-run", "--containerd-config", &config],
            &["install", "--default"],
        ] {
            eve.nothing_ran(&words.join(" "), &node.bindguard(words)?)?;
        }
        node.restart_containerd(Signal::SIGTERM)?;
        let doctor = node.bindguard(["doctor"])?;
        ensure!(
            doctor.stdout.contains("ok         containerd"),
            "{doctor:?}"
        );
        let status = node.bindguard(["status"])?;
        ensure!(
            status
                .stdout
                .contains("containerd runs bindguard, for every new pod")
                && !status.stdout.contains("dockerd")
                && !status.stdout.contains("unguarded"),
            "{status:?}"
        );

        // a user who runs an installed program needs no program
        let program = Path::new("/usr/local/bin/bindguard");
        processes.push(eve.run(program, &["hook", "precreate"])?);
        node.bindguard(["uninstall"])?;
        node.restart_containerd(Signal::SIGTERM)?;
        node.cri()?;
        let done = node.bindguard(["uninstall"])?;
        eve.nothing_ran("uninstall", &done)?;
        done.success()?;
        ensure!(
            !fs::exists("/usr/local/lib/bindguard")?,
            "programs are left"
        );
        Ok(())
    });
}

/// Root's `PATH` begins with a folder of a user, or root names the user's program.
#[test]
fn programs_in_folders_of_users() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let eve = Eve::of(node)?;
        for name in [
            "containerd",
            "runc",
            "systemctl",
            "containerd-shim-bindguard-v2",
        ] {
            eve.replace(name)?;
        }
        let first = |words: &[&str]| {
            let mut command = node.command(node.under_test().join("bindguard"))?;
            let path = node.environment().find(|(name, _)| *name == "PATH");
            let path = path.map(|(_, path)| path).context("PATH")?;
            command
                .args(words)
                .env("PATH", format!("{}:{path}", eve.home.display()));
            run(command)
        };
        for words in [
            &["doctor"][..],
            &["install", "--restart"],
            &["uninstall", "--restart"],
        ] {
            eve.nothing_ran(&words.join(" "), &first(words)?)?;
        }
        node.without_containerd(Signal::SIGTERM, || {
            eve.nothing_ran("install", &first(&["install"])?)
        })?;
        // the programs belong to root, and the folder does not
        let program = eve.home.join("containerd");
        chown(&program, Some(0.into()), Some(0.into()))?;
        let named = format!("--containerd={}", program.display());
        let refused = node.bindguard(["install", "--dry-run", "--default", &named])?;
        eve.nothing_ran(&named, &refused)?;
        let home = eve.home.display();
        ensure!(
            refused.code() == 2
                && refused
                    .stderr
                    .contains(&format!("{home} belongs to user 65534")),
            "{refused:?}"
        );
        Ok(())
    });
}

/// containerd's file may have the password of a registry. `install` tries an edit on copies of the
/// file. A program in the place of containerd shows the copies, and kills the installer.
#[test]
fn copies_of_containerds_config() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let main = node.disk().join("config.toml");
        fs::write(&main, "version = 3\n")?;
        fs::set_permissions(&main, Permissions::from_mode(0o600))?;
        let (program, seen) = (node.disk().join("observer"), node.disk().join("seen"));
        let real = node.programs().join("containerd").display().to_string();
        let observe = |then: &str| {
            let script = format!(
                "#!/bin/sh\ncase $1 in --config) stat -c '%a %u %n' \"$2\" \"${{2%/*}}\" >> {}; {then} ;; esac\nexec {real} \"$@\"\n",
                seen.display()
            );
            write_program(&program, &script)
        };
        let install = || {
            let line = format!(
                "umask 000; exec {} install --dry-run --containerd={} --containerd-config={}",
                node.under_test().join("bindguard").display(),
                program.display(),
                main.display()
            );
            let mut shell = node.command("sh")?;
            shell.args(["-c", &line]);
            run(shell)
        };
        observe("")?;
        ensure!(install()?.code() == 1, "no change is planned");
        let lines = fs::read_to_string(&seen)?;
        ensure!(lines.lines().count() >= 4, "the edit was not tried: {lines}");
        for line in lines.lines() {
            let is_private = line.starts_with("600 0 /run/") || line.starts_with("700 0 /run/");
            ensure!(is_private, "{line}");
        }
        // the copies of a killed installer go with the next call
        observe("kill -9 $PPID")?;
        ensure!(install()?.code() == 137, "the installer was not killed");
        let copies = || -> Result<Vec<PathBuf>> {
            let mut found = Vec::new();
            for folder in ["/run", &node.disk().join("tmp").display().to_string()] {
                for entry in fs::read_dir(folder)? {
                    let path = entry?.path();
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    if name.trim_start_matches('.').starts_with("bindguard-") {
                        found.push(path.clone());
                    }
                }
            }
            Ok(found)
        };
        ensure!(copies()?.len() == 1, "{:?}", copies()?);
        observe("")?;
        install()?;
        ensure!(copies()?.is_empty(), "{:?}", copies()?);
        Ok(())
    });
}

/// A hook gets a spec, with the secrets of its environment.
#[test]
fn the_spec_of_a_hook() {
    if !has_program("strace") {
        return skipped("no strace");
    }
    Setup::on(Generation::NEWEST).story(|node| {
        let calls = node.disk().join("calls");
        let line = format!(
            "umask 000; exec strace -f -e trace=mkdir,mkdirat,open,openat -o {} {} hook precreate",
            calls.display(),
            node.under_test().join("bindguard").display()
        );
        let mut shell = node.command("sh")?;
        shell.args(["-c", &line]);
        let spec =
            "{\"ociVersion\":\"1.0.2\",\"process\":{\"env\":[\"PASSWORD=x\"]},\"mounts\":[]}";
        run_with_input(shell, spec, LIMIT)?.success()?;
        let calls = fs::read_to_string(&calls)?;
        let made = calls.lines().filter(|line| {
            line.contains("bindguard-") && (line.contains("mkdir") || line.contains("O_CREAT"))
        });
        let mut count = 0;
        for line in made {
            let is_private = line.contains(", 0700)") || line.contains(", 0600)");
            ensure!(is_private && line.contains("\"/run/"), "{line}");
            count += 1;
        }
        ensure!(count >= 2, "no folder and no file: {calls}");
        Ok(())
    });
}

/// The modes of everything that is made do not depend on the umask of a shell.
#[test]
fn modes_whatever_the_umask() {
    for umask in ["000", "027", "077"] {
        Setup::on(Generation::NEWEST).cri().bare().story(|node| {
            let under = |program: &str, words: &str| {
                let program = node.under_test().join(program).display().to_string();
                let mut shell = node.command("sh")?;
                shell.args(["-c", &format!("umask {umask}; exec {program} {words}")]);
                Ok::<_, anyhow::Error>(shell)
            };
            run(under(
                "bindguard",
                "install docker containerd --default --agent",
            )?)?
            .success()?;
            let pod = node.kubelet().pod("uid-umask")?;
            let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
            let subpath = volume.subpath("app", 0, "app.conf");
            subpath.bind()?;
            volume.update(&[("app.conf", "two")])?;
            run(under("bindguard", "repair --all")?)?;
            let config = node.disk().join("bindguard.toml");
            let mut agent = under("bindguard-agent", "")?
                .env("BINDGUARD_CONFIG", config)
                .spawn()?;
            until("the agent listens", || {
                Ok(fs::exists("/run/bindguard/agent.sock")?)
            })?;
            agent.kill()?;
            agent.wait()?;

            let mut found = Vec::new();
            for folder in [
                "/usr/local/lib/bindguard",
                "/etc/bindguard",
                "/etc/docker",
                "/etc/systemd/system/multi-user.target.wants",
                "/var/lib/bindguard",
                "/run/bindguard",
            ] {
                below(Path::new(folder), &mut found)?;
            }
            found.push("/etc/systemd/system/bindguard-agent.service".into());
            ensure!(found.len() > 20, "{found:?}");
            for path in &found {
                let metadata = path.symlink_metadata()?;
                let mode = metadata.permissions().mode() & 0o7777;
                let text = path.display().to_string();
                let wanted: &[u32] = if metadata.is_symlink() {
                    continue;
                } else if metadata.is_dir() {
                    &[0o755, 0o700]
                } else if text.contains("/lib/bindguard/") && !text.starts_with("/var/lib") {
                    &[0o755]
                } else if text.starts_with("/run") || text.starts_with("/var/lib") {
                    &[0o600, 0o640, 0o644]
                } else {
                    &[0o644]
                };
                ensure!(
                    wanted.contains(&mode),
                    "umask {umask}: {text} has mode {mode:o}"
                );
            }
            let mut user = node.command("setpriv")?;
            user.args(["--reuid=65534", "--regid=65534", "--clear-groups"])
                .args(["/usr/local/bin/bindguard-runtime", "--version"]);
            run(user)?.success()?;
            node.bindguard(["uninstall"])?;
            pod.delete()
        });
    }
}

fn below(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    found.push(folder.to_owned());
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            below(&entry.path(), found)?;
        } else {
            found.push(entry.path());
        }
    }
    Ok(())
}

const RECORD: &str = "/var/lib/bindguard/install.json";

/// A user who could write the record would choose the files that root's `uninstall` writes.
#[test]
fn a_record_that_a_user_could_write() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let sudoers = Path::new("/etc/sudoers.d/eve");
        fs::create_dir_all("/etc/sudoers.d")?;
        node.bindguard(["install", "docker"])?.success()?;
        let record: Value = serde_json::from_str(&fs::read_to_string(RECORD)?)?;
        let secret = "eve ALL=(ALL) NOPASSWD: ALL\n";
        fs::write("/var/lib/bindguard/secret", secret)?;
        let digest = host(["sha256sum", "/var/lib/bindguard/secret"])?;
        let digest = digest.split(' ').next().context("a hash")?;
        fs::create_dir_all("/var/lib/bindguard/originals")?;
        fs::rename(
            "/var/lib/bindguard/secret",
            Path::new("/var/lib/bindguard/originals").join(digest),
        )?;

        let folder = Path::new("/var/lib/bindguard");
        for (path, owner, mode, said) in [
            (RECORD, 65534, 0o600, "install.json belongs to user 65534"),
            (RECORD, 0, 0o666, "install.json can be written by others"),
            ("/var/lib/bindguard", 65534, 0o755, "/var/lib/bindguard belongs to user 65534"),
            ("/var/lib/bindguard", 0, 0o777, "/var/lib/bindguard can be written by others"),
        ] {
            chown(path, Some(owner.into()), None)?;
            fs::set_permissions(path, Permissions::from_mode(mode))?;
            for words in [&["uninstall"][..], &["install", "docker"], &["status"], &["doctor"]] {
                let refused = node.bindguard(words)?;
                let said_it = refused.stderr.contains(said) || refused.stdout.contains(said);
                ensure!(refused.code() != 0 && said_it, "{words:?}: {refused:?}");
            }
            chown(path, Some(0.into()), None)?;
            fs::set_permissions(path, Permissions::from_mode(if path == RECORD { 0o600 } else { 0o755 }))?;
        }

        // root's own record with files that no install writes
        let mut forged = record;
        let entry = |owner: &str, path: &str| {
            json!({ "owner": owner, "path": path, "original": digest, "written": "0", "command": "touch /etc/sudoers.d/ran" })
        };
        let files = forged["files"].as_array_mut().context("files")?;
        files.insert(0, entry("containerd", "/etc/sudoers.d/eve"));
        files.push(entry("bindguard", "/etc/sudoers.d/eve"));
        files.push(json!({ "owner": "nobody", "path": "/etc/sudoers.d/eve" }));
        files.push(entry("docker", "/etc/docker/../sudoers.d/eve"));
        forged["owed"] = json!([{ "owner": "docker", "command": "touch /etc/sudoers.d/ran" }]);
        fs::write(RECORD, forged.to_string())?;
        fs::write(sudoers, "")?;
        let done = node.bindguard(["uninstall", "--restart"])?;
        ensure!(
            done.code() == 1 && done.stdout.matches("/etc/sudoers.d/eve").count() >= 2,
            "{done:?}"
        );
        ensure!(fs::read_to_string(sudoers)?.is_empty(), "root wrote what the record says");
        ensure!(!fs::exists("/etc/sudoers.d/ran")?, "root ran what the record says");
        for path in ["/etc/docker/daemon.json", "/usr/local/lib/bindguard", "/etc/bindguard"] {
            ensure!(!fs::exists(path)?, "{path} is left: {done:?}");
        }
        let status = node.bindguard(["status"])?;
        ensure!(status.stdout.contains("/etc/sudoers.d/eve"), "{status:?}");
        ensure!(fs::exists(folder)?, "the record is gone, and its entries are not");
        Ok(())
    });
}

/// A user with a folder. The programs in the folder note the uid of each process that runs them.
struct Eve {
    home: PathBuf,
    node: String,
}

/// A process of the user.
struct Running(Child);

impl Eve {
    fn of(node: &Node) -> Result<Self> {
        let home = node.disk().join("eve");
        fs::create_dir(&home)?;
        fs::set_permissions(&home, Permissions::from_mode(0o777))?;
        chown(&home, Some(65534.into()), Some(65534.into()))?;
        Ok(Self {
            home,
            node: node.name().to_owned(),
        })
    }

    /// Starts a process with this name, and with arguments as a daemon has them.
    fn start(&self, name: &str) -> Result<Running> {
        let program = self.home.join(name);
        host(["cp".as_ref(), "/bin/sleep".as_ref(), program.as_os_str()])?;
        chown(&program, Some(65534.into()), Some(65534.into()))?;
        self.run(&program, &["1000000"])
    }

    fn run(&self, program: &Path, words: &[&str]) -> Result<Running> {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let child = command.spawn().context("start a process of the user")?;
        let name = program.file_name().context("its name")?.to_string_lossy();
        let comm = format!("/proc/{}/comm", child.id());
        until(&format!("{name} runs on {}", self.node), || {
            Ok(fs::read_to_string(&comm)?.trim() == &name[..name.len().min(15)])
        })?;
        Ok(Running(child))
    }

    /// Puts a program that root must not run into the place.
    fn replace(&self, name: &str) -> Result<()> {
        let (program, new) = (self.home.join(name), self.home.join("new"));
        let script = format!(
            "#!/bin/sh\nid -u >> {}/ran\nexec sleep 1000000\n",
            self.home.display()
        );
        write_program(&new, &script)?;
        chown(&new, Some(65534.into()), Some(65534.into()))?;
        fs::rename(new, program).context("replace the program")
    }

    fn nothing_ran(&self, words: &str, ended: &Finished) -> Result<()> {
        let ran = fs::read_to_string(self.home.join("ran")).unwrap_or_default();
        ensure!(
            ran.is_empty(),
            "{words}: uid {ran} ran a program of a user: {ended:?}"
        );
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
