//! The agent's command line: the settings that differ between a service and a pod. Everything else
//! is in `config.toml`.

use std::net::SocketAddr;
use std::path::PathBuf;

use bindguard_config::{AgentConfig, EventMode, KubernetesConfig, RefreshMode};
use clap::{Parser, Subcommand, ValueEnum};

/// Keep the subPath mounts of this node current, and serve its metrics.
#[derive(Debug, Parser)]
#[command(name = "bindguard-agent", version)]
pub struct Args {
    /// Read this config instead of $BINDGUARD_CONFIG or /etc/bindguard/config.toml.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The socket of the CRI (default: the first that exists of containerd's, k3s', k0s', MicroK8s'
    /// and CRI-O's).
    #[arg(long, value_name = "SOCKET")]
    pub cri: Option<PathBuf>,
    /// Serve figures and health on this address, instead of the config's.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
    /// Refresh these containers while they run, instead of the config's: off, annotated or all.
    #[arg(long, value_name = "MODE")]
    pub refresh: Option<RefreshMode>,
    /// Serve as an NRI plugin on this socket of the node, whatever the config says.
    #[arg(long, value_name = "SOCKET")]
    pub nri: Option<PathBuf>,
    /// Serve kubediag's processors on this address, whatever the config says.
    #[arg(long, value_name = "ADDRESS")]
    pub kubediag: Option<SocketAddr>,
    /// Write these events on pods: off, warnings or all, instead of the config's.
    #[arg(long, value_name = "MODE")]
    pub events: Option<EventMode>,
    /// Log in this form.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Log events of this level and of those above.
    #[arg(long, value_enum, value_name = "LEVEL", default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,
    /// The node's root directory, in a pod that mounts it: enter the mount namespace of the process
    /// behind the CRI's socket.
    #[arg(long, value_name = "DIRECTORY")]
    pub host: Option<PathBuf>,
    /// A task instead of the node agent's.
    #[command(subcommand)]
    pub command: Option<Verb>,
}

/// Tasks besides that of the node agent.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Take and free slots for restarts of runtimes, as lines of stdin request.
    RestartSlot(RestartSlotArgs),
    /// Set and remove a label of this node, as lines of stdin request.
    NodeLabel,
}

/// Arguments of `restart-slot`.
#[derive(Debug, clap::Args)]
pub struct RestartSlotArgs {
    /// The namespace of the leases.
    #[arg(long)]
    pub namespace: String,
    /// A lease that is a slot.
    #[arg(long = "lease", value_name = "NAME", required = true)]
    pub leases: Vec<String>,
    /// Grant no slot after this many failed restarts.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub max_failures: usize,
}

/// The form of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Time, level and message.
    Text,
    /// A JSON object with the keys timestamp, level and message.
    Json,
}

/// The least important events that are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Only what stops a part of the agent.
    Error,
    /// Also what could not be repaired, read or written.
    Warn,
    /// Also repairs and surveys.
    Info,
    /// Also details for a developer.
    Debug,
}

impl Args {
    /// The settings of the config, with those of the command line in their place.
    pub fn over(&self, config: &AgentConfig) -> AgentConfig {
        let config = config.clone();
        AgentConfig {
            metrics: self.metrics.or(config.metrics),
            nri: self.nri.clone().or(config.nri),
            kubediag: self.kubediag.or(config.kubediag),
            refresh: self.refresh.unwrap_or(config.refresh),
            kubernetes: KubernetesConfig {
                events: self.events.unwrap_or(config.kubernetes.events),
                ..config.kubernetes
            },
            ..config
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_config::Config;

    fn settings(words: &[&str], config: &str) -> AgentConfig {
        let args = Args::try_parse_from(["bindguard-agent"].iter().chain(words)).unwrap();
        args.over(Config::from_toml(config).unwrap().agent())
    }

    #[test]
    fn the_command_line_comes_before_the_config() {
        let config = "refresh.mode = 'all'\nagent = { metrics = 'off', nri = { enabled = true, socket = '/a' } }\n";
        let set = settings(
            &["--refresh", "off", "--nri", "/b", "--metrics", "[::]:1"],
            config,
        );
        assert_eq!(
            (set.refresh, set.nri),
            (RefreshMode::Off, Some("/b".into()))
        );
        assert_eq!(set.metrics, Some("[::]:1".parse().unwrap()));
        assert_eq!(
            settings(&["--kubediag", "[::1]:1"], config).kubediag,
            Some("[::1]:1".parse().unwrap())
        );
        assert_eq!(
            settings(&["--events", "all"], config).kubernetes.events,
            EventMode::All
        );
        let kept = settings(&[], config);
        assert_eq!(
            (kept.refresh, kept.nri, kept.metrics),
            (RefreshMode::All, Some("/a".into()), None)
        );
    }

    #[test]
    fn an_unknown_mode_is_refused_with_the_known_ones() {
        let error = Args::try_parse_from(["bindguard-agent", "--refresh", "on"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("`annotated`"), "{error}");
    }
}
