//! A node's containerd: its config file, program and restart command, and the Kubernetes distribution.
//!
//! A running containerd's arguments decide, then its unit, then the files that distributions write.
//! The default path comes last: an edit of a file that containerd does not read would report
//! success and change nothing. Some distributions write containerd's files themselves.
//!
//! docs/distributions.md has the table for operators.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use bindguard_core::program_names::{RUNTIME, SHIM};
use bindguard_operator::doctor::{os_release, os_release_value};

use crate::change::read_text;
use crate::running::{Daemon, containerds, option};
use crate::search_path::SearchPath;

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
        .or_else(|| config_of(root, "containerd"))
        .unwrap_or_else(|| DEFAULT.into())
}

/// The service of the running containerd, or of the distribution if there is such a unit.
fn service(root: &Path, distribution: Distribution, daemon: Option<&Daemon>) -> String {
    let known = distribution.services();
    // a test's own containerd, for example, must not restart the node's service
    let is_known =
        |service: &String| known.contains(&service.as_str()) || service.contains("containerd");
    let running = daemon.and_then(Daemon::service).filter(is_known);
    let with_unit = || known.iter().find(|service| unit_exists(root, service));
    running.unwrap_or_else(|| (*with_unit().or(known.last()).unwrap_or(&"containerd")).to_owned())
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

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain containerd",
            Self::K3s => "k3s",
            Self::Rke2 => "RKE2",
            Self::Microk8s => "MicroK8s",
            Self::K0s => "k0s",
            Self::Talos => "Talos",
            Self::Bottlerocket => "Bottlerocket",
            Self::Flatcar => "Flatcar",
            Self::EksAl2023 => "EKS on Amazon Linux 2023",
            Self::GkeCos => "GKE on Container-Optimized OS",
        }
    }

    /// The services that may start the distribution's containerd, the most likely first.
    pub fn services(self) -> &'static [&'static str] {
        match self {
            Self::K3s => &["k3s-agent", "k3s"],
            Self::Rke2 => &["rke2-agent", "rke2-server"],
            Self::Microk8s => &["snap.microk8s.daemon-containerd"],
            Self::K0s => &["k0sworker", "k0scontroller"],
            Self::Plain
            | Self::Talos
            | Self::Bottlerocket
            | Self::Flatcar
            | Self::EksAl2023
            | Self::GkeCos => &["containerd"],
        }
    }

    /// Why an edit of its files would not last, and what to do instead. `None` if `install` can do
    /// it.
    pub fn instruction(self) -> Option<Instruction> {
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
            // the instruction depends on the file that nodeadm wrote: `node_config`
            Self::EksAl2023 => return None,
            Self::Plain | Self::K3s | Self::Rke2 | Self::Microk8s | Self::K0s => return None,
        };
        let fill = |text: &str| text.replace("RUNTIME", RUNTIME).replace("SHIM", SHIM);
        Some(Instruction {
            why,
            advice: fill(advice),
        })
    }
}

/// The instruction for EKS, whose nodeadm merges a fragment of the user data into containerd's
/// file. The fragment has the plugin's name of that file's version, and every option of the runtime
/// that nodeadm chose for the node.
pub fn node_config(fragment: &str, prefix: &Path, file: &Path) -> Instruction {
    let lines = fragment.trim().lines().map(|line| {
        if line.is_empty() {
            String::new()
        } else {
            format!("      {line}")
        }
    });
    let lines: Vec<String> = lines.collect();
    let advice = EKS
        .replace("PREFIX", &prefix.display().to_string())
        .replace("FILE", &file.display().to_string());
    Instruction {
        why: "nodeadm writes containerd's file at each boot",
        advice: advice.replace("FRAGMENT", &lines.join("\n")),
    }
}

