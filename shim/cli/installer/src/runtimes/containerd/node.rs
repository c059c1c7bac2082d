//! A node's containerd: its config file, program and restart command, and the Kubernetes distribution.
//!
//! A running containerd's arguments decide, then its unit, then the files that distributions write.
//! The default path comes last: an edit of a file that containerd does not read would report
//! success and change nothing. Some distributions write containerd's files themselves.
//!
//! docs/distributions.md has the table for operators.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use bindguard_core::handover::{RUNTIME, SHIM};
use bindguard_operator::doctor::{os_release, os_release_value};

use crate::change::read_text;
use crate::running::{Daemon, containerds, option};

const DEFAULT: &str = "/etc/containerd/config.toml";
/// The files that distributions generate for containerd.
const GENERATED: [&str; 4] = [
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/k0s/containerd.toml",
];

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
    pub daemon: Option<Daemon>,
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
            (None, [first, second, ..]) => bail!(
                "choose a containerd: process {} reads {} and process {} reads {}; name one of the files with --containerd-config",
                first.pid,
                reads(first).display(),
                second.pid,
                reads(second).display()
            ),
            (named, _) => {
                let mut daemons = running.iter();
                let of_file = daemons.find(|daemon| Some(&*reads(daemon)) == named);
                of_file.or(running.first())
            }
        };
        let of_daemon = daemon.map(reads);
        let config = match named {
            Some(config) => config.to_owned(),
            None => of_daemon.clone().unwrap_or_else(|| config_of_files(root)),
        };
        let distribution = Distribution::of(root, &config);
        let program = daemon.and_then(Daemon::program);
        Ok(Self {
            distribution,
            program: program.filter(|program| program.symlink_metadata().is_ok()),
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
}

/// The file that a containerd would read if it were started.
fn config_of_files(root: &Path) -> PathBuf {
    for path in GENERATED {
        if root.join(&path[1..]).symlink_metadata().is_ok() {
            return PathBuf::from(path);
        }
    }
    config_of_unit(root).unwrap_or_else(|| DEFAULT.into())
}

/// The service of the running containerd, or of the distribution if there is such a unit.
fn service(root: &Path, distribution: Distribution, daemon: Option<&Daemon>) -> String {
    let (_, known) = distribution.name_and_services();
    if let Some(service) = daemon.and_then(Daemon::service) {
        // a test's own containerd, for example, must not restart the node's service
        if known.contains(&service.as_str()) || service.contains("containerd") {
            return service;
        }
    }
    let with_unit = known.iter().find(|service| unit_exists(root, service));
    (*with_unit.unwrap_or(&known[known.len() - 1])).to_owned()
}

/// A distribution that keeps containerd's files in its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distribution {
    /// containerd's own layout: Debian, Ubuntu, kubeadm, AKS, kind.
    Plain,
    /// k3s: generates config.toml from a template at each start.
    K3s,
    /// RKE2: as k3s.
    Rke2,
    /// MicroK8s: generates containerd.toml from a template at each start.
    Microk8s,
    /// k0s: merges the files of a folder at each start.
    K0s,
    /// Talos: read-only, configured by its machine config.
    Talos,
    /// Bottlerocket: read-only, configured by its settings.
    Bottlerocket,
    /// Flatcar: a read-only default file.
    Flatcar,
    /// Amazon Linux 2023 for EKS: nodeadm writes config.toml at each boot.
    EksAl2023,
    /// Google's Container-Optimized OS.
    GkeCos,
}

impl Distribution {
    /// The distribution of the node, by the file that its containerd reads, and by os-release(5).
    pub fn of(root: &Path, config: &Path) -> Self {
        let text = config.to_string_lossy();
        let release = os_release(root);
        let value = |name: &str| os_release_value(&release, name).unwrap_or_default();
        match value("ID").as_str() {
            _ if text.contains("/k3s/agent/etc/containerd/") => Self::K3s,
            _ if text.contains("/rke2/agent/etc/containerd/") => Self::Rke2,
            _ if text.starts_with("/var/snap/microk8s/") => Self::Microk8s,
            _ if text.starts_with("/etc/k0s/") || text.starts_with("/run/k0s/") => Self::K0s,
            "talos" => Self::Talos,
            "bottlerocket" => Self::Bottlerocket,
            "flatcar" if text.starts_with("/usr/share/") => Self::Flatcar,
            "amzn"
                if value("VERSION_ID") == "2023"
                    && root.join("etc/eks").symlink_metadata().is_ok() =>
            {
                Self::EksAl2023
            }
            "cos" => Self::GkeCos,
            _ => Self::Plain,
        }
    }

