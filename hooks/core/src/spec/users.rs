//! The user namespaces that a spec requests, for the container and for its idmapped binds.
//!
//! Mirrors `linux.namespaces`, `linux.uidMappings` and `mounts[].uidMappings` of the [runtime
//! spec][spec] as runc and crun read them.
//!
//! [spec]: https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// Limits of what is kept of a spec. A pod can have 30,000 mounts, and the agent keeps the specs of
/// hundreds of containers.
const MAX_DESTINATIONS: usize = 256;
const MAX_DESTINATION: usize = 256;
const MAX_IDMAPPED: usize = 256;

/// A range of ids, as a line of `/proc/PID/uid_map` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "camelCase")]
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

/// The user namespaces that a spec requests.
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

#[derive(Debug, Deserialize)]
struct Spec {
    linux: Option<Linux>,
    mounts: Option<Mounts>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Linux {
    namespaces: Option<Vec<Namespace>>,
    uid_mappings: Option<Vec<IdRange>>,
    gid_mappings: Option<Vec<IdRange>>,
}

#[derive(Debug, Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    path: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    destination: Option<PathBuf>,
    options: Option<Vec<Option<String>>>,
    uid_mappings: Option<Vec<IdRange>>,
    gid_mappings: Option<Vec<IdRange>>,
}

impl SpecUsers {
    /// Reads a spec.
    ///
    /// # Errors
    /// If the bytes are not JSON, or if a value does not have the runtime spec's shape.
    pub fn from_spec(bytes: &[u8]) -> serde_json::Result<Self> {
        let Spec { linux, mounts } = serde_json::from_slice(bytes)?;
        Ok(Self {
            namespace: linux.unwrap_or_default().user_namespace(),
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

    fn add(&mut self, mount: Mount) -> Result<(), String> {
        let ids = mount.ids();
        let Some(destination) = mount.destination else {
            return Ok(());
        };
        if let Some(ids) = ids {
            if self.idmapped.len() < MAX_IDMAPPED {
                self.idmapped.push((destination.clone(), ids));
            } else if self.idmapped.iter().any(|(_, known)| *known != ids) {
                return Err(format!(
                    "more than {MAX_IDMAPPED} idmapped mounts with different ids"
                ));
            }
        }
        if self.destinations.len() < MAX_DESTINATIONS
            && destination.as_os_str().len() <= MAX_DESTINATION
        {
            self.destinations.push(destination);
        }
        Ok(())
    }
}

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
                while let Some(mount) = list.next_element::<Option<Mount>>()? {
                    let added = mounts.add(mount.unwrap_or_default());
                    added.map_err(A::Error::custom)?;
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

impl Linux {
    fn user_namespace(self) -> RequestedUserNamespace {
        let namespaces = self.namespaces.unwrap_or_default();
        let mut users = namespaces.into_iter().filter(|it| it.kind == "user");
        let Some(namespace) = users.next() else {
            return RequestedUserNamespace::OfRuntime;
        };
        let ids = IdMaps::of(self.uid_mappings, self.gid_mappings);
        match namespace.path.filter(|path| !path.as_os_str().is_empty()) {
            Some(path) if ids == IdMaps::default() => RequestedUserNamespace::AtPath(path),
            Some(_) | None => RequestedUserNamespace::WithIds(ids),
        }
    }
}

impl Mount {
    /// `None` for a bind that is not idmapped.
    fn ids(&self) -> Option<BindIds> {
        let mut is_of_container = false;
        for option in self.options.iter().flatten().flatten() {
            if option.starts_with("idmap=") || option.starts_with("ridmap=") {
                return Some(BindIds::OfRuntime(option.clone()));
            }
            is_of_container |= option == "idmap" || option == "ridmap";
        }
        let ids = IdMaps::of(self.uid_mappings.clone(), self.gid_mappings.clone());
        if ids != IdMaps::default() {
            return Some(BindIds::Named(ids));
        }
        is_of_container.then_some(BindIds::OfContainer)
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
