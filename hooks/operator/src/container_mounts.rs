//! The host's mounts in running containers of pods: binds of the host's root, and mounts that the
//! host has unmounted.
//!
//! A container whose bind of the host's root is private keeps every mount that it was started with.
//! The effect shows only later, when the host unmounts a mount: no create happens then. Namespaces
//! without a pod are left to the doctor's point `pinned`.

use std::path::PathBuf;

use bindguard_core::identity::PodName;
use bindguard_core::places::Places;
use bindguard_core::policy::{Policy, Scope};
use bindguard_core::text::{serialize_paths, shell_word};
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::{Failure, read_mount_table};
use serde::Serialize;

use crate::containers::{inits_of, read_running};
use crate::holders::Trial;
use crate::kubelet_roots::HostMounts;
use crate::pods::{PodContainer, Pods};

/// A container whose init or mount table could not be read, for example because the table is too
/// large.
#[derive(Debug)]
pub struct UnreadContainer {
    /// The container, with its pod.
    pub container: PodContainer,
    pub why: ProcessError,
}

/// The mounts of the host in the running containers of pods.
#[derive(Debug, Default)]
pub struct ContainerMounts {
    /// The number of host-root binds that the host's umounts reach.
    pub following_host: usize,
    /// The number of host-root binds that the host's umounts do not reach.
    pub private: usize,
    /// The containers with a read-only host-root bind that the host's mounts reach. `ro` does not
    /// cover mounts that arrive: they are writable.
    pub open_to_later_mounts: Vec<PodContainer>,
    /// The containers that keep mounts which the host has unmounted.
    pub keepers: Vec<PinnedMounts>,
    /// The containers whose mounts are unknown.
    pub unread: Vec<UnreadContainer>,
}

/// A container that keeps mounts of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PinnedMounts {
    pub pod: PodName,
    pub container: PodContainer,
    /// The places on the host at which the mounts were, at least one.
    #[serde(serialize_with = "serialize_paths")]
    pub places: Vec<PathBuf>,
    /// The command that frees the mounts, or names more commands; none before [`Self::advised`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl PinnedMounts {
    /// The mounts with the mildest command that is not refused.
    pub fn advised(mut self, policy: &Policy, places: &Places) -> Self {
        self.command = self.command_by(&Trial::of(&self.container, policy, places));
        self
    }

    fn command_by(&self, trial: &Trial) -> Option<String> {
        if let Some(pod) = self.pod.display_name().filter(|_| trial.refreshes) {
            return Some(format!("bindguard refresh --pod {pod} --what host-root"));
        }
        for place in &self.places {
            let below_root = place.strip_prefix("/").unwrap_or(place);
            let mut copies = trial.releases.iter();
            if copies.any(|copy| copy.mount_point.ends_with(below_root)) {
                return Some(format!("bindguard release {}", shell_word(place)));
            }
        }
        let place = self.places.first()?;
        Some(format!("bindguard holders {}", shell_word(place)))
    }
}

/// Reads the mount tables of the running containers of pods in turn. Only a single table is in
/// memory at a time.
///
/// # Errors
/// If the host's own mount table cannot be read.
pub fn container_mounts(
    pods: &Pods,
    places: &Places,
    scope: Scope,
) -> Result<ContainerMounts, Failure> {
    let mut found = ContainerMounts::default();
    if pods.running().next().is_none() {
        return Ok(found);
    }
    let inits = inits_of(pods.running().map(|container| container.id.as_str()));
    let table = read_mount_table()?;
    let places = &pods
        .with_runtime(places)
        .with_runtimes_at(table.mount_points());
    let host = HostMounts::of(&table, places);
    for container in pods.running() {
        let Some(init) = inits.get(container.id.as_str()) else {
            continue;
        };
        let table = match read_running(&container.id, *init, HeldProcess::mounts) {
            Ok(Some(table)) => table,
            // A container that ended keeps nothing.
            Ok(None) => continue,
            Err(why) => {
                let container = container.clone();
                found.unread.push(UnreadContainer { container, why });
                continue;
            }
        };
        let mut is_open = false;
        for (bind, is_reached) in host.host_root_binds(&table, scope) {
            if is_reached {
                found.following_host += 1;
                is_open |= bind.attributes.is_read_only();
            } else {
                found.private += 1;
            }
        }
        if is_open {
            found.open_to_later_mounts.push(container.clone());
        }
        if host.pinned_by(&table).is_empty() {
            continue;
        }
        // The host's table is read again, last: a mount that the host made meanwhile, and that a
        // new container copied, is not pinned.
        let places = HostMounts::of(&read_mount_table()?, places).pinned_by(&table);
        if !places.is_empty() {
            found.keepers.push(PinnedMounts {
                pod: container.pod.clone(),
                container: container.clone(),
                places,
                command: None,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use bindguard_core::mount_table::MountTable;

    use super::*;

    /// A refresh of a recursively read-only bind is always refused, and a release needs the record of
    /// the create.
    #[test]
    fn the_command_is_one_that_is_not_refused() {
        let copy = "13 12 8:2 / /host/mnt/disk rw - ext4 b rw\n";
        let copy = MountTable::from_mountinfo(copy.as_bytes())
            .unwrap()
            .entries()[0]
            .clone();
        let container = PodContainer {
            id: "c".to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: None,
            pod: PodName::of_uid("u-1"),
            guarded: None,
            shim_version: None,
        };
        for (refreshes, releases, command) in [
            (
                true,
                vec![copy.clone()],
                "bindguard refresh --pod u-1 --what host-root",
            ),
            (false, vec![copy], "bindguard release /mnt/disk"),
            (false, vec![], "bindguard holders /mnt/a"),
        ] {
            let keeper = PinnedMounts {
                pod: container.pod.clone(),
                container: container.clone(),
                command: None,
                places: vec!["/mnt/a".into(), "/mnt/disk".into()],
            };
            let trial = Trial {
                refreshes,
                releases,
                ..Trial::default()
            };
            assert_eq!(keeper.command_by(&trial).as_deref(), Some(command));
        }
    }
}
