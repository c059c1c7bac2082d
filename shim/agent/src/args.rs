//! The agent's command line. Everything else is in `config.toml`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;

/// Keep the subPath mounts of this node current, and serve its metrics.
#[derive(Debug, Parser)]
#[command(name = "bindguard-agent", version, about)]
pub struct Args {
    /// Read this config instead of $BINDGUARD_CONFIG or /etc/bindguard/config.toml.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The socket of the CRI (default: the first that exists of containerd's, k3s', MicroK8s' and CRI-O's).
    #[arg(long, value_name = "SOCKET")]
    pub cri: Option<PathBuf>,
    /// Serve figures and health on this address, instead of the config's.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
    /// The node's root directory, in a pod that mounts it: enter the mount namespace of the process behind the CRI's socket.
    #[arg(long, value_name = "DIRECTORY")]
    pub host: Option<PathBuf>,
}
