//! subpathRemountRecover: re-binds a stale volume-subpath with the guard's re-bind.
//!
//! kubediag unmounts whatever path it is given. Here the path must be a volume-subpath of a
//! kubelet's root, written without symlinks, `..` or doubled slashes, and its mount must be stale.
//! Where no re-bind is possible the stale mount is detached, as kubediag does: then the kubelet
//! binds the current file when it next starts the container.

use std::path::{Path, PathBuf};
use std::time::Instant;

use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::report::{Actor, BindReport, RebindLine, Report};
use bindguard_operator::pods::Pods;
use bindguard_operator::{NotASubpath, RepairAct, exact_subpath, repair_node};

/// Why a path is not repaired.
#[derive(Debug, thiserror::Error)]
pub enum NotRecovered {
    #[error(transparent)]
    NotASubpath(#[from] NotASubpath),
    #[error("no container of this node uses {}", .0.display())]
    Unknown(PathBuf),
    #[error("{} is {verdict}, and only a stale mount is replaced", path.display())]
    NotStale {
        /// The subpath.
        path: PathBuf,
        /// Its verdict and the reason.
        verdict: String,
    },
    #[error("{}: {outcome}", path.display())]
    Failed {
        /// The subpath.
        path: PathBuf,
        /// The outcome of the last try.
        outcome: String,
    },
}

/// Repairs the subpath at a path, until it is current or its stale mount is gone. It may wait for a
/// filesystem.
pub fn recover(path: &Path, policy: &Policy, places: &Places) -> Result<RebindLine, NotRecovered> {
    let start = Instant::now();
    let subpath = exact_subpath(path, places)?;
    let rebound = repaired(&subpath, RepairAct::Rebind, policy, places)?;
    let bind = match rebound.outcome {
        Some(_) if rebound.is_repaired() => rebound,
        Some(_) => repaired(&subpath, RepairAct::Detach, policy, places)?,
        None => return Err(not_stale(path, &rebound)),
    };
    if !bind.is_repaired() {
        let outcome = bind
            .outcome
            .as_ref()
            .map_or_else(|| "left as it is".to_owned(), ToString::to_string);
        return Err(NotRecovered::Failed {
            path: path.to_owned(),
            outcome,
        });
    }
    let mut report = Report {
        binds: vec![bind],
        ..Report::default()
    };
    report.set_duration(start.elapsed());
    let (pod_uid, volume) = (subpath.pod_uid(), subpath.volume());
    Ok(RebindLine::new(Actor::Agent, pod_uid, volume, &report))
}

fn repaired(
    subpath: &VolumeSubpath,
    act: RepairAct,
    policy: &Policy,
    places: &Places,
) -> Result<BindReport, NotRecovered> {
    let report = repair_node(policy, places, &Pods::default(), act, |other| {
        other == subpath
    });
    let bind = report.binds.into_iter().next().map(|bind| bind.bind);
    bind.ok_or_else(|| NotRecovered::Unknown(subpath.path()))
}

fn not_stale(path: &Path, bind: &BindReport) -> NotRecovered {
    let reason = bind
        .reason()
        .map(|reason| format!(": {reason}"))
        .unwrap_or_default();
    NotRecovered::NotStale {
        path: path.to_owned(),
        verdict: format!("{}{reason}", bind.verdict()),
    }
}
