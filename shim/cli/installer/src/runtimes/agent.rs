//! The node agent as a service of systemd: the unit, and the link that starts the service at boot.
//!
//! `systemctl enable` would make the same link. The installer makes the link, because an image has
//! no running systemd, and `uninstall` must know the link.

use std::path::Path;

use anyhow::Result;

use crate::change::{Change, Plan};
use crate::options::{InstallOptions, Owner};
use crate::running::AGENT_RESTART;
use crate::runtimes::containerd::unit_exists;

const UNIT: &str = include_str!("../../../../../config/systemd/bindguard-agent.service");
/// The name of the unit.
pub const UNIT_NAME: &str = "bindguard-agent.service";
const OWN_UNIT: &str = "/etc/systemd/system/bindguard-agent.service";
const ENABLED: &str = "/etc/systemd/system/multi-user.target.wants/bindguard-agent.service";
/// The units of a package.
const PACKAGED: [&str; 2] = [
    "/usr/lib/systemd/system/bindguard-agent.service",
    "/lib/systemd/system/bindguard-agent.service",
];
/// The folder of the program in the unit as it is shipped.
const SHIPPED_PREFIX: &str = "/usr/local/bin/";

/// Makes systemd read a new unit.
pub const RELOAD_UNITS: &str = "systemctl daemon-reload";
/// The command after which no process runs the agent's program.
pub const STOP: &str = "systemctl stop bindguard-agent";

/// True if systemd knows a unit of the agent.
pub fn has_agent_unit() -> bool {
    unit_exists(Path::new("/"), "bindguard-agent")
}

/// Plans the unit, unless a package has one, and the link.
pub fn plan(options: &InstallOptions) -> Result<Plan> {
    let mut plan = Plan {
        command: Some(AGENT_RESTART.to_owned()),
        ..Plan::default()
    };
    let packaged = PACKAGED.map(Path::new);
    let packaged = packaged
        .into_iter()
        .find(|unit| unit.symlink_metadata().is_ok());
    let unit = packaged.unwrap_or(Path::new(OWN_UNIT));
    if packaged.is_none() {
        let mut text =
            "# The node agent of bindguard, written by `bindguard install --agent`\n".to_owned();
        let shipped = UNIT.replace(SHIPPED_PREFIX, &format!("{}/", options.prefix.display()));
        for line in shipped.lines() {
            if !line.starts_with("# The node agent") {
                text.extend([line, "\n"]);
            }
        }
        let change = Change::text(Owner::Agent, unit, text)?;
        plan.changes.push(change);
    }
    let link = Change::link(Owner::Agent, ENABLED.into(), unit)?;
    plan.changes.push(link);
    Ok(plan)
}
