//! The names of a pod and of a container in it.

use serde::{Deserialize, Serialize};

use crate::spec::SpecView;

/// The annotation in which CRI-O and Podman name themselves.
pub const MANAGER: &str = "io.container.manager";

/// containerd's annotation of a container in a pod: `sandbox` or `container`.
pub const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
/// containerd's annotations of the container's name, and of the pod's uid, namespace and name.
pub const OF_CONTAINERD: [&str; 4] = [
    "io.kubernetes.cri.container-name",
    "io.kubernetes.cri.sandbox-uid",
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.cri.sandbox-name",
];
/// The kubelet's labels of the same names, which CRI-O writes as annotations.
pub const OF_KUBELET: [&str; 4] = [
    "io.kubernetes.container.name",
    "io.kubernetes.pod.uid",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.pod.name",
];

/// The known names of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct PodName {
    /// Its uid; for a static pod, the hash of its manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
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
// Works beside `flatten`, although serde's documentation excludes it: a test relies on it.
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The container's name in the pod; without a pod, the engine's name for the container.
    #[serde(rename = "name", skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    #[serde(flatten, with = "PodOfContainer")]
    pub pod: PodName,
}

/// The JSON form of a pod beside the name of a container.
#[derive(Serialize, Deserialize)]
#[serde(remote = "PodName")]
struct PodOfContainer {
    #[serde(rename = "pod", skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<String>,
}

impl Identity {
    /// The names in a spec's annotations: containerd's CRI plugin sets its own, CRI-O passes the
    /// kubelet's labels on (`pkg/kubelet/types/labels.go` of Kubernetes).
    ///
    /// A pod's author may add the annotations of the other runtime, with another pod's names: names
    /// that contradict each other are ignored. Podman takes annotations from the image and runs no
    /// pods of a kubelet.
    pub fn from_spec(spec: &SpecView<'_>) -> Self {
        if spec.annotation(MANAGER) == Some("libpod") {
            return Self::default();
        }
        let named = |keys: [&str; 4]| {
            let [container, uid, namespace, name] =
                keys.map(|key| spec.annotation(key).map(str::to_owned));
            Self {
                container,
                pod: PodName {
                    uid,
                    namespace,
                    name,
                },
            }
        };
        let (by_containerd, by_kubelet) = (named(OF_CONTAINERD), named(OF_KUBELET));
        if by_containerd.is_empty() {
            by_kubelet
        } else if by_kubelet.is_empty() || by_containerd == by_kubelet {
            by_containerd
        } else {
            Self::default()
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    /// serde collects the keys of a flattened struct: an unknown key must still be an error.
    #[test]
    fn a_pod_is_beside_its_container_in_json_and_no_other_key() {
        let json = r#"{"name":"app","pod":"web","namespace":"shop","uid":"u-1"}"#;
        let identity = Identity {
            container: Some("app".to_owned()),
            pod: PodName {
                namespace: Some("shop".to_owned()),
                name: Some("web".to_owned()),
                ..PodName::of_uid("u-1")
            },
        };
        assert_eq!(serde_json::to_string(&identity).unwrap(), json);
        assert_eq!(serde_json::from_str::<Identity>(json).unwrap(), identity);
        assert!(serde_json::from_str::<Identity>("{}").unwrap().is_empty());
        for json in [r#"{"name":"app","node":"n"}"#, r#"{"uid":"u-1","pods":1}"#] {
            assert!(serde_json::from_str::<Identity>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn a_pods_author_cannot_choose_another_pods_names() {
        let names =
            |keys: [&str; 4], pod: &str| keys.map(|key| format!("{key:?}:{pod:?}")).join(",");
        let (containerd, kubelet) = (names(OF_CONTAINERD, "own"), names(OF_KUBELET, "own"));
        for (text, uid) in [
            (containerd.clone(), Some("own")),
            (kubelet.clone(), Some("own")),
            (format!("{containerd},{kubelet}"), Some("own")),
            (
                format!("{},{kubelet}", names(OF_CONTAINERD, "victim")),
                None,
            ),
            (
                format!("{containerd},{}", names(OF_KUBELET, "victim")),
                None,
            ),
            (format!("{containerd},{MANAGER:?}:\"libpod\""), None),
        ] {
            let spec = format!("{{\"annotations\":{{{text}}}}}");
            let spec = SpecView::from_bytes(spec.as_bytes()).unwrap();
            let pod = Identity::from_spec(&spec).pod;
            assert_eq!(pod.uid.as_deref(), uid, "{text}");
        }
    }
}
