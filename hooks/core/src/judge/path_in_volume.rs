//! Derives the sub path within a volume from the root of a subpath's mount.
//!
//! Only the mount records the name: neither the OCI spec nor the kubelet's folders contain it. A
//! `subPathExpr` therefore keeps the value that it had when the kubelet first bound the subpath.

use std::path::{Path, PathBuf};

use crate::evidence::{SubpathMount, Volume};
use crate::kubelet::{TimestampDirectory, VolumeLayout};
use crate::paths::below;

/// A path within a volume, as a pod's `subPath` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathInVolume {
    /// The payload directory in which the mount shows the path. `None` in volumes without a
    /// payload, and for a mount of a path beside the payload.
    pub timestamp: Option<TimestampDirectory>,
    /// The path below the payload, or below the volume if it has no payload.
    pub path: PathBuf,
}

/// Why a mount could not be mapped to a path of its volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotInVolume {
    /// The mount's filesystem is not the filesystem of the volume today.
    #[error("its mount is of device {mount}, its volume of {volume}")]
    OtherDevice {
        /// Device of the subpath's mount.
        mount: String,
        /// Device of the volume.
        volume: String,
    },
    /// The mount's root is not in the volume.
    #[error("its mount shows {}, which is not in the volume at {}", root.display(), volume.display())]
    Outside {
        /// The mount's root.
        root: PathBuf,
        /// The volume's place in the filesystem.
        volume: PathBuf,
    },
}

impl PathInVolume {
    /// Maps a mount's root to its volume.
    ///
    /// # Errors
    /// If the root is outside the volume, or is of a filesystem that is no known earlier mount of
    /// the volume.
    pub fn from_mount(mount: &SubpathMount, volume: &Volume) -> Result<Self, NotInVolume> {
        if mount.device != volume.device && !volume.is_earlier_mount(mount) {
            return Err(NotInVolume::OtherDevice {
                mount: mount.device.to_string(),
                volume: volume.device.to_string(),
            });
        }
        let outside = || NotInVolume::Outside {
            root: mount.root.path.clone(),
            volume: volume.place.clone(),
        };
        let path = below(&mount.root.path, &volume.place).ok_or_else(outside)?;
        Ok(match volume.layout {
            VolumeLayout::Payload => Self::in_payload(path),
            VolumeLayout::Plain => Self {
                timestamp: None,
                path: path.to_owned(),
            },
        })
    }

    /// True if the path begins with the name of a payload directory. Subpaths of a payload do, and
    /// subpaths of a folder with such a name in a plain volume.
    pub fn begins_like_a_payload(&self) -> bool {
        self.path
            .components()
            .next()
            .is_some_and(|first| TimestampDirectory::from_name(first.as_os_str()).is_some())
    }

    fn in_payload(path: &Path) -> Self {
        let mut names = path.components();
        match names
            .next()
            .and_then(|first| TimestampDirectory::from_name(first.as_os_str()))
        {
            Some(timestamp) => Self {
                timestamp: Some(timestamp),
                path: names.as_path().to_owned(),
            },
            None => Self {
                timestamp: None,
                path: path.to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_recognized_by_the_first_name_alone() {
        for (path, expected) in [
            ("..2026_11_21_05_10_00.1/app.conf", true),
            ("app.conf", false),
            ("x/..2026_11_21_05_10_00.1", false),
            ("", false),
        ] {
            let path = PathInVolume {
                timestamp: None,
                path: path.into(),
            };
            assert_eq!(path.begins_like_a_payload(), expected, "{path:?}");
        }
    }
}
