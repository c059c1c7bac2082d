//! Issue 16: `install` edits the file that the running containerd reads, and refuses to choose
//! between two of them. A command of containerd's program, such as `config dump`, is none of them.

use bindguard_integration::prelude::*;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

#[test]
fn story() {
    Setup::on(Generation::NEWEST).bare().story(|node| {
        let usual = fs::read(node.containerd_config())?;
        let (other, third) = (node.disk().join("other.toml"), node.disk().join("third.toml"));
        for file in [&other, &third] {
            let name = file.file_stem().unwrap_or_default().to_string_lossy();
            let text = format!(
                "version = 3\nroot = \"{0}/{name}\"\nstate = \"/run/{name}\"\ndisabled_plugins = [\"io.containerd.nri.v1.nri\"]\n[grpc]\n  address = \"/run/{name}.sock\"\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n",
                node.disk().display()
            );
            fs::write(file, text)?;
        }
        node.without_containerd(Signal::SIGTERM, || {
            let running = Daemon::start(node, &other, &[])?;
            let done = node.bindguard(["install"])?.success()?;
            ensure!(done.contains(&format!("+++ {}", other.display())), "not the file that containerd reads: {done}");
            ensure!(fs::read(node.containerd_config())? == usual, "the unread file was changed");
            let named = config_argument(&third);
            let noted = node.bindguard(["install", "--dry-run", &named])?;
            ensure!(noted.stdout.contains("the running containerd reads"), "no word that it is unread: {noted:?}");

            // a command that does not end: nothing ever writes to its file
            let pipe = node.disk().join("pipe.toml");
            mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR)?;
            let command = Daemon::start(node, &pipe, &["config", "dump"])?;
            let beside = node.bindguard(["install", "--dry-run"])?;
            ensure!(beside.status.success(), "a command counts as a second containerd: {beside:?}");
            drop(command);

            let second = Daemon::start(node, &third, &[])?;
            let installed = node.bindguard(["install"])?;
            ensure!(installed.code() == 2 && installed.stderr.contains("--containerd-config"), "{installed:?}");
            node.bindguard(["install", "--dry-run", &config_argument(&other)])?.success()?;
            drop((running, second));
            node.bindguard(["uninstall"])?;
            node.bindguard(["uninstall"])?.success()?;
            ensure!(!fs::read_to_string(&other)?.contains("bindguard"), "it is left in {}", other.display());
            Ok(())
        })
    });
}

fn config_argument(file: &Path) -> String {
    format!("--containerd-config={}", file.display())
}

/// A process of containerd's program with a different config file.
struct Daemon(Child);

impl Daemon {
    fn start(node: &Node, config: &Path, words: &[&str]) -> Result<Self> {
        let mut command = node.command(node.programs().join("containerd"))?;
        command
            .arg("--config")
            .arg(config)
            .args(words)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let daemon = Self(command.spawn().context("start containerd")?);
        let pid = daemon.0.id();
        until("containerd runs", || {
            Ok(fs::read_to_string(format!("/proc/{pid}/comm"))?.trim_end() == "containerd")
        })?;
        Ok(daemon)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
