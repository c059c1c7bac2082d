//! The folder of a pod by any of its names.
//!
//! `/var/lib/kubelet` is a link to a larger disk on many nodes. containerd writes the kernel's name
//! of a source into the spec, CRI-O the kubelet's name, and a config may have either.

use std::path::{Path, PathBuf};

use bindguard_core::paths::{below, climbs};

use crate::directories::in_real_folder;
use crate::probes::Probes;

/// The folder of a pod, `<root>/pods/<uid>`.
#[derive(Debug)]
pub(super) struct PodFolder {
    named: PathBuf,
    /// The kernel's name.
    real: PathBuf,
}

impl PodFolder {
    /// The folder with this name. Until the kernel's name is known, this name counts.
    pub(super) fn of(named: &Path) -> Self {
        let real = in_real_folder(named, &Probes::for_create());
        Self {
            named: named.to_owned(),
            real: real.unwrap_or_else(|| named.to_owned()),
        }
    }

    /// The kernel's name.
    pub(super) fn path(&self) -> &Path {
        &self.real
    }

    /// The kernel's name of a path in the folder, given by any name of the folder. `None` for
    /// another path.
    pub(super) fn path_in(&self, path: &Path) -> Option<PathBuf> {
        if climbs(path) {
            return None;
        }
        let names = [self.real.as_path(), &self.named];
        if let Some(rest) = names.iter().find_map(|name| below(path, name)) {
            return Some(self.real.join(rest));
        }
        let folder = path.ancestors().find(|folder| self.ends_alike(folder))?;
        let real = in_real_folder(folder, &Probes::for_create())?;
        let rest = below(path, folder).filter(|_| real == self.real)?;
        Some(real.join(rest))
    }

    /// True if a folder ends with `pods/<uid>`.
    fn ends_alike(&self, folder: &Path) -> bool {
        folder.file_name() == self.real.file_name()
            && folder.parent().and_then(Path::file_name)
                == self.real.parent().and_then(Path::file_name)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_source_is_in_the_folder_by_any_name_of_the_kubelets_root() {
        let disk = tempfile::tempdir().unwrap();
        let disk = in_real_folder(disk.path(), &Probes::for_create()).unwrap();
        let [data, link, other] = ["data", "link", "other"].map(|name| disk.join(name));
        let volume = Path::new("pods/uid-1/volumes/kubernetes.io~csi/pv/mount");
        fs::create_dir_all(data.join(volume)).unwrap();
        fs::create_dir_all(other.join(volume)).unwrap();
        symlink("data", &link).unwrap();
        for root in [&data, &link] {
            let folder = PodFolder::of(&root.join("pods/uid-1"));
            assert_eq!(folder.path(), data.join("pods/uid-1"));
            for source in [&data, &link] {
                let found = folder.path_in(&source.join(volume));
                assert_eq!(found, Some(data.join(volume)), "{root:?} {source:?}");
            }
            for source in [
                other.join(volume),
                data.join("pods/uid-2/volumes"),
                link.join("pods/uid-1/../uid-2/volumes"),
                "/".into(),
            ] {
                assert_eq!(folder.path_in(&source), None, "{source:?}");
            }
        }
    }
}
