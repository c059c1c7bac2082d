//! A container, by the names in its annotations.

use serde::{Deserialize, Serialize};

use crate::spec::SpecView;

/// A container, by the names in its annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Container {
    /// Its name in the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The pod's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The pod's namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod's uid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl Container {
    /// The names in a spec's annotations: containerd's CRI plugin sets its own, CRI-O passes the
    /// kubelet's labels on (`pkg/kubelet/types/labels.go` of Kubernetes).
    pub fn from_spec(spec: &SpecView<'_>) -> Self {
        let named = |containerds: &str, kubelets: &str| {
            spec.annotation(containerds)
                .or_else(|| spec.annotation(kubelets))
                .map(str::to_owned)
        };
        Self {
            name: named(
                "io.kubernetes.cri.container-name",
                "io.kubernetes.container.name",
            ),
            pod: named("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"),
            namespace: named(
                "io.kubernetes.cri.sandbox-namespace",
                "io.kubernetes.pod.namespace",
            ),
            uid: named("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