    /// The name, and the services that may start the distribution's containerd, the most likely first.
    pub fn name_and_services(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Plain => ("plain containerd", &["containerd"]),
            Self::K3s => ("k3s", &["k3s-agent", "k3s"]),
            Self::Rke2 => ("RKE2", &["rke2-agent", "rke2-server"]),
            Self::Microk8s => ("MicroK8s", &["snap.microk8s.daemon-containerd"]),
            Self::K0s => ("k0s", &["k0sworker", "k0scontroller"]),
            Self::Talos => ("Talos", &["containerd"]),
            Self::Bottlerocket => ("Bottlerocket", &["containerd"]),
            Self::Flatcar => ("Flatcar", &["containerd"]),
            Self::EksAl2023 => ("EKS on Amazon Linux 2023", &["containerd"]),
            Self::GkeCos => ("GKE on Container-Optimized OS", &["containerd"]),
        }
    }

    /// Why an edit of its files would not last, and what to do instead. `None` if `install` can do
    /// it.
    pub fn instruction(self) -> Option<(&'static str, String)> {
        let (why, advice) = match self {
            Self::Talos => (
                "it has a read-only root and configures containerd from its machine config",
                TALOS,
            ),
            Self::Bottlerocket => (
                "it has a read-only root, and mounts /etc/containerd noexec from memory",
                BOTTLEROCKET,
            ),
            Self::Flatcar => ("its containerd reads a file on the read-only /usr", FLATCAR),
            Self::GkeCos => ("GKE creates the node's files and recreates its nodes", COS),
            // for EKS, the instruction depends on the file that nodeadm wrote: `node_config`
            Self::EksAl2023 | Self::Plain | Self::K3s | Self::Rke2 | Self::Microk8s | Self::K0s => {
                return None;
            }
        };
        let advice = advice.replace("RUNTIME", RUNTIME).replace("SHIM", SHIM);
        Some((why, advice))
    }
}

/// The instruction for EKS, whose nodeadm merges a fragment of the user data into containerd's
/// file. The fragment has the plugin's name of that file's version, and every option of the runtime
/// that nodeadm chose for the node.
pub fn node_config(fragment: &str, prefix: &Path, file: &Path) -> String {
    let mut lines = Vec::new();
    for line in fragment.trim().lines() {
        lines.push(match line {
            "" => String::new(),
            line => format!("      {line}"),
        });
    }
    EKS.replace("PREFIX", &prefix.display().to_string())
        .replace("FILE", &file.display().to_string())
        .replace("FRAGMENT", &lines.join("\n"))
}

/// The steps where a program writes containerd's file from a template at each start.
pub fn of_template(
    layout: &ContainerdLayout,
    template: &Path,
    table: &str,
    default: Option<&str>,
) -> String {
    let (name, _) = layout.distribution.name_and_services();
    let restart = &layout.restart;
    let file = template.display();
    let mut text = format!(
        "# {name} writes containerd's file from a template at each start. Add these lines to the end of\n# {file}"
    );
    let is_microk8s = layout.distribution == Distribution::Microk8s;
    if !is_microk8s {
        text += ", and begin a new file with the line {{ template \"base\" . }}";
    }
    text += &format!("\n{table}");
    text += &match default {
        Some(default) if is_microk8s => {
            format!("# Change default_runtime_name in that file to {default:?}.\n")
        }
        Some(default) => {
            format!("# Put `default-runtime: {default}` into config.yaml of /etc/rancher.\n")
        }
        None => String::new(),
    };
    text + &format!("# Then: {restart}\n")
}

const TALOS: &str = r#"# Build a system extension with the programs in /usr/local/bin, and apply this patch of the machine config:
machine:
  files:
    - path: /etc/cri/conf.d/20-customization.part
      op: create
      content: |
        [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.RUNTIME]
          runtime_type = "io.containerd.runc.v2"
          runtime_path = "/usr/local/bin/SHIM"
          [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.RUNTIME.options]
            SystemdCgroup = true
"#;

const BOTTLEROCKET: &str = r#"# Build the node image with the programs in /usr/bin, and with this in its template of containerd's config:
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.RUNTIME]
  runtime_type = "io.containerd.runc.v2"
  runtime_path = "/usr/bin/SHIM"
  base_runtime_spec = "/etc/containerd/cri-base.json"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.RUNTIME.options]
    SystemdCgroup = true
"#;

const FLATCAR: &str = r#"# Give containerd a file that can be edited, then run `bindguard install` again:
mkdir -p /etc/containerd /etc/systemd/system/containerd.service.d
cp /usr/share/containerd/config.toml /etc/containerd/config.toml
printf '[Service]\nEnvironment=CONTAINERD_CONFIG=/etc/containerd/config.toml\nExecStart=\nExecStart=/usr/bin/containerd --config /etc/containerd/config.toml\n' > /etc/systemd/system/containerd.service.d/10-config.conf
systemctl daemon-reload
systemctl restart containerd
"#;

const EKS: &str = r#"# Add this to the node's user data, with the programs in PREFIX of the node image:
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  containerd:
    config: |
FRAGMENT
# To edit the file until the next boot: bindguard install --containerd-config FILE
"#;

const COS: &str = r#"# GKE supports no further runtime on these nodes. Use a node pool with Ubuntu nodes (`--image-type UBUNTU_CONTAINERD`).
"#;

