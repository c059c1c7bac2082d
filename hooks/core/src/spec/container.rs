//! What a spec gives its container besides binds: user namespaces, and everything that can put a
//! mount into the container.
//!
//! Mirrors `linux.namespaces`, `linux.uidMappings`, `mounts[].uidMappings`, `linux.maskedPaths`,
//! `linux.readonlyPaths`, `linux.devices`, `linux.resources.devices`, `hooks` and
//! `process.capabilities` of the [runtime spec][spec] as runc and crun read them.
//!
//! [spec]: https://github.com/opencontainers/runtime-spec/blob/main/config.md

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, SeqAccess, Visitor};

use crate::spec::{RawObject, parsed};
use crate::text::lies_below;

/// Limits of what is kept of a spec. A pod can have 30,000 mounts, and the agent keeps the specs of
/// hundreds of containers.
const MAX_DESTINATIONS: usize = 256;
const MAX_DESTINATION: usize = 256;
const MAX_IDMAPPED: usize = 256;

/// A range of ids, as a line of `/proc/PID/uid_map` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct IdRange {
    #[serde(rename = "containerID")]
    inside: u32,
    #[serde(rename = "hostID")]
    outside: u32,
    size: u32,
}

/// The ids that a user namespace maps. Two maps with the same effect are equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdMap(Vec<IdRange>);

/// The ids of users and of groups that a user namespace maps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdMaps {
    /// `uid_map`
    pub users: IdMap,
    /// `gid_map`
    pub groups: IdMap,
}

/// The user namespace that a spec requests for its container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestedUserNamespace {
    OfRuntime,
    /// A user namespace with these ids: new, or existing if the spec names both path and ids.
    WithIds(IdMaps),
    AtPath(PathBuf),
}

/// The ids of an idmapped bind.
#[derive(Debug, Clone, PartialEq, Eq)]
enum BindIds {
    /// The ids of the container's user namespace.
    OfContainer,
    /// These ids, which may be the container's.
    Named(IdMaps),
    /// Ids in a runtime's own form, such as crun's option `idmap=uids=...`.
    OfRuntime(String),
}

/// The user namespaces that a spec requests, for the container and for its idmapped binds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecUsers {
    namespace: RequestedUserNamespace,
    mounts: Mounts,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Mounts {
    destinations: Vec<PathBuf>,
    /// The idmapped binds, by their destinations. A single bind if all have the same ids.
    idmapped: Vec<(PathBuf, BindIds)>,
}

impl SpecUsers {
    /// Reads a spec.
    ///
    /// # Errors
    /// If the bytes are not JSON, or if a value does not have the runtime spec's shape.
    pub fn from_spec(bytes: &[u8]) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        struct Spec {
            linux: Option<Linux>,
            mounts: Option<Mounts>,
        }
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Linux {
            namespaces: Option<Vec<Namespace>>,
            uid_mappings: Option<Vec<IdRange>>,
            gid_mappings: Option<Vec<IdRange>>,
        }
        #[derive(Deserialize)]
        struct Namespace {
            r#type: String,
            path: Option<PathBuf>,
        }
        let Spec { linux, mounts } = serde_json::from_slice(bytes)?;
        let linux = linux.unwrap_or_default();
        let mut namespaces = linux.namespaces.into_iter().flatten();
        let ids = IdMaps::of(linux.uid_mappings, linux.gid_mappings);
        let namespace = match namespaces.find(|namespace| namespace.r#type == "user") {
            None => RequestedUserNamespace::OfRuntime,
            Some(Namespace {
                path: Some(path), ..
            }) if ids == IdMaps::default() && !path.as_os_str().is_empty() => {
                RequestedUserNamespace::AtPath(path)
            }
            Some(_) => RequestedUserNamespace::WithIds(ids),
        };
        Ok(Self {
            namespace,
            mounts: mounts.unwrap_or_default(),
        })
    }

    /// The user namespace of the container.
    pub fn namespace(&self) -> &RequestedUserNamespace {
        &self.namespace
    }

    /// True if one of the first mounts of the spec is at `place`.
    pub fn has_mount_at(&self, place: &Path) -> bool {
        let mut destinations = self.mounts.destinations.iter();
        destinations.any(|destination| destination == place)
    }

    /// True if a bind is idmapped.
    pub fn has_idmapped(&self) -> bool {
        !self.mounts.idmapped.is_empty()
    }

    /// True if a bind at `place` is idmapped.
    pub fn is_idmapped_at(&self, place: &Path) -> bool {
        self.ids_of_mount_at(place).is_some()
    }

    /// True if the ids of the idmapped mount at `place` are those of the container's own user
    /// namespace. As for a volume of a pod, where containerd names the ids for the container and for
    /// the volume.
    pub fn has_ids_of_container_at(&self, place: &Path) -> bool {
        match (self.ids_of_mount_at(place), &self.namespace) {
            (Some(BindIds::OfContainer), _) => true,
            (Some(BindIds::Named(ids)), RequestedUserNamespace::WithIds(own)) => ids == own,
            _ => false,
        }
    }

    /// The ids of the idmapped mount at `place`. Symlinks in the image can move a mount away from
    /// its destination. A mount at an unlisted place therefore belongs to an idmapped bind: the ids
    /// of the idmapped binds if all are equal, otherwise `None`.
    fn ids_of_mount_at(&self, place: &Path) -> Option<&BindIds> {
        let idmapped = &self.mounts.idmapped;
        let mut named = idmapped.iter().rev();
        if let Some((_, ids)) = named.find(|(destination, _)| destination == place) {
            return Some(ids);
        }
        let (_, first) = idmapped.first()?;
        self.mounts.have_equal_ids().then_some(first)
    }
}

