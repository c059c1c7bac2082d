//! A CSI driver of inline volumes on the node of a cluster, `cluster/csi_driver.py`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Cluster, NODE};
use crate::doc_commands::repository;
use crate::mount_calls::{tmpfs, unmount};
use crate::mounts;

const NAME: &str = "csi.bindguard.test";

/// The file in each volume.
pub const CSI_FILE: &str = "app.conf";

/// A running driver, which ends with the cluster.
#[derive(Debug)]
pub struct CsiDriver {
    pods: PathBuf,
}

impl CsiDriver {
    /// The source of a volume in a pod's manifest.
    pub fn volume() -> Value {
        json!({"csi": {"driver": NAME}})
    }

    /// Starts a driver whose volumes have this content, and waits until the kubelet has registered
    /// the driver.
    pub fn start(cluster: &Cluster<'_>, content: &str) -> Result<Self> {
        cluster.apply(&json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIDriver",
            "metadata": {"name": NAME},
            "spec": {"attachRequired": false, "volumeLifecycleModes": ["Ephemeral"]},
        }))?;
        let root = cluster.node.kubelet().root();
        // Debian's Python: only Debian's has the needed packages.
        let mut command = cluster.node.command("/usr/bin/python3")?;
        let script = repository().join("integration/cluster/csi_driver.py");
        command.arg(script).arg(NAME).arg(root).arg(content);
        cluster.spawn("csi-driver", command)?;
        cluster.until("the CSI driver is registered", |cluster| {
            let of_node = cluster.get(&format!("csinodes/{NODE}")).unwrap_or_default();
            Ok(of_node["spec"]["drivers"][0]["name"] == NAME)
        })?;
        Ok(Self {
            pods: root.join("pods"),
        })
    }

    /// The steps of a driver that was restarted: each published volume is mounted anew, with this
    /// content.
    pub fn mount_anew(&self, content: &str) -> Result<()> {
        let published = mounts::table()?.into_iter().filter(|mount| {
            mount.target.starts_with(&self.pods) && mount.target.ends_with("mount")
        });
        for mount in published {
            unmount(&mount.target)?;
            tmpfs(&mount.target, "mode=755")?;
            let file = mount.target.join(CSI_FILE);
            fs::write(&file, content).with_context(|| format!("write {}", file.display()))?;
        }
        Ok(())
    }
}