/// The folders of units, with descending precedence.
const FOLDERS: [&str; 5] = [
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];

/// True if there is a service of this name.
pub fn unit_exists(root: &Path, service: &str) -> bool {
    let unit = format!("{service}.service");
    FOLDERS
        .iter()
        .any(|folder| root.join(folder).join(&unit).symlink_metadata().is_ok())
}

/// The file that `--config` names in the command of containerd's service.
fn config_of_unit(root: &Path) -> Option<PathBuf> {
    let text = unit_text(root);
    let mut command = String::new();
    let mut variables = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(line) = line.strip_prefix("Environment=") {
            let words = line.split_whitespace();
            variables.extend(words.filter_map(|word| word.trim_matches('"').split_once('=')));
        }
        if let Some(last) = line.strip_prefix("ExecStart=")
            && !last.is_empty()
        {
            last.clone_into(&mut command);
        }
    }
    for (name, value) in variables {
        command = command
            .replace(&format!("${{{name}}}"), value)
            .replace(&format!("${name}"), value);
    }
    let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    option(&words, &["config", "c"]).map(PathBuf::from)
}

/// The unit, and then its drop-ins in the order of their names.
fn unit_text(root: &Path) -> String {
    let mut unit = None;
    let mut drop_ins = Vec::new();
    for folder in FOLDERS.map(|folder| root.join(folder)) {
        unit = unit.or_else(|| read_text(&folder.join("containerd.service")).ok()?);
        let folder = folder.join("containerd.service.d");
        for entry in folder.read_dir().into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|it| it == "conf") {
                drop_ins.push(path);
            }
        }
    }
    drop_ins.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
    let mut text = unit.unwrap_or_default();
    for path in drop_ins {
        text.push('\n');
        text += &read_text(&path).ok().flatten().unwrap_or_default();
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]
    use super::*;
    use std::fs;

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

    fn with(release: &str, config: &str) -> Distribution {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("etc/eks")).unwrap();
        fs::write(root.path().join("etc/os-release"), release).unwrap();
        Distribution::of(root.path(), Path::new(config))
    }

    #[test]
    fn each_distribution_is_detected() {
        let usual = "/etc/containerd/config.toml";
        for (release, config, expected) in [
            ("ID=debian\n", usual, Distribution::Plain),
            (
                "ID=ubuntu\n",
                "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
                Distribution::K3s,
            ),
            (
                "ID=ubuntu\n",
                "/data/rke2/agent/etc/containerd/config.toml",
                Distribution::Rke2,
            ),
            (
                "ID=ubuntu\n",
                "/var/snap/microk8s/6641/args/containerd.toml",
                Distribution::Microk8s,
            ),
            ("ID=debian\n", "/etc/k0s/containerd.toml", Distribution::K0s),
            ("NAME=\"Talos\"\nID=talos\n", usual, Distribution::Talos),
            ("ID=bottlerocket\n", usual, Distribution::Bottlerocket),
            (
                "ID=flatcar\n",
                "/usr/share/containerd/config.toml",
                Distribution::Flatcar,
            ),
            ("ID=flatcar\n", usual, Distribution::Plain),
            (
                "ID=\"amzn\"\nVERSION_ID=\"2023\"\n",
                usual,
                Distribution::EksAl2023,
            ),
            (
                "ID=\"amzn\"\nVERSION_ID=\"2\"\n",
                usual,
                Distribution::Plain,
            ),
            ("ID=cos\n", usual, Distribution::GkeCos),
        ] {
            assert_eq!(with(release, config), expected, "{release} with {config}");
        }
    }

    #[test]
    fn every_fragment_names_the_runtime_and_the_shim() {
        for distribution in [Distribution::Talos, Distribution::Bottlerocket] {
            let advice = distribution.instruction().unwrap().1;
            assert!(
                advice.contains("containerd.runtimes.bindguard]"),
                "{advice}"
            );
            assert!(
                advice.contains("/containerd-shim-bindguard-v2\""),
                "{advice}"
            );
        }
    }

    #[test]
    fn the_last_command_of_a_unit_and_its_drop_ins_is_active() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(config_of_unit(root.path()), None);
        write(
            "lib/systemd/system/containerd.service",
            "[Service]\nExecStart=/usr/bin/containerd\n",
        );
        assert_eq!(config_of_unit(root.path()), None);
        let flatcar = "[Service]\nEnvironment=CONTAINERD_CONFIG=/usr/share/containerd/config.toml\nExecStart=/usr/bin/containerd --config ${CONTAINERD_CONFIG}\n";
        write("usr/lib/systemd/system/containerd.service", flatcar);
        assert_eq!(
            config_of_unit(root.path()),
            Some("/usr/share/containerd/config.toml".into())
        );
        write(
            "etc/systemd/system/containerd.service.d/10-own.conf",
            "[Service]\nExecStart=\nExecStart=/usr/bin/containerd -c /etc/own.toml\n",
        );
        assert_eq!(config_of_unit(root.path()), Some("/etc/own.toml".into()));
    }
}
