//! CRI-O on a node, if CRI-O is available: no Debian suite packages CRI-O, so a variable names the
//! folder of the programs.
//!
//! Podman pulls the images, because CRI-O and Podman share containers-storage(7); pods use the
//! host's network, so no CNI plugin runs.

use std::env;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::cri::Cri;
use crate::engines::{self, write};
use crate::image;
use crate::node::Node;
use crate::process::run;
use crate::waiting::until;

const SOCKET: &str = "/run/crio/crio.sock";
const CONFIG: &str = "/etc/crio/crio.conf";

/// Why there is no CRI-O here, if so.
pub fn missing() -> Option<String> {
    let there = folder().is_some_and(|folder| {
        ["crio", "pinns"]
            .iter()
            .all(|name| folder.join(name).is_file())
    });
    let without = || {
        "no Debian suite has CRI-O: name a folder with crio and pinns in BINDGUARD_CRIO".to_owned()
    };
    engines::missing().or_else(|| (!there).then(without))
}

fn folder() -> Option<PathBuf> {
    env::var_os("BINDGUARD_CRIO").map(PathBuf::from)
}

/// CRI-O with files and images of its own.
#[derive(Debug)]
pub struct Crio<'n> {
    node: &'n Node,
    programs: PathBuf,
    daemon: Option<Child>,
}

impl<'n> Crio<'n> {
    /// Writes CRI-O's main file and adds the images; starts no process.
    pub fn on(node: &'n Node) -> Result<Self> {
        let crio = Self {
            node,
            programs: folder().context("BINDGUARD_CRIO")?,
            daemon: None,
        };
        write(CONFIG, &crio.config())?;
        write(
            "/etc/containers/policy.json",
            r#"{"default":[{"type":"insecureAcceptAnything"}]}"#,
        )?;
        let layer = node.disk().join("layer.tar");
        image::write_layer(&layer)?;
        for (name, command) in [(image::BUSYBOX, "sh"), (image::PAUSE, "sleep 1000000000")] {
            let mut import = node.command(engines::program("podman"))?;
            import.arg("--conmon").arg(engines::program("conmon"));
            import
                .args([
                    "--storage-driver",
                    "vfs",
                    "--runroot",
                    "/run/crio-storage",
                    "--root",
                ])
                .arg(crio.storage());
            let command = format!("CMD {command}");
            import
                .args([
                    "import",
                    "--quiet",
                    "--change",
                    &command,
                    "--change",
                    "ENV PATH=/bin",
                ])
                .arg(&layer)
                .arg(name);
            run(import)?.success()?;
        }
        Ok(crio)
    }

    /// The effective configuration, drop-ins included, as CRI-O prints it.
    pub fn effective_config(&self) -> Result<String> {
        let mut config = self.command()?;
        config.arg("config");
        run(config)?.success()
    }

    /// Starts CRI-O, again if it runs; returns a new client.
    pub fn restart(&mut self) -> Result<Cri> {
        self.stop();
        let log = File::create(self.node.disk().join("crio.log")).context("create crio's log")?;
        let mut command = self.command()?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.daemon = Some(command.spawn().context("start crio")?);
        let log = || fs::read_to_string(self.node.disk().join("crio.log")).unwrap_or_default();
        // the socket exists before it has a listener
        until("crio listens", || Ok(UnixStream::connect(SOCKET).is_ok())).with_context(log)?;
        Cri::connect(SOCKET, self.node.name().to_owned()).with_context(log)
    }

    fn command(&self) -> Result<Command> {
        let mut command = self.node.command(self.programs.join("crio"))?;
        command.args(["--config", CONFIG, "--config-dir", "/etc/crio/crio.conf.d"]);
        Ok(command)
    }

    fn storage(&self) -> PathBuf {
        self.node.disk().join("crio")
    }

    fn config(&self) -> String {
        let (disk, bin) = (self.node.disk().display(), self.node.programs());
        format!(
            "[crio]\nroot = {:?}\nrunroot = \"/run/crio-storage\"\nstorage_driver = \"vfs\"\nlog_dir = \"{disk}/crio-logs\"\n\
             version_file = \"/run/crio/version\"\nversion_file_persist = \"\"\nclean_shutdown_file = \"\"\n\
             [crio.api]\nlisten = {SOCKET:?}\nstream_port = \"0\"\n\
             [crio.runtime]\ndisable_hostport_mapping = true\nconmon_cgroup = \"pod\"\ncgroup_manager = \"cgroupfs\"\npinns_path = {:?}\napparmor_profile = \"unconfined\"\n\
             namespaces_dir = \"/run/crio-namespaces\"\ncontainer_exits_dir = \"/run/crio-exits\"\ndefault_runtime = \"runc\"\n\
             container_attach_socket_dir = \"/run/crio-attach\"\n\
             [crio.runtime.runtimes.runc]\nruntime_path = {:?}\nruntime_type = \"oci\"\nruntime_root = \"/run/crio-runc\"\nmonitor_path = {:?}\n\
             [crio.image]\npause_image = {:?}\npause_command = \"\"\n[crio.network]\nnetwork_dir = \"{disk}/cni\"\nplugin_dirs = [\"{disk}/cni\"]\n\
             [crio.nri]\nenable_nri = false\n",
            self.storage(),
            self.programs.join("pinns"),
            bin.join("runc"),
            engines::program("conmon"),
            image::PAUSE,
        )
    }

    fn stop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
            let _ = fs::remove_file(SOCKET);
        }
    }
}

impl Drop for Crio<'_> {
    fn drop(&mut self) {
        self.stop();
    }
}