impl Mounts {
    fn have_equal_ids(&self) -> bool {
        self.idmapped.windows(2).all(|two| two[0].1 == two[1].1)
    }
}

/// Keeps little of each mount while the list is read.
impl<'de> Deserialize<'de> for Mounts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Mounts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of mounts")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Mounts, A::Error> {
                let mut mounts = Mounts::default();
                while let Some(mount) = list.next_element::<Option<MountIds>>()? {
                    let Some((destination, ids)) = mount.and_then(MountIds::read) else {
                        continue;
                    };
                    if let Some(ids) = ids {
                        if mounts.idmapped.len() < MAX_IDMAPPED {
                            mounts.idmapped.push((destination.clone(), ids));
                        } else if mounts.idmapped.iter().any(|(_, known)| *known != ids) {
                            return Err(Error::custom(format_args!(
                                "more than {MAX_IDMAPPED} idmapped mounts with different ids"
                            )));
                        }
                    }
                    if mounts.destinations.len() < MAX_DESTINATIONS
                        && destination.as_os_str().len() <= MAX_DESTINATION
                    {
                        mounts.destinations.push(destination);
                    }
                }
                // As for a pod: the kubelet gives all volumes the ids of the pod.
                if mounts.have_equal_ids() {
                    mounts.idmapped.truncate(1);
                }
                mounts.idmapped.shrink_to_fit();
                Ok(mounts)
            }
        }
        deserializer.deserialize_seq(List)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MountIds {
    destination: Option<PathBuf>,
    options: Option<Vec<Option<String>>>,
    uid_mappings: Option<Vec<IdRange>>,
    gid_mappings: Option<Vec<IdRange>>,
}

impl MountIds {
    /// The destination, and the ids of an idmapped bind.
    fn read(self) -> Option<(PathBuf, Option<BindIds>)> {
        let mut ids = None;
        let maps = IdMaps::of(self.uid_mappings, self.gid_mappings);
        if maps != IdMaps::default() {
            ids = Some(BindIds::Named(maps));
        }
        for option in self.options.into_iter().flatten().flatten() {
            if option.starts_with("idmap=") || option.starts_with("ridmap=") {
                ids = Some(BindIds::OfRuntime(option));
                break;
            }
            if option == "idmap" || option == "ridmap" {
                ids = ids.or(Some(BindIds::OfContainer));
            }
        }
        Some((self.destination?, ids))
    }
}

impl IdMaps {
    fn of(users: Option<Vec<IdRange>>, groups: Option<Vec<IdRange>>) -> Self {
        Self {
            users: IdMap::of(users.unwrap_or_default()),
            groups: IdMap::of(groups.unwrap_or_default()),
        }
    }
}

impl IdMap {
    fn of(mut ranges: Vec<IdRange>) -> Self {
        ranges.retain(|range| range.size > 0);
        ranges.sort_unstable();
        ranges.dedup_by(|next, range| range.takes_over(next));
        Self(ranges)
    }

    /// Parses the text of a `/proc/PID/uid_map`; `None` if the text is invalid.
    pub fn from_proc(text: &str) -> Option<Self> {
        let mut ranges = Vec::new();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let mut number = || words.next()?.parse().ok();
            ranges.push(IdRange {
                inside: number()?,
                outside: number()?,
                size: number()?,
            });
        }
        Some(Self::of(ranges))
    }

    /// True if root of the host is mapped. The map was read in the host's user namespace.
    pub fn has_root_of_host(&self) -> bool {
        self.0.iter().any(|range| range.outside == 0)
    }
}

