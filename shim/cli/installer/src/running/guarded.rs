//! The runtimes of the running daemons that call the guard.

use anyhow::Result;
use bindguard_operator::guarded_runtimes::GuardedRuntimes;

use super::{Daemon, containerds, cri_status, crio_config, docker_info};

/// The runtimes of each running daemon, or an error if a daemon does not report its configuration.
pub fn guarded_runtimes() -> Vec<Result<GuardedRuntimes>> {
    let containerds = containerds();
    let of_containerd = containerds.iter().filter_map(|containerd| {
        let config = cri_status::active_config(containerd).transpose()?;
        Some(config.map(|config| GuardedRuntimes::of_containerd(&config)))
    });
    let of_docker = Daemon::named("dockerd").into_iter().map(|_| {
        docker_info().map(|info| {
            GuardedRuntimes::from_config("dockerd", &info, "Runtimes", "DefaultRuntime")
        })
    });
    let of_crio = Daemon::named("crio").into_iter().map(|_| {
        let config = serde_json::to_value(crio_config()?)?;
        Ok(GuardedRuntimes::from_config(
            "crio",
            &config["crio"]["runtime"],
            "runtimes",
            "default_runtime",
        ))
    });
    of_containerd.chain(of_docker).chain(of_crio).collect()
}
