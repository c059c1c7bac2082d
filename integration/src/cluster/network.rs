//! A network of the story's own: pods have addresses, and the machine's network is not touched.
//!
//! The story's thread enters a network namespace before it makes a node, so everything that it
//! starts is inside. The API server listens on the address of its own Service there, so pods reach
//! it without kube-proxy.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns, unshare};
use serde_json::json;

use crate::node::Node;
use crate::process::host;

/// The first address of the Services' range: the API server's.
pub(super) const API_SERVER: &str = "192.0.2.1";

/// The namespace, until this value is dropped.
#[derive(Debug)]
pub struct Network {
    home: File,
}

impl Network {
    /// Enters a network namespace. The node is made afterwards.
    pub fn enter() -> Result<Self> {
        let home = File::open("/proc/thread-self/ns/net")
            .context("open the machine's network namespace")?;
        unshare(CloneFlags::CLONE_NEWNET).context("unshare the network namespace")?;
        let network = Self { home };
        host(["busybox", "ip", "link", "set", "lo", "up"])?;
        host([
            "busybox",
            "ip",
            "address",
            "add",
            &format!("{API_SERVER}/32"),
            "dev",
            "lo",
        ])?;
        Ok(network)
    }

    /// Gives containerd the plugins of `cluster/network.sh`, and a configuration.
    pub fn give_pods_addresses(&self, node: &Node, plugins: &Path) -> Result<()> {
        let folder = node.disk().join("cni");
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        for name in ["loopback", "ptp", "host-local"] {
            let plugin = plugins.join(name);
            plugin.metadata().with_context(|| {
                format!(
                    "find {}: run integration/cluster/network.sh",
                    plugin.display()
                )
            })?;
            symlink(&plugin, folder.join(name)).with_context(|| format!("link {name}"))?;
        }
        let addresses = json!({
            "type": "host-local", "dataDir": "/run/cni", "subnet": "198.51.100.0/24", "routes": [{"dst": "0.0.0.0/0"}],
        });
        let list = json!({
            "cniVersion": "0.4.0", "name": "story", "plugins": [{"type": "ptp", "ipam": addresses}],
        });
        fs::write(folder.join("10-story.conflist"), list.to_string())
            .context("write the network's configuration")
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Err(errno) = setns(&self.home, CloneFlags::CLONE_NEWNET) {
            eprintln!("leave the story's network namespace: {errno}");
        }
    }
}
