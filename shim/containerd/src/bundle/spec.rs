//! The fields of an OCI spec that the shim reads.
//!
//! Go's shim and runc read a spec with Go's `encoding/json`, and this parser accepts the same
//! texts: `null` is nothing, of duplicate keys the last counts, objects with equal names are
//! merged. Half of a surrogate pair is U+FFFD, and so is a byte that is not UTF-8. Text after the
//! first JSON value is ignored. Only `annotations` must have the runtime spec's types: the
//! annotations name the pod, and so the shim, of the container. About the types of other fields the
//! runtime complains at `create`.

use std::collections::HashMap;

use bindguard_core::spec::{RawObject, Text};
use serde::Deserialize;
use serde_json::Result;
use serde_json::value::RawValue;

/// The parts of a spec that the shim reads.
#[derive(Debug, Default)]
pub(crate) struct ShimSpec {
    /// The spec's annotations.
    pub(crate) annotations: HashMap<String, String>,
    linux: LinuxFields,
}

#[derive(Debug, Default)]
struct LinuxFields {
    cgroups_path: String,
    has_own_pid_namespace: bool,
}

impl ShimSpec {
    /// Reads the bytes of a `config.json`.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let mut spec = Self::default();
        let text = String::from_utf8_lossy(bytes);
        let object =
            Option::<RawObject<'_>>::deserialize(&mut serde_json::Deserializer::from_str(&text))?;
        for (key, value) in object.iter().flat_map(RawObject::entries) {
            match key {
                "annotations" => spec.add_annotations(value)?,
                "linux" => spec.linux.add(value),
                _ => {}
            }
        }
        Ok(spec)
    }

    fn add_annotations(&mut self, value: &RawValue) -> Result<()> {
        let Some(object) = serde_json::from_str::<Option<RawObject<'_>>>(value.get())? else {
            self.annotations.clear();
            return Ok(());
        };
        for (name, value) in object.entries() {
            let Text(text) =
                serde_json::from_str::<Option<Text<'_>>>(value.get())?.unwrap_or_default();
            self.annotations.insert(name.to_owned(), text.into_owned());
        }
        Ok(())
    }

    /// True if the cgroup path has systemd's form, `slice:prefix:name`. Kubelets with the systemd
    /// driver write it.
    pub(crate) fn has_systemds_path(&self) -> bool {
        let parts: Vec<&str> = self.linux.cgroups_path.split(':').collect();
        matches!(parts[..], [slice, _, name] if !name.is_empty() && (slice.is_empty() || slice.ends_with(".slice")))
    }

    /// The path for the container's cgroup; empty if the spec has none.
    pub(crate) fn cgroups_path(&self) -> &str {
        &self.linux.cgroups_path
    }

    /// True if the kernel ends all processes of the container with the init: the init must be pid 1
    /// of a separate pid namespace.
    pub(crate) fn has_own_pid_namespace(&self) -> bool {
        self.linux.has_own_pid_namespace
    }
}

impl LinuxFields {
    fn add(&mut self, value: &RawValue) {
        let Some(object) = read::<RawObject<'_>>(value) else {
            *self = Self::default();
            return;
        };
        for (key, value) in object.entries() {
            match key {
                "cgroupsPath" => {
                    if let Some(Text(path)) = read(value) {
                        self.cgroups_path = path.into_owned();
                    }
                }
                "namespaces" => {
                    let namespaces: Vec<Option<RawObject<'_>>> = read(value).unwrap_or_default();
                    self.has_own_pid_namespace =
                        namespaces.iter().flatten().any(is_own_pid_namespace);
                }
                _ => {}
            }
        }
    }
}

