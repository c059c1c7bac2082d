//! A user of the node chooses names: of a process, a program, a folder. Root neither runs nor
//! believes what carries such a name.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use bindguard_integration::process::{Finished, host, run, write_program};
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Setup};
use nix::sys::signal::Signal;
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
    Setup::on(Generation::V2_1).cri().bare().story(|node| {
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
    Setup::on(Generation::V2_1).cri().bare().story(|node| {
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
