//! The config file, the program and the restart command of a node's containerd.
//!
//! A running containerd's arguments decide, then its unit, then the files that distributions write.
//! The default path comes last: an edit of a file that containerd does not read would report
//! success and change nothing.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::distribution::Distribution;
use super::unit;
use crate::running::{Daemon, containerds};
use crate::search_path::SearchPath;

const DEFAULT: &str = "/etc/containerd/config.toml";
/// The files that distributions generate for containerd.
const GENERATED: [&str; 4] = [
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/k0s/containerd.toml",
];

/// A node's containerd.
pub struct ContainerdLayout {
    /// The distribution that owns containerd's files.
    pub distribution: Distribution,
    /// The file that it reads.
    pub config: PathBuf,
    /// The program of the running containerd.
    pub program: Option<PathBuf>,
    /// The command after which containerd reads its files again.
    pub restart: String,
    /// The config file of the running containerd, if it differs from `config`.
    pub unread: Option<PathBuf>,
    daemon: Option<Daemon>,
}

impl ContainerdLayout {
    /// The containerd that serves pods in this root, or the containerd that reads the named file.
    ///
    /// # Errors
    /// If several containerds run and no file is named.
    pub fn detect(named: Option<&Path>) -> Result<Self> {
        let root = Path::new("/");
        let running = containerds();
        let reads = |daemon: &Daemon| daemon.config().unwrap_or_else(|| DEFAULT.into());
        let daemon = match (named, running.as_slice()) {
            (Some(named), _) => running
                .iter()
                .find(|daemon| reads(daemon) == named)
                .or(running.first()),
            (None, [] | [_]) => running.first(),
            (None, [first, second, ..]) => bail!(
                "choose a containerd: process {} reads {} and process {} reads {}; name one of the files with --containerd-config",
                first.pid,
                reads(first).display(),
                second.pid,
                reads(second).display()
            ),
        };
        let of_daemon = daemon.map(reads);
        let config = named
            .map(Path::to_owned)
            .or(of_daemon.clone())
            .unwrap_or_else(|| config_of_files(root));
        let distribution = Distribution::of(root, &config);
        Ok(Self {
            distribution,
            program: daemon
                .and_then(Daemon::program)
                .filter(|program| program.symlink_metadata().is_ok()),
            restart: format!("systemctl restart {}", service(root, distribution, daemon)),
            unread: of_daemon.filter(|read| *read != config),
            config,
            daemon: daemon.cloned(),
        })
    }

    /// True if the distribution generates this file anew at each start.
    pub fn is_generated(&self, file: &Path) -> bool {
        use Distribution::{K0s, K3s, Microk8s, Rke2};
        file == self.config && matches!(self.distribution, K3s | Rke2 | Microk8s | K0s)
    }

    /// The folders in which this containerd searches shims and runtimes.
    pub fn search_path(&self, program: &Path) -> SearchPath {
        let path = self.daemon.as_ref().and_then(Daemon::search_path);
        SearchPath::of(path, Some(program))
    }
}

/// The file that a containerd would read if it were started.
fn config_of_files(root: &Path) -> PathBuf {
    let below = |path: &&str| root.join(&path[1..]).symlink_metadata().is_ok();
    let generated = GENERATED.iter().find(|path| below(path)).map(PathBuf::from);
    generated
        .or_else(|| unit::config_of(root, "containerd"))
        .unwrap_or_else(|| DEFAULT.into())
}

/// The service of the running containerd, or of the distribution if there is such a unit.
fn service(root: &Path, distribution: Distribution, daemon: Option<&Daemon>) -> String {
    let known = distribution.services();
    // a test's own containerd, for example, must not restart the node's service
    let is_known =
        |service: &String| known.contains(&service.as_str()) || service.contains("containerd");
    let running = daemon.and_then(Daemon::service).filter(is_known);
    let with_unit = || known.iter().find(|service| unit::exists(root, service));
    running.unwrap_or_else(|| (*with_unit().or(known.last()).unwrap_or(&"containerd")).to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use super::*;

    fn root_with(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        root
    }

    #[test]
    fn without_a_daemon_the_files_of_a_distribution_come_before_the_default() {
        for (file, config, restarted) in [
            ("etc/systemd/system/k3s.service", GENERATED[0], "k3s"),
            (
                "etc/systemd/system/k3s-agent.service",
                GENERATED[0],
                "k3s-agent",
            ),
            (
                "usr/local/lib/systemd/system/rke2-server.service",
                GENERATED[1],
                "rke2-server",
            ),
            ("etc/k0s/k0s.yaml", GENERATED[3], "k0scontroller"),
            (
                "var/snap/microk8s/current/args/kubelet",
                GENERATED[2],
                "snap.microk8s.daemon-containerd",
            ),
        ] {
            let root = root_with(&[file, &config[1..]]);
            assert_eq!(config_of_files(root.path()), Path::new(config));
            let distribution = Distribution::of(root.path(), Path::new(config));
            assert_eq!(service(root.path(), distribution, None), restarted);
        }
        let plain = root_with(&["usr/lib/systemd/system/containerd.service"]);
        assert_eq!(config_of_files(plain.path()), Path::new(DEFAULT));
        assert_eq!(
            service(plain.path(), Distribution::Plain, None),
            "containerd"
        );
    }
}
