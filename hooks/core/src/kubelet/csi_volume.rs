//! The kubelet's record of a CSI volume, `vol_data.json` in the folder of the volume and of its
//! staging mount.
//!
//! Mirrors `pkg/volume/csi/csi_mounter.go` (`SetUpAt`) and `csi_attacher.go` (`MountDevice`).

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

/// The folder of all staging folders, below a kubelet's root.
const STAGING: &str = "plugins/kubernetes.io/csi";

/// The mount in a staging folder.
pub const STAGING_MOUNT: &str = "globalmount";

/// The name of the record.
pub const CSI_RECORD: &str = "vol_data.json";

/// The kubelet's record of a CSI volume.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsiRecord {
    driver_name: Option<String>,
    volume_handle: Option<String>,
    #[serde(rename = "specVolID")]
    spec_volume: Option<String>,
    volume_lifecycle_mode: Option<String>,
}

impl CsiRecord {
    /// Parses the record; `None` if the text is no record.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    /// True for the record of the same volume. A record without the driver's handle is of no volume.
    pub fn is_of_volume(&self, other: &Self) -> bool {
        let names = |record: &Self| record.driver_name.clone().zip(record.volume_handle.clone());
        names(self).is_some_and(|own| Some(own) == names(other))
    }

    /// The folder with the staging folders of the volume's driver, below a kubelet's root. The name
    /// of a staging folder is a hash of the volume's handle.
    pub fn staging_folders(&self, kubelet_root: &Path) -> Option<PathBuf> {
        let driver = file_name(self.driver_name.as_deref()?)?;
        Some(kubelet_root.join(STAGING).join(driver))
    }

    /// The staging mount that kubelets before 1.24 made.
    pub fn old_staging_mount(&self, kubelet_root: &Path) -> Option<PathBuf> {
        let volume = file_name(self.spec_volume.as_deref()?)?;
        Some(
            kubelet_root
                .join(STAGING)
                .join("pv")
                .join(volume)
                .join(STAGING_MOUNT),
        )
    }

    /// True for a volume in the pod's own spec, which only this pod has.
    pub fn is_inline(&self) -> bool {
        self.volume_lifecycle_mode.as_deref() == Some("Ephemeral")
    }
}

/// A text that is a single name of a path.
fn file_name(text: &str) -> Option<&str> {
    let mut parts = Path::new(text).components();
    let is_name = matches!(
        (parts.next(), parts.next()),
        (Some(Component::Normal(_)), None)
    );
    is_name.then_some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn staging_is_below_the_kubelets_root() {
        let of = |driver: &str, volume: &str| {
            let json =
                format!(r#"{{"driverName":"{driver}","volumeHandle":"h","specVolID":"{volume}"}}"#);
            CsiRecord::from_json(json.as_bytes()).unwrap()
        };
        let root = Path::new("/k");
        let record = of("blob.csi.azure.com", "pv-1");
        let driver = root.join("plugins/kubernetes.io/csi/blob.csi.azure.com");
        assert_eq!(record.staging_folders(root), Some(driver));
        let old = root.join("plugins/kubernetes.io/csi/pv/pv-1/globalmount");
        assert_eq!(record.old_staging_mount(root), Some(old));
        for name in ["..", "a/b", "/etc", ""] {
            let record = of(name, name);
            assert_eq!(record.staging_folders(root), None, "{name}");
            assert_eq!(record.old_staging_mount(root), None, "{name}");
        }
        assert!(record.is_of_volume(&of("blob.csi.azure.com", "pv-2")));
        assert!(!record.is_of_volume(&of("other", "pv-1")));
        let empty = CsiRecord::from_json(b"{}").unwrap();
        assert!(!empty.is_of_volume(&empty));
    }

    #[test]
    fn only_a_volume_in_the_spec_of_its_pod_is_inline() {
        for (json, is_inline) in [
            (
                r#"{"driverName":"secrets-store.csi.k8s.io","volumeLifecycleMode":"Ephemeral"}"#,
                Some(true),
            ),
            (
                r#"{"driverName":"d","volumeLifecycleMode":"Persistent"}"#,
                Some(false),
            ),
            (r#"{"driverName":"d"}"#, Some(false)),
            ("{", None),
        ] {
            let record = CsiRecord::from_json(json.as_bytes());
            assert_eq!(record.map(|it| it.is_inline()), is_inline, "{json}");
        }
    }
}
