//! The entries of a spec that can put a mount into the container: mounts, masked and read-only
//! paths, hooks, devices, and the container's right to mount.
//!
//! Mirrors `mounts`, `linux.maskedPaths`, `linux.readonlyPaths`, `linux.devices`,
//! `linux.resources.devices`, `hooks` and `process.capabilities` of the [runtime spec][spec].
//!
//! [spec]: https://github.com/opencontainers/runtime-spec/blob/main/config.md

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::paths::lies_below;

/// The capability of mount(2): capabilities(7).
const CAP_SYS_ADMIN: &str = "CAP_SYS_ADMIN";

/// The filesystems that show no file of the host, and need no device.
const PSEUDO: [&str; 7] = [
    "cgroup", "cgroup2", "devpts", "mqueue", "proc", "sysfs", "tmpfs",
];

/// The parts of a spec that can put a mount into its container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountMakers {
    mounts: Vec<SpecMount>,
    covered: Vec<PathBuf>,
    has_hooks: bool,
    has_devices: bool,
    container_may_mount: bool,
}

/// An entry of `mounts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecMount {
    /// The position in `mounts`.
    pub index: usize,
    /// The path in the container.
    pub destination: PathBuf,
    /// The source of a bind; `None` for other mounts.
    pub source: Option<PathBuf>,
    /// The filesystem type of a mount that is no bind.
    pub fs_type: String,
}

#[derive(Debug, Deserialize)]
struct Spec {
    mounts: Option<Vec<Option<RawMount>>>,
    linux: Option<Linux>,
    hooks: Option<Hooks>,
    process: Option<Process>,
}

#[derive(Debug, Deserialize)]
struct RawMount {
    destination: Option<PathBuf>,
    #[serde(rename = "type")]
    kind: Option<String>,
    source: Option<PathBuf>,
    options: Option<Vec<Option<String>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Linux {
    masked_paths: Option<Vec<PathBuf>>,
    readonly_paths: Option<Vec<PathBuf>>,
    devices: Option<Vec<IgnoredAny>>,
    resources: Option<Resources>,
}

#[derive(Debug, Deserialize)]
struct Resources {
    devices: Option<Vec<DeviceRule>>,
}

/// A rule for devices. Without a type it is about all devices.
#[derive(Debug, Deserialize)]
struct DeviceRule {
    allow: Option<bool>,
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// The hooks that run before the program of the container and can reach its mount namespace.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Hooks {
    prestart: Option<Vec<IgnoredAny>>,
    create_runtime: Option<Vec<IgnoredAny>>,
    create_container: Option<Vec<IgnoredAny>>,
    start_container: Option<Vec<IgnoredAny>>,
    poststart: Option<Vec<IgnoredAny>>,
}

#[derive(Debug, Deserialize)]
struct Process {
    capabilities: Option<Capabilities>,
}

#[derive(Debug, Deserialize)]
struct Capabilities {
    bounding: Option<Vec<String>>,
    effective: Option<Vec<String>>,
    inheritable: Option<Vec<String>>,
    permitted: Option<Vec<String>>,
    ambient: Option<Vec<String>>,
}

impl MountMakers {
    /// Reads a spec.
    ///
    /// # Errors
    /// If the bytes are not JSON, or if a value does not have the runtime spec's shape.
    pub fn from_spec(bytes: &[u8]) -> serde_json::Result<Self> {
        let spec: Spec = serde_json::from_slice(bytes)?;
        let linux = spec.linux.unwrap_or_default();
        let mut has_devices = linux.devices.is_some_and(|devices| !devices.is_empty());
        for rule in linux
            .resources
            .and_then(|it| it.devices)
            .unwrap_or_default()
        {
            has_devices |= rule.allow == Some(true) && rule.kind.as_deref() != Some("c");
        }
        let mut mounts = Vec::new();
        for (index, mount) in spec.mounts.unwrap_or_default().into_iter().enumerate() {
            mounts.extend(mount.map(|mount| mount.at(index)));
        }
        let mut covered = linux.masked_paths.unwrap_or_default();
        covered.extend(linux.readonly_paths.unwrap_or_default());
        let capabilities = spec.process.and_then(|process| process.capabilities);
        Ok(Self {
            mounts,
            covered,
            has_hooks: spec.hooks.is_some_and(|hooks| hooks.has_any()),
            has_devices,
            // Without a list, the runtime decides.
            container_may_mount: capabilities.is_none_or(|sets| sets.has_sys_admin()),
        })
    }

    /// The entries of `mounts`.
    pub fn mounts(&self) -> &[SpecMount] {
        &self.mounts
    }

    /// The paths that the spec masks or makes read-only.
    pub fn covered_paths(&self) -> impl Iterator<Item = &Path> {
        self.covered.iter().map(PathBuf::as_path)
    }

    /// True if a hook may have mounted something.
    pub fn has_hooks(&self) -> bool {
        self.has_hooks
    }

    /// True if nothing but the binds can have given the container a file of the host: no hook, no
    /// device, no other filesystem, and no right to mount.
    pub fn has_binds_alone(&self) -> bool {
        let mut mounts = self.mounts.iter();
        !self.has_hooks
            && !self.has_devices
            && !self.container_may_mount
            && mounts.all(|it| it.source.is_some() || PSEUDO.contains(&it.fs_type.as_str()))
    }