fn is_own_pid_namespace(namespace: &RawObject<'_>) -> bool {
    let field = |name: &str| {
        let values = namespace.entries().filter(|(key, _)| *key == name);
        values
            .filter_map(|(_, value)| read::<Text<'_>>(value))
            .last()
            .unwrap_or_default()
            .0
    };
    field("type") == "pid" && field("path").is_empty()
}

/// None for `null`, or for a value of a different type.
fn read<'a, T: Deserialize<'a>>(value: &'a RawValue) -> Option<T> {
    serde_json::from_str::<Option<T>>(value.get()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    fn linux(linux: &str) -> ShimSpec {
        ShimSpec::parse(format!(r#"{{"ociVersion":"1.0.2","linux":{linux}}}"#).as_bytes()).unwrap()
    }

    fn annotation(spec: &str) -> Option<String> {
        ShimSpec::parse(spec.as_bytes())
            .unwrap()
            .annotations
            .remove("a")
    }

    #[test]
    fn systemds_form_of_a_cgroup_path() {
        assert!(
            linux(r#"{"cgroupsPath":"kubepods-pod1.slice:cri-containerd:abc"}"#)
                .has_systemds_path()
        );
        assert!(!linux(r#"{"cgroupsPath":"/kubepods/besteffort/pod1/abc"}"#).has_systemds_path());
        assert!(!linux(r#"{"cgroupsPath":"a:b:c"}"#).has_systemds_path());
        assert!(!linux("{}").has_systemds_path());
    }

    #[test]
    fn only_a_new_pid_namespace_ends_the_children() {
        assert!(
            linux(r#"{"namespaces":[{"type":"mount"},{"type":"pid"}]}"#).has_own_pid_namespace()
        );
        assert!(
            !linux(r#"{"namespaces":[{"type":"pid","path":"/proc/7/ns/pid"}]}"#)
                .has_own_pid_namespace()
        );
        assert!(!linux("{}").has_own_pid_namespace());
    }

    #[test]
    fn annotations_are_read_as_go_reads_them() {
        for (spec, expected) in [
            ("null", None),
            (r#"{"annotations":null,"linux":null}"#, None),
            (r#"{"annotations":{"a":null}}"#, Some("")),
            (r#"{"annotations":{"a":"1","a":"2"}}"#, Some("2")),
            (
                r#"{"annotations":{"a":"1"},"annotations":{"b":"2"}}"#,
                Some("1"),
            ),
            (r#"{"annotations":{"a":"1"},"annotations":null}"#, None),
            (r#"{"\u0061nnotations":{"\u0061":"1"}}"#, Some("1")),
            (
                r#"{"annotations":{"a":"x\ud800y\udc00\ud83d\ude00"}}"#,
                Some("x\u{fffd}y\u{fffd}\u{1f600}"),
            ),
            (
                r#"{"hostname":"\ud800","annotations":{"\udfff":"","a":"1"}} {"annotations":null}"#,
                Some("1"),
            ),
        ] {
            assert_eq!(annotation(spec).as_deref(), expected, "{spec}");
        }
    }

    #[test]
    fn bytes_that_are_not_utf_8_are_replaced() {
        let spec =
            ShimSpec::parse(b"{\"hostname\":\"\xff\",\"annotations\":{\"a\":\"\xe9!\"}}").unwrap();
        assert_eq!(spec.annotations["a"], "\u{fffd}!");
    }

    #[test]
    fn annotations_that_go_refuses_are_refused() {
        for spec in [
            r#"{"annotations":5}"#,
            r#"{"annotations":{"a":5}}"#,
            r#"["annotations"]"#,
            r#"{"a""#,
            "",
        ] {
            assert!(ShimSpec::parse(spec.as_bytes()).is_err(), "{spec}");
        }
    }

    #[test]
    fn linux_is_read_as_go_reads_it_and_its_types_are_the_runtimes_business() {
        assert_eq!(
            linux(r#"{"cgroupsPath":"/a","cgroupsPath":"/b","cgroupsPath":null}"#).cgroups_path(),
            "/b"
        );
        assert_eq!(
            linux(r#"{"cgroupsPath":"/a"},"linux":{"hooks":1}"#).cgroups_path(),
            "/a"
        );
        assert_eq!(
            linux(r#"{"cgroupsPath":"/a"},"linux":null"#).cgroups_path(),
            ""
        );
        assert!(
            linux(r#"{"namespaces":[null,{"type":"net","type":"pid","path":null}]}"#)
                .has_own_pid_namespace()
        );
        for other in [
            "null",
            "5",
            r#"{"cgroupsPath":5,"namespaces":null}"#,
            r#"{"namespaces":[5]}"#,
        ] {
            assert!(!linux(other).has_own_pid_namespace(), "{other}");
        }
    }
}
