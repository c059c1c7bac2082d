//! The names of a pod and of a container in it.

use serde::{Deserialize, Serialize};

use crate::spec::SpecView;

/// The known names of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct PodName {
    /// Its uid; for a static pod, the hash of its manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Its namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl PodName {
    /// A pod of which only the uid is known.
    pub fn of_uid(uid: &str) -> Self {
        Self {
            uid: Some(uid.to_owned()),
            ..Self::default()
        }
    }

    /// The namespace and the name, where both are known.
    pub fn names(&self) -> Option<(&str, &str)> {
        self.namespace.as_deref().zip(self.name.as_deref())
    }

    /// `namespace/name` where both are known, else the uid.
    pub fn display_name(&self) -> Option<String> {
        match self.names() {
            Some((namespace, name)) => Some(format!("{namespace}/{name}")),
            None => self.uid.clone(),
        }
    }
}

/// The known names of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "JsonNames", into = "JsonNames")]
pub struct Identity {
    /// The container's name in the pod; without a pod, the engine's name for the container.
    pub container: Option<String>,
    /// Its pod.
    pub pod: PodName,
}

impl Identity {
    /// The names in a spec's annotations: containerd's CRI plugin sets its own, CRI-O passes the
    /// kubelet's labels on (`pkg/kubelet/types/labels.go` of Kubernetes).
    pub fn from_spec(spec: &SpecView<'_>) -> Self {
        let named = |containerds: &str, kubelets: &str| {
            spec.annotation(containerds)
                .or_else(|| spec.annotation(kubelets))
                .map(str::to_owned)
        };
        Self {
            container: named(
                "io.kubernetes.cri.container-name",
                "io.kubernetes.container.name",
            ),
            pod: PodName {
                uid: named("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"),
                namespace: named(
                    "io.kubernetes.cri.sandbox-namespace",
                    "io.kubernetes.pod.namespace",
                ),
                name: named("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"),
            },
        }
    }

    /// A container of no pod.
    pub fn without_pod(name: &str) -> Self {
        Self {
            container: Some(name.to_owned()),
            ..Self::default()
        }
    }

    /// True if no name is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The JSON form in reports and in the journal.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonNames {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<String>,
}

impl From<JsonNames> for Identity {
    fn from(names: JsonNames) -> Self {
        Self {
            container: names.name,
            pod: PodName {
                uid: names.uid,
                namespace: names.namespace,
                name: names.pod,
            },
        }
    }
}

impl From<Identity> for JsonNames {
    fn from(identity: Identity) -> Self {
        let PodName {
            uid,
            namespace,
            name,
        } = identity.pod;
        Self {
            name: identity.container,
            pod: name,
            namespace,
            uid,
        }
    }
}
