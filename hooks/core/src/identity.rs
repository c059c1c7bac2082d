//! The pod and the container that a spec or a process belongs to: their names in the spec's
//! annotations, and the cgroup and the start time of a process in `/proc/PID`.

use std::collections::BTreeSet;
use std::iter;

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
        Self::from_annotations(|key| spec.annotation(key))
    }

    /// The same for annotations that are not in a [`SpecView`].
    pub fn from_annotations<'a>(annotation: impl Fn(&str) -> Option<&'a str>) -> Self {
        if annotation(MANAGER) == Some("libpod") {
            return Self::default();
        }
        let named = |keys: [&str; 4]| {
            let [container, uid, namespace, name] =
                keys.map(|key| annotation(key).map(str::to_owned));
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

// Texts of `/proc/PID`: the container in whose cgroup a process is, the cgroups of a container, and
// the fields of `stat`.

/// The outermost of these containers in whose cgroup a process is, by its `/proc/PID/cgroup`.
///
/// A part of the path is the id, or ends with it: `/kubepods/podUID/ID`,
/// `/kubepods.slice/cri-containerd-ID.scope`. A container may make its own cgroups below, and name
/// the cgroups after another container.
pub fn container_of<'c>(cgroup: &str, containers: &BTreeSet<&'c str>) -> Option<&'c str> {
    parts(cgroup).find_map(|part| ids(part).find_map(|id| containers.get(id).copied()))
}

/// The parts of the paths in all hierarchies.
fn parts(cgroup: &str) -> impl Iterator<Item = &str> {
    cgroup.lines().flat_map(|line| path_of(line).split('/'))
}

/// The cgroups of a container in all hierarchies, by the `/proc/PID/cgroup` of its init.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerCgroups(Vec<String>);

impl ContainerCgroups {
    /// The outermost cgroup with the container's id in each hierarchy. `None` if there is none.
    pub fn of_init(cgroup: &str, container: &str) -> Option<Self> {
        let mut found = Vec::new();
        for line in cgroup.lines() {
            let path = path_of(line);
            let mut end = line.len() - path.len();
            for part in path.split('/') {
                end += part.len();
                if ids(part).any(|id| id == container) {
                    found.push(line[..end].to_owned());
                    break;
                }
                end += 1;
            }
        }
        (!found.is_empty()).then_some(Self(found))
    }

    /// The controllers and the path of the cgroup in each hierarchy; no controller for cgroup v2.
    pub fn hierarchies(&self) -> Vec<(&str, &str)> {
        let mut hierarchies = Vec::new();
        for line in &self.0 {
            let controllers = line.split(':').nth(1).unwrap_or_default();
            hierarchies.push((controllers, path_of(line)));
        }
        hierarchies
    }

