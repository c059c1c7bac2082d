//! The host's mounts in running containers of pods: binds of the host's root, and mounts that the host has unmounted.
//!
//! A container whose bind of the host's root is private keeps every mount that it was started with. That shows only later, when
//! the host unmounts one: no create happens then. Namespaces without a pod are left to the doctor's point `pinned`.

use std::path::PathBuf;

use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_sys::{MountinfoError, read_mount_table};

use crate::host_mounts::HostMounts;
use crate::node::{hold_init, inits_of};
use crate::pods::{ContainerState, PodContainer, Pods};

/// The mounts of the host in the running containers of pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerMounts {
    /// The number of host-root binds that the host's umounts reach.
    pub following_host: usize,
    /// The number of host-root binds that the host's umounts do not reach.
    pub private: usize,
    /// The containers that keep mounts which the host has unmounted.
    pub keepers: Vec<Keeper>,
}

/// A container that keeps mounts of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keeper {
    /// The container, with its pod.
    pub container: PodContainer,
    /// The places on the host at which the mounts were, at least one.
    pub places: Vec<PathBuf>,
}

/// Reads the mount tables of the running containers of pods, one after the other.
///
/// # Errors
/// If the host's own mount table cannot be read.
pub fn container_mounts(pods: &Pods, places: &Places, scope: Scope) -> Result<ContainerMounts, MountinfoError> {
    let running = |it: &&PodContainer| it.state == Some(ContainerState::Running) && it.name.is_some();
    let running: Vec<&PodContainer> = pods.containers.iter().filter(running).collect();
    if running.is_empty() {
        return Ok(ContainerMounts::default());
    }
    let inits = inits_of(running.iter().map(|container| container.id.as_str()));
    let table = read_mount_table()?;
    let host = HostMounts::of(&table, places);
    let (mut found, mut suspects) = (ContainerMounts::default(), Vec::new());
    for container in running {
        // A container that ends meanwhile keeps nothing.
        let Some(table) = inits.get(container.id.as_str()).and_then(|init| table_of(&container.id, *init)) else {
            continue;
        };
        for is_reached in host.host_root_binds(&table, scope) {
            *if is_reached { &mut found.following_host } else { &mut found.private } += 1;
        }
        if !host.pinned_by(&table).is_empty() {
            suspects.push((container, table));
        }
    }
    if !suspects.is_empty() {
        // Read last: a mount that the host made meanwhile, and that a new container copied, is no pinned one.
        let table = read_mount_table()?;
        let host = HostMounts::of(&table, places);
        let keeper = |(container, table): (&PodContainer, MountTable)| {
            let places = host.pinned_by(&table);
            (!places.is_empty()).then(|| Keeper { container: container.clone(), places })
        };
        found.keepers = suspects.into_iter().filter_map(keeper).collect();
    }
    Ok(found)
}

fn table_of(container: &str, init: u32) -> Option<MountTable> {
    let text = hold_init(container, init).ok()?.read("mountinfo").ok()?;
    MountTable::from_mountinfo(&text).ok()
}
