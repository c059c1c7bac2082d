//! systemd as cgroup manager: the machine's own, for a node that was set up with it ([`Setup::systemd`](crate::Setup::systemd)).
//!
//! Such a node's containers are scopes in one slice that has the node's name. A slice's dashes would be levels, so they are
//! written otherwise: `bgt-7-0` has `bgt_7_0.slice`, and in it `bgt-7-0-web.scope` and the `cri-containerd-….scope` of pods.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::process::host;

/// Only a machine that systemd has booted has this, see sd_booted(3).
const BOOTED: &str = "/run/systemd/system";
/// The mount point of version 2 if it is the only hierarchy.
const UNIFIED: &str = "/sys/fs/cgroup";

/// Why it cannot make cgroups here, if so.
pub(crate) fn missing() -> Option<String> {
    if !Path::new(BOOTED).exists() {
        Some("systemd has not booted this machine".to_owned())
    } else if !Path::new(UNIFIED).join("cgroup.controllers").exists() {
        Some("cgroup v2 is not alone here".to_owned())
    } else {
        None
    }
}

/// The slice for the containers of the node `name`.
pub(crate) fn slice_of(name: &str) -> String {
    format!("{}.slice", name.replace('-', "_"))
}

/// The cgroup of that slice, if it exists.
pub(crate) fn cgroup_of(name: &str) -> PathBuf {
    Path::new(UNIFIED).join(slice_of(name))
}

/// A property of a unit, by its name.
pub fn property(unit: &str, name: &str) -> Result<String> {
    Ok(host(["systemctl", "show", "--value", "--property", name, unit])?.trim().to_owned())
}

/// The units that systemd knows under this pattern, dead and failed ones included.
pub fn units(pattern: &str) -> Result<Vec<String>> {
    let table = host(["systemctl", "list-units", "--all", "--plain", "--no-legend", pattern])?;
    Ok(table.lines().filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect())
}