    /// True for a process in a cgroup of the container, or below. Another container may name a
    /// cgroup of its own after this container, so the whole path is compared.
    pub fn contain(&self, cgroup: &str) -> bool {
        let is_inside = |line: &str| {
            self.0.iter().any(|outer| {
                let rest = line.strip_prefix(outer.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        };
        cgroup.lines().any(is_inside)
    }
}

/// The name of the pod's cgroup, by the `/proc/PID/cgroup` of a process: `podUID`,
/// `kubepods-burstable-podUID.slice`. `None` for a process of no pod.
pub fn pod_of(cgroup: &str) -> Option<&str> {
    parts(cgroup).find(|part| part.starts_with("pod") || part.contains("-pod"))
}

/// The lines of `/proc/PID/cgroup` of a process of this container, without the cgroups that the
/// container made. `None` if the process is not in a cgroup of the container.
pub fn cgroup_of_container(cgroup: &str, container: &str) -> Option<String> {
    ContainerCgroups::of_init(cgroup, container).map(|cgroups| cgroups.0.join("\n"))
}

/// The path of a line `HIERARCHY:CONTROLLERS:PATH`.
fn path_of(line: &str) -> &str {
    line.splitn(3, ':').nth(2).unwrap_or_default()
}

/// The ids that a part of a path may name.
fn ids(part: &str) -> impl Iterator<Item = &str> {
    part.split(':').flat_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        let after_dashes = part.match_indices('-').map(|(dash, _)| &part[dash + 1..]);
        iter::once(part).chain(after_dashes)
    })
}

/// A field's number in proc_pid_stat(5).
pub const PARENT: usize = 4;

/// The time of the start, in the kernel's ticks since the boot.
pub const START_TIME: usize = 22;

/// A field as a number, from the third on. `None` if the text has no such field, or if the field is
/// no number.
pub fn stat_number(stat: &str, field: usize) -> Option<u64> {
    // The program's name in parentheses may have spaces and parentheses itself.
    let (_, from_third) = stat.rsplit_once(") ")?;
    let after = field.checked_sub(3)?;
    from_third.split_whitespace().nth(after)?.parse().ok()
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

#[cfg(test)]
mod process_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn a_cgroup_names_its_container() {
        let containers = BTreeSet::from(["abc", "my-app", "outer"]);
        for (cgroup, expected) in [
            ("0::/kubepods/besteffort/podu-1/abc", Some("abc")),
            (
                "0::/kubepods.slice/kubepods-podu.slice/cri-containerd-abc.scope",
                Some("abc"),
            ),
            ("12:pids:/system.slice/docker-abc.scope/init", Some("abc")),
            ("0::/machine.slice/libpod-abc.scope/container", Some("abc")),
            ("2:cpu:/\n1:name=systemd:/default/my-app\n", Some("my-app")),
            ("0::/system.slice/docker-my-app.scope", Some("my-app")),
            ("0::/docker/outer/docker/abc", Some("outer")),
            ("0::/docker/outer/docker/unknown", Some("outer")),
            ("0::/kubepods/abcd", None),
            ("0::/kubepods/xabc", None),
            ("0::/podabc/other", None),
            ("2:abc:/other", None),
            ("0::/system.slice:docker:abc", Some("abc")),
            ("0::/", None),
        ] {
            assert_eq!(container_of(cgroup, &containers), expected, "{cgroup}");
        }
    }

    #[test]
    fn a_cgroup_names_its_pod() {
        for (cgroup, expected) in [
            ("0::/kubepods/burstable/podu-1/abc/podu-2", Some("podu-1")),
            (
                "0::/kubepods.slice/kubepods-podu.slice/cri-containerd-abc.scope",
                Some("kubepods-podu.slice"),
            ),
            ("2:cpu:/\n1:name=systemd:/kubepods/podu/abc\n", Some("podu")),
            ("0::/machine.slice/libpod-abc.scope", None),
        ] {
            assert_eq!(pod_of(cgroup), expected, "{cgroup}");
        }
    }

    #[test]
    fn the_cgroups_that_a_container_made_are_left_out() {
        let of = |cgroup| cgroup_of_container(cgroup, "abc");
        let made = "2:cpu:/docker/abc/one\n0::/system.slice/docker-abc.scope/pod-b";
        let own = "2:cpu:/docker/abc\n0::/system.slice/docker-abc.scope";
        assert_eq!(of(made).as_deref(), Some(own));
        assert_eq!(of(own).as_deref(), Some(own));
        assert_eq!(of("0::/docker/other"), None);
    }

    #[test]
    fn a_cgroup_of_another_container_with_the_id_is_not_of_the_container() {
        let init = "2:cpu:/pods/abc/init\n1:name=systemd:/pods/abc\n0::/\n";
        let cgroups = ContainerCgroups::of_init(init, "abc").unwrap();
        for (cgroup, expected) in [
            ("2:cpu:/pods/abc", true),
            ("1:name=systemd:/pods/abc/worker", true),
            ("2:cpu:/pods/abcd", false),
            ("2:cpu:/pods/conmon-abc.scope", false),
            ("2:cpu:/pods/hostile/abc", false),
            ("2:cpu:/pods/hostile/pods/abc", false),
            ("0::/", false),
        ] {
            assert_eq!(cgroups.contain(cgroup), expected, "{cgroup}");
        }
        assert_eq!(ContainerCgroups::of_init(init, "other"), None);
    }
}

#[cfg(test)]
mod stat_tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_moves_no_field() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 123456 0\n";
        assert_eq!(stat_number(stat, PARENT), Some(1));
        assert_eq!(stat_number(stat, START_TIME), Some(123_456));
        assert_eq!(stat_number(stat, 3), None);
        assert_eq!(stat_number(stat, 2), None);
        assert_eq!(stat_number("7 (cut", PARENT), None);
    }
}