impl IdRange {
    /// Appends `next` to this range if `next` begins at the end of this range.
    fn takes_over(&mut self, next: &Self) -> bool {
        let follows = self.inside.checked_add(self.size) == Some(next.inside)
            && self.outside.checked_add(self.size) == Some(next.outside);
        match self.size.checked_add(next.size) {
            Some(size) if follows => self.size = size,
            _ => return false,
        }
        true
    }
}

/// The capability of mount(2): capabilities(7).
const CAP_SYS_ADMIN: &str = "CAP_SYS_ADMIN";

/// The hooks that run at the start of a container and can reach its mount namespace.
const HOOKS: [&str; 5] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
];

/// The filesystems that show no file of the host, and need no device.
const PSEUDO: [&str; 7] = [
    "cgroup", "cgroup2", "devpts", "mqueue", "proc", "sysfs", "tmpfs",
];

/// The parts of a spec that can put a mount into its container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountMakers {
    /// The entries of `mounts`.
    pub(crate) mounts: Vec<SpecMount>,
    /// The paths that the spec masks or makes read-only.
    pub(crate) covered: Vec<PathBuf>,
    /// True if a hook may have mounted something.
    pub(crate) has_hooks: bool,
    has_devices: bool,
    /// True if a process of the container can have `CAP_SYS_ADMIN`, so that it may have mounted
    /// something itself.
    pub container_may_mount: bool,
}

/// An entry of `mounts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecMount {
    /// The path in the container.
    pub destination: PathBuf,
    /// The source of a bind; `None` for other mounts.
    pub source: Option<PathBuf>,
    /// The filesystem type of a mount that is no bind.
    pub fs_type: String,
}

