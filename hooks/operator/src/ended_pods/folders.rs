//! The folders of pods below a kubelet's root.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_sys::observe::{SubpathsError, list_pods};

use crate::kubelet_roots::Roots;

/// The folders of the pods of this node's kubelet.
#[derive(Debug)]
pub struct PodFolders {
    /// The kernel's name of the kubelet's root.
    root: PathBuf,
    uids: BTreeSet<String>,
}

/// Why it is not known which pods have ended.
#[derive(Debug, thiserror::Error)]
pub enum EndedPodsError {
    /// A kubelet's folders could not be checked.
    #[error("{0}")]
    Unchecked(String),
    /// Two kubelets have pods, and the list of pods has the pods of a single kubelet.
    #[error(
        "kubelets at {} and {} have pods: name one in [kubelet] roots of a config for --config",
        .0.display(), .1.display()
    )]
    TwoKubelets(PathBuf, PathBuf),
    /// A folder could not be read.
    #[error(transparent)]
    List(#[from] SubpathsError),
}

impl PodFolders {
    /// The folders of the node's only kubelet with pods; `None` without pods.
    ///
    /// # Errors
    /// If two kubelets have pods, or if their folders cannot be read.
    pub fn here(places: &Places) -> Result<Option<Self>, EndedPodsError> {
        let roots = Roots::of(places);
        if let Some(problem) = roots.problems.first() {
            return Err(EndedPodsError::Unchecked(problem.clone()));
        }
        let mut found: Option<Self> = None;
        for root in roots.real_names() {
            let uids = list_pods(root)?;
            if uids.is_empty() {
                continue;
            }
            let folders = Self {
                root: root.to_owned(),
                uids: uids.into_iter().collect(),
            };
            if let Some(other) = found.replace(folders) {
                return Err(EndedPodsError::TwoKubelets(other.root, root.to_owned()));
            }
        }
        Ok(found)
    }

    /// The root of the kubelet.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The uids of the pods with a folder.
    pub fn uids(&self) -> &BTreeSet<String> {
        &self.uids
    }

    /// The folder of a pod.
    pub fn of(&self, uid: &str) -> PathBuf {
        self.root.join("pods").join(uid)
    }
}
