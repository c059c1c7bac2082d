//! The group of containers that share a server: those of a pod.

use crate::bundle::ShimSpec;

/// Searched in this order; the second is the CRI plugin's.
const GROUP_ANNOTATIONS: [&str; 2] = [
    "io.containerd.runc.v2.group",
    "io.kubernetes.cri.sandbox-id",
];

/// The group that an annotation names; a container without an annotation is a group of its own.
pub(super) fn group_of(spec: &ShimSpec, id: &str) -> String {
    let named = GROUP_ANNOTATIONS
        .iter()
        .find_map(|name| spec.annotations.get(*name));
    named
        .filter(|group| !group.is_empty())
        .cloned()
        .unwrap_or_else(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(annotations: &str) -> String {
        let spec =
            ShimSpec::parse(format!(r#"{{"annotations":{annotations}}}"#).as_bytes()).unwrap();
        group_of(&spec, "self")
    }

    #[test]
    fn the_runc_annotation_goes_before_the_pods() {
        assert_eq!(group("{}"), "self");
        assert_eq!(group(r#"{"io.kubernetes.cri.sandbox-id":"pod"}"#), "pod");
        assert_eq!(
            group(r#"{"io.kubernetes.cri.sandbox-id":"pod","io.containerd.runc.v2.group":"g"}"#),
            "g"
        );
        assert_eq!(group(r#"{"io.kubernetes.cri.sandbox-id":""}"#), "self");
    }
}
