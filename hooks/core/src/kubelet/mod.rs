//! The kubelet's folders, parsed from paths.
//!
//! ```text
//! <root>/pods/<uid>/volumes/<plugin>/<volume>                          the volume
//!                                    /FILE -> ..data/FILE              what a container sees of a payload
//!                                    /..data -> ..2026_11_21_05_10_00.123456789
//! <root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>       the bind that pins a subPath
//! ```
//!
//! Mirrors `pkg/volume/util/subpath/subpath_linux.go`, `pkg/volume/util/atomic_writer.go` and
//! `pkg/kubelet/kubelet_getters.go` of Kubernetes.

mod csi_volume;
mod mounted_volume;
mod payload;
mod plugin;
mod pod_path;
mod volume_subpath;

pub use csi_volume::{CSI_RECORD, CsiRecord, STAGING_MOUNT};
pub use mounted_volume::MountedVolume;
pub use payload::{DATA_LINK, TimestampDirectory, VolumeLayout};
pub use plugin::{Plugin, RequiredMount, Writer};
pub use pod_path::PodPath;
pub use volume_subpath::VolumeSubpath;