    /// True if a process of the container can have `CAP_SYS_ADMIN`, so that it may have mounted
    /// something itself.
    pub fn container_may_mount(&self) -> bool {
        self.container_may_mount
    }

    /// The paths below `place` at which the spec mounts, masks or protects something.
    pub fn paths_below(&self, place: &Path) -> impl Iterator<Item = &Path> {
        let destinations = self.mounts.iter().map(|mount| &*mount.destination);
        let all = destinations.chain(self.covered_paths());
        all.filter(move |path| lies_below(path, place))
    }
}

impl RawMount {
    fn at(self, index: usize) -> SpecMount {
        let options = self.options.unwrap_or_default();
        let fs_type = self.kind.unwrap_or_default();
        let mut words = options.iter().flatten();
        let is_bind = fs_type == "bind" || words.any(|it| it == "bind" || it == "rbind");
        SpecMount {
            index,
            destination: self.destination.unwrap_or_default(),
            source: is_bind.then(|| self.source.unwrap_or_default()),
            fs_type,
        }
    }
}

impl Hooks {
    fn has_any(&self) -> bool {
        let all = [
            &self.prestart,
            &self.create_runtime,
            &self.create_container,
            &self.start_container,
            &self.poststart,
        ];
        all.into_iter().flatten().any(|hooks| !hooks.is_empty())
    }
}

impl Capabilities {
    fn has_sys_admin(&self) -> bool {
        let sets = [
            &self.bounding,
            &self.effective,
            &self.inheritable,
            &self.permitted,
            &self.ambient,
        ];
        let mut names = sets.into_iter().flatten().flatten();
        // crun compares the names without regard to case: cap_from_name(3).
        names.any(|name| name.eq_ignore_ascii_case(CAP_SYS_ADMIN) || name == "ALL")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn makers(spec: &str) -> MountMakers {
        MountMakers::from_spec(spec.as_bytes()).unwrap()
    }

    #[test]
    fn a_container_without_the_capability_cannot_mount() {
        for (spec, may_mount) in [
            ("{}", true),
            (r#"{"process":{}}"#, true),
            (r#"{"process":{"capabilities":{}}}"#, false),
            (
                r#"{"process":{"capabilities":{"bounding":["CAP_CHOWN"]}}}"#,
                false,
            ),
            (
                r#"{"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}}}"#,
                true,
            ),
            (
                r#"{"process":{"capabilities":{"ambient":["CAP_SYS_ADMIN"]}}}"#,
                true,
            ),
            (
                r#"{"process":{"capabilities":{"effective":["cap_sys_admin"]}}}"#,
                true,
            ),
        ] {
            assert_eq!(makers(spec).container_may_mount(), may_mount, "{spec}");
        }
        assert!(makers(r#"{"hooks":{"createContainer":[{"path":"/h"}]}}"#).has_hooks());
        assert!(!makers(r#"{"hooks":{"createContainer":[],"poststop":[{}]}}"#).has_hooks());
    }

    #[test]
    fn a_container_may_have_files_of_the_host_besides_its_binds() {
        let spec = |more: &str| format!(r#"{{"process":{{"capabilities":{{}}}}{more}}}"#);
        for (more, has_binds_alone) in [
            ("", true),
            (
                r#","mounts":[{"type":"proc"},{"type":"tmpfs"},{"type":"bind","source":"/s"}]"#,
                true,
            ),
            (r#","mounts":[{"type":"ext4","source":"/dev/sda"}]"#, false),
            (r#","hooks":{"prestart":[{}]}"#, false),
            (r#","linux":{"devices":[]}"#, true),
            (r#","linux":{"devices":[{"path":"/dev/fuse"}]}"#, false),
            (
                r#","linux":{"resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"type":"c"}]}}"#,
                true,
            ),
            (
                r#","linux":{"resources":{"devices":[{"allow":true,"access":"rwm"}]}}"#,
                false,
            ),
        ] {
            let spec = spec(more);
            assert_eq!(makers(&spec).has_binds_alone(), has_binds_alone, "{spec}");
        }
        assert!(!makers("{}").has_binds_alone());
    }

    #[test]
    fn paths_below_a_bind_are_found_by_name() {
        let spec = makers(
            r#"{"mounts":[null,{"destination":"/host","source":"/","options":["rbind"]},
                {"destination":"/host/proc","type":"proc","source":"proc"},{"destination":"/hosts","type":"bind"}],
                "linux":{"maskedPaths":["/proc/kcore"],"readonlyPaths":["/data/etc"]}}"#,
        );
        let found = |place: &str| {
            spec.paths_below(Path::new(place))
                .next()
                .and_then(Path::to_str)
        };
        assert_eq!(found("/host"), Some("/host/proc"));
        assert_eq!(found("/hosts"), None);
        assert_eq!(found("/data"), Some("/data/etc"));
        let sources: Vec<_> = spec.mounts().iter().map(|it| it.source.clone()).collect();
        assert_eq!(sources, [Some("/".into()), None, Some(PathBuf::default())]);
        assert_eq!(spec.mounts()[0].index, 1);
    }
}
