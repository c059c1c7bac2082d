//! `bindguard refresh --container` of Docker or Podman. The container's spec has the host path of
//! each bind.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, HelperProcess, HostRoots, TuckRecords,
    refresh_container,
};
use bindguard_operator::engines::{
    ContainersOfNode, EngineContainer, engine_containers, rootless_owner, state_folders,
};
use bindguard_operator::node::hold_init;
use bindguard_sys::bundle::read_spec;

use super::{Refresh, RefreshReport, What, record};

/// The running container of an engine whose id begins with this text; `None` without such a
/// container.
///
/// # Errors
/// If several containers match, or a rootless container of a user.
pub(super) fn container_with_id(id: &str) -> anyhow::Result<Option<EngineContainer>> {
    let root = Path::new("/");
    let mut found = engine_containers(&state_folders(root));
    found.retain(|container| !id.is_empty() && container.id.starts_with(id));
    ensure!(
        found.len() < 2,
        "more than one container has an id that begins with {id}"
    );
    if let (true, Some(user)) = (found.is_empty(), rootless_owner(root, id)) {
        bail!(
            "refresh container {id}: it is a rootless container of user {user}, whose host paths are in a mount namespace of \
             that user; restart it to use the new files"
        );
    }
    Ok(found.pop())
}

/// Refreshes the binds that `--what` names; by default, the single files that the container binds.
pub(super) fn refresh(
    helper: &HelperProcess,
    container: &EngineContainer,
    verb: &Refresh,
    config: &Config,
) -> anyhow::Result<RefreshReport> {
    let name = format!("{} container {}", container.engine.name(), container.id);
    let doing = || format!("refresh {name}");
    // Since the read of the state, the kernel may have reused the pid.
    let process = hold_init(&container.id, container.pid).with_context(doing)?;
    let bytes = read_spec(&container.bundle).with_context(doing)?;
    let spec = SpecView::from_bytes(&bytes).with_context(doing)?;
    let running = ContainersOfNode::at(Path::new("/"));
    let (places, bundle) = (config.places(), container.bundle.as_path());
    let mut errors = Vec::new();
    let files: Box<dyn CurrentFiles + '_> = match verb.what {
        // An engine has no subPaths.
        What::Subpaths | What::HostFiles => {
            let binds = FileBind::of_spec(&spec);
            let (files, failed) = BoundFiles::open(binds, container.pid, &running);
            errors = failed;
            Box::new(files)
        }
        What::Volumes => {
            let mounts = BoundMounts::of_engine(bundle, &running, places, None);
            Box::new(mounts.with_context(doing)?)
        }
        What::HostRoot => {
            let roots = HostRoots::open(bundle, config.policy(), places);
            Box::new(roots.with_context(doing)?)
        }
    };
    let start = Instant::now();
    let users = SpecUsers::from_spec(&bytes).ok();
    let refreshed = refresh_container(
        helper,
        &process,
        users.as_ref(),
        &*files,
        verb.act(),
        &TuckRecords::default(),
    );
    let refreshed = refreshed.with_context(doing)?;
    let identity = Identity::without_pod(&name);
    let line = verb.line(&container.id, identity, &refreshed, start.elapsed());
    let mut report = RefreshReport::default();
    report.problems.extend(
        errors
            .iter()
            .map(|error| format!("{name}: {}", error_chain(error))),
    );
    report.add(&name, &line, refreshed.subpaths);
    if let Err(error) = record(config.journal().filter(|_| !verb.dry_run), line) {
        report.problems.push(format!("{error:#}"));
    }
    Ok(report)
}