impl MountMakers {
    /// Reads a spec.
    ///
    /// # Errors
    /// If the bytes are not JSON, or if a value does not have the runtime spec's shape.
    pub fn from_spec(bytes: &[u8]) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        struct Spec<'a> {
            mounts: Option<Vec<Option<Mount>>>,
            linux: Option<Linux>,
            #[serde(borrow)]
            hooks: Option<RawObject<'a>>,
            process: Option<Process<'a>>,
        }
        #[derive(Deserialize)]
        struct Mount {
            destination: Option<PathBuf>,
            r#type: Option<String>,
            source: Option<PathBuf>,
            options: Option<Vec<Option<String>>>,
        }
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Linux {
            masked_paths: Option<Vec<PathBuf>>,
            readonly_paths: Option<Vec<PathBuf>>,
            devices: Option<Vec<IgnoredAny>>,
            resources: Option<Resources>,
        }
        #[derive(Deserialize)]
        struct Resources {
            devices: Option<Vec<DeviceRule>>,
        }
        /// Without a type, the rule is about all devices.
        #[derive(Deserialize)]
        struct DeviceRule {
            allow: Option<bool>,
            r#type: Option<String>,
        }
        #[derive(Deserialize)]
        struct Process<'a> {
            #[serde(borrow)]
            capabilities: Option<RawObject<'a>>,
        }
        let spec: Spec<'_> = serde_json::from_slice(bytes)?;
        let linux = spec.linux.unwrap_or_default();
        let mut has_devices = linux.devices.is_some_and(|devices| !devices.is_empty());
        let rules = linux.resources.and_then(|resources| resources.devices);
        for rule in rules.unwrap_or_default() {
            has_devices |= rule.allow == Some(true) && rule.r#type.as_deref() != Some("c");
        }
        let mut mounts = Vec::new();
        for mount in spec.mounts.into_iter().flatten().flatten() {
            let fs_type = mount.r#type.unwrap_or_default();
            let mut words = mount.options.iter().flatten().flatten();
            let is_bind = fs_type == "bind" || words.any(|it| it == "bind" || it == "rbind");
            mounts.push(SpecMount {
                destination: mount.destination.unwrap_or_default(),
                source: is_bind.then(|| mount.source.unwrap_or_default()),
                fs_type,
            });
        }
        let mut covered = linux.masked_paths.unwrap_or_default();
        covered.extend(linux.readonly_paths.unwrap_or_default());
        let mut has_hooks = false;
        for (name, list) in spec.hooks.iter().flat_map(RawObject::entries) {
            if HOOKS.contains(&name) {
                let hooks: Option<Vec<IgnoredAny>> = parsed(list)?;
                has_hooks |= hooks.is_some_and(|hooks| !hooks.is_empty());
            }
        }
        let capabilities = spec.process.and_then(|process| process.capabilities);
        // Without a list, the runtime decides.
        let mut container_may_mount = capabilities.is_none();
        for (_, set) in capabilities.iter().flat_map(RawObject::entries) {
            let names: Option<Vec<String>> = parsed(set)?;
            for name in names.unwrap_or_default() {
                // crun compares the names without regard to case: cap_from_name(3).
                container_may_mount |= name.eq_ignore_ascii_case(CAP_SYS_ADMIN) || name == "ALL";
            }
        }
        Ok(Self {
            mounts,
            covered,
            has_hooks,
            has_devices,
            container_may_mount,
        })
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

    /// The paths below `place` at which the spec mounts, masks or protects something.
    pub(crate) fn paths_below(&self, place: &Path) -> impl Iterator<Item = &Path> {
        let destinations = self.mounts.iter().map(|mount| &mount.destination);
        let all = destinations.chain(&self.covered).map(PathBuf::as_path);
        all.filter(move |path| lies_below(path, place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: &str = r#"[{"containerID":0,"hostID":100000,"size":65536}]"#;

    fn ids() -> IdMaps {
        let map = IdMap::from_proc("         0     100000      65536\n").unwrap();
        IdMaps {
            users: map.clone(),
            groups: map,
        }
    }

    fn users(linux: &str, mounts: &str) -> SpecUsers {
        SpecUsers::from_spec(format!(r#"{{"linux":{linux},"mounts":{mounts}}}"#).as_bytes())
            .unwrap()
    }

    #[test]
    fn a_spec_names_the_user_namespace_of_its_container() {
        let maps = format!(r#""uidMappings":{IDS},"gidMappings":{IDS}"#);
        for (linux, expected) in [
            ("null".to_owned(), RequestedUserNamespace::OfRuntime),
            (
                r#"{"namespaces":[{"type":"mount"}]}"#.to_owned(),
                RequestedUserNamespace::OfRuntime,
            ),
            // Without a namespace nothing is mapped.
            (format!("{{{maps}}}"), RequestedUserNamespace::OfRuntime),
            (
                format!(r#"{{"namespaces":[{{"type":"user"}}],{maps}}}"#),
                RequestedUserNamespace::WithIds(ids()),
            ),
            // As containerd writes it for the containers of a pod.
            (
                format!(r#"{{"namespaces":[{{"type":"user","path":"/proc/7/ns/user"}}],{maps}}}"#),
                RequestedUserNamespace::WithIds(ids()),
            ),
            (
                r#"{"namespaces":[{"type":"user","path":"/proc/7/ns/user"}]}"#.to_owned(),
                RequestedUserNamespace::AtPath("/proc/7/ns/user".into()),
            ),
            (
                r#"{"namespaces":[{"type":"user"}]}"#.to_owned(),
                RequestedUserNamespace::WithIds(IdMaps::default()),
            ),
        ] {
            assert_eq!(*users(&linux, "null").namespace(), expected, "{linux}");
        }
        assert!(SpecUsers::from_spec(br#"{"linux":{"namespaces":7}}"#).is_err());
    }

    #[test]
    fn an_idmapped_bind_has_the_ids_of_its_container_or_other_ids() {
        let mount = |rest: &str| format!(r#"{{"destination":"/a",{rest}}}"#);
        let maps = |ids: &str| format!(r#""uidMappings":{ids},"gidMappings":{ids}"#);
        let linux = format!(r#"{{"namespaces":[{{"type":"user"}}],{}}}"#, maps(IDS));
        let own = [r#""options":["ridmap"]"#.to_owned(), maps(IDS)];
        let other = [
            maps(&IDS.replace("100000", "200000")),
            format!(r#""uidMappings":{IDS}"#),
            r#""options":["idmap=uids=0-1-10"]"#.to_owned(),
        ];
        for (rest, is_own) in own
            .map(|it| (it, true))
            .into_iter()
            .chain(other.map(|it| (it, false)))
        {
            let users = users(&linux, &format!("[null,{}]", mount(&rest)));
            for place in ["/a/", "/resolved/a"].map(Path::new) {
                assert!(users.is_idmapped_at(place), "{rest}");
                assert_eq!(users.has_ids_of_container_at(place), is_own, "{rest}");
            }
        }
        let plain = users(
            &linux,
            &format!("[{}]", mount(r#""options":["rbind","ro"]"#)),
        );
        assert!(!plain.is_idmapped_at("/a".as_ref()));
        assert!(!plain.has_ids_of_container_at("/a".as_ref()));
        // The ids of a namespace that the spec only names are not known.
        let by_path = r#"{"namespaces":[{"type":"user","path":"/proc/7/ns/user"}]}"#;
        let by_path = users(by_path, &format!("[{}]", mount(&maps(IDS))));
        assert!(!by_path.has_ids_of_container_at("/a".as_ref()));
        let two = format!(
            r#"[{},{{"destination":"/b","uidMappings":{IDS}}}]"#,
            mount(r#""options":["idmap"]"#)
        );
        let two = users(&linux, &two);
        assert!(two.has_ids_of_container_at("/a".as_ref()));
        assert!(
            !two.has_ids_of_container_at("/other".as_ref()),
            "they differ"
        );
    }

    /// The agent keeps the specs of hundreds of containers.
    #[test]
    fn little_is_kept_of_a_spec_with_thousands_of_mounts() {
        let mounts = |ids: &dyn Fn(usize) -> String| {
            let mount = |at: usize| format!(r#"{{"destination":"/m/{at}",{}}}"#, ids(at));
            format!("[{}]", (0..5000).map(mount).collect::<Vec<_>>().join(","))
        };
        let pod = users("null", &mounts(&|_| format!(r#""uidMappings":{IDS}"#)));
        assert_eq!(pod.mounts.idmapped.len(), 1);
        assert_eq!(pod.mounts.destinations.len(), MAX_DESTINATIONS);
        assert!(pod.has_mount_at("/m/7".as_ref()));
        assert!(pod.is_idmapped_at("/m/4999".as_ref()));
        let differ = mounts(&|at| format!(r#""options":["idmap=uids=0-{at}-10"]"#));
        let differ = format!(r#"{{"mounts":{differ}}}"#);
        assert!(SpecUsers::from_spec(differ.as_bytes()).is_err());
    }

    #[test]
    fn maps_with_the_same_effect_are_equal() {
        let map = |text| IdMap::from_proc(text).unwrap();
        assert_eq!(map("10 20 5\n0 10 10\n"), map("0 10 15"));
        assert_ne!(map("0 10 10\n10 21 5\n"), map("0 10 15"));
        assert_eq!(
            map("4294967295 4294967295 1\n0 0 4294967295\n"),
            map("0 0 4294967295\n4294967295 4294967295 1")
        );
        assert_eq!(IdMap::from_proc("0 1"), None);
    }

    #[test]
    fn a_spec_lists_its_destinations_and_its_idmapped_binds() {
        let plain = users("null", r#"[{"destination":"/a"},{"destination":"/b"}]"#);
        assert!(plain.has_mount_at(Path::new("/b")));
        assert!(!plain.has_mount_at(Path::new("/c")));
        assert!(!plain.has_idmapped());
        let idmapped = users("null", r#"[{"destination":"/a","options":["idmap"]}]"#);
        assert!(idmapped.has_idmapped());
    }

    #[test]
    fn a_map_has_root_of_the_host_if_a_range_begins_there() {
        let map = |text: &str| IdMap::from_proc(text).unwrap();
        assert!(map("0 100000 10\n10 0 1\n").has_root_of_host());
        assert!(!map("0 100000 10\n10 1 1\n").has_root_of_host());
        // An empty range maps nothing.
        assert!(!map("0 0 0\n").has_root_of_host());
    }

    #[test]
    fn one_idmapped_mount_of_other_ids_above_the_limit_is_an_error() {
        let read = |count: usize| {
            let mounts: Vec<String> = (0..count)
                .map(|i| format!(r#"{{"destination":"/{i}","options":["idmap=uids={i}"]}}"#))
                .collect();
            let spec = format!(r#"{{"mounts":[{}]}}"#, mounts.join(","));
            SpecUsers::from_spec(spec.as_bytes())
        };
        assert!(read(MAX_IDMAPPED).is_ok());
        assert!(read(MAX_IDMAPPED + 1).is_err());
    }
}

#[cfg(test)]
mod mount_makers_tests {
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
            assert_eq!(makers(spec).container_may_mount, may_mount, "{spec}");
        }
        assert!(makers(r#"{"hooks":{"createContainer":[{"path":"/h"}]}}"#).has_hooks);
        assert!(!makers(r#"{"hooks":{"createContainer":[],"poststop":[{}]}}"#).has_hooks);
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
        let sources: Vec<_> = spec.mounts.iter().map(|it| it.source.clone()).collect();
        assert_eq!(sources, [Some("/".into()), None, Some(PathBuf::default())]);
    }
}
