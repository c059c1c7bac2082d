//! The kubelet's record of a CSI volume, `vol_data.json` in the folder of the volume and of its
//! staging mount.
//!
//! Mirrors `pkg/volume/csi/csi_mounter.go` (`SetUpAt`) and `csi_attacher.go` (`MountDevice`).

use serde::Deserialize;

/// The name of the record.
pub const CSI_RECORD: &str = "vol_data.json";

/// The kubelet's record of a CSI volume.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsiRecord {
    volume_lifecycle_mode: Option<String>,
}

impl CsiRecord {
    /// Parses the record; `None` if the text is no record.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    /// True for a volume in the pod's own spec, which no other pod has.
    pub fn is_inline(&self) -> bool {
        self.volume_lifecycle_mode.as_deref() == Some("Ephemeral")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