/// The steps where a program writes containerd's file from a template at each start.
pub fn of_template(
    layout: &ContainerdLayout,
    template: &Path,
    table: &str,
    default: Option<&str>,
) -> String {
    let (name, restart) = (layout.distribution.name(), &layout.restart);
    let file = template.display();
    let mut text = format!(
        "# {name} writes containerd's file from a template at each start. Add these lines to the end of\n# {file}"
    );
    let is_microk8s = layout.distribution == Distribution::Microk8s;
    if !is_microk8s {
        text += ", and begin a new file with the line {{ template \"base\" . }}";
    }
    text += &format!("\n{table}");
    match default {
        Some(default) if is_microk8s => {
            text += &format!("# Change default_runtime_name in that file to {default:?}.\n");
        }
        Some(default) => {
            text +=
                &format!("# Put `default-runtime: {default}` into config.yaml of /etc/rancher.\n");
        }
        None => {}
    }
    text + &format!("# Then: {restart}\n")
}

/// The operator's own steps where `install` edits no file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// Why `install` does not.
    pub why: &'static str,
    /// The fragment, or the steps.
    pub advice: String,
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
    FOLDERS.iter().any(|folder| {
        root.join(folder)
            .join(format!("{service}.service"))
            .symlink_metadata()
            .is_ok()
    })
}

/// The file that `--config` names in the service's command.
pub fn config_of(root: &Path, service: &str) -> Option<PathBuf> {
    let texts = texts(root, service);
    let lines = || texts.iter().flat_map(|text| text.lines()).map(str::trim);
    let command = lines()
        .filter_map(|line| line.strip_prefix("ExecStart="))
        .rfind(|command| !command.is_empty())?;
    let variables = lines()
        .filter_map(|line| line.strip_prefix("Environment="))
        .flat_map(str::split_whitespace);
    let variables = variables.filter_map(|word| word.trim_matches('"').split_once('='));
    let expanded = variables.fold(command.to_owned(), |command, (name, value)| {
        command
            .replace(&format!("${{{name}}}"), value)
            .replace(&format!("${name}"), value)
    });
    let words: Vec<String> = expanded.split_whitespace().map(str::to_owned).collect();
    option(&words, &["config", "c"]).map(PathBuf::from)
}

/// The unit, and then its drop-ins in the order of their names.
fn texts(root: &Path, service: &str) -> Vec<String> {
    let folders = FOLDERS.map(|folder| root.join(folder));
    let unit = folders
        .iter()
        .find_map(|folder| read_text(&folder.join(format!("{service}.service"))).ok()?);
    let drop_ins = folders
        .iter()
        .map(|folder| folder.join(format!("{service}.service.d")));
    let entries = drop_ins
        .filter_map(|folder| folder.read_dir().ok())
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let mut drop_ins: Vec<PathBuf> = entries
        .filter(|path| path.extension().is_some_and(|it| it == "conf"))
        .collect();
    drop_ins.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
    unit.into_iter()
        .chain(drop_ins.iter().filter_map(|path| read_text(path).ok()?))
        .collect()
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
            let advice = distribution.instruction().unwrap().advice;
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
        assert_eq!(config_of(root.path(), "containerd"), None);
        write(
            "lib/systemd/system/containerd.service",
            "[Service]\nExecStart=/usr/bin/containerd\n",
        );
        assert_eq!(config_of(root.path(), "containerd"), None);
        let flatcar = "[Service]\nEnvironment=CONTAINERD_CONFIG=/usr/share/containerd/config.toml\nExecStart=/usr/bin/containerd --config ${CONTAINERD_CONFIG}\n";
        write("usr/lib/systemd/system/containerd.service", flatcar);
        assert_eq!(
            config_of(root.path(), "containerd"),
            Some("/usr/share/containerd/config.toml".into())
        );
        write(
            "etc/systemd/system/containerd.service.d/10-own.conf",
            "[Service]\nExecStart=\nExecStart=/usr/bin/containerd -c /etc/own.toml\n",
        );
        assert_eq!(
            config_of(root.path(), "containerd"),
            Some("/etc/own.toml".into())
        );
    }
}
