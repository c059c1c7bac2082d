//! `Update`, sent to the shim itself, because `ctr` has no such command: the limits of a running
//! container are what the resources say, in whichever hierarchy of cgroups the node has.

use bindguard_integration::on_every_generation_with_systemd;
use bindguard_integration::prelude::*;
use bindguard_integration::shim::Shim;

const MEMORY: u64 = 96 << 20;

on_newest_and_older!(|generation| Setup::on(generation).story(story));

on_every_generation_with_systemd!(|setup: Setup| setup.story(story));

fn story(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("web").start()?.success()?;
    let pid = ctr.pid("web")?;
    all_controllers_reach(pid)?;
    let client = Shim::of_container(node, "web")?.connect()?;
    client.update(
        "web",
        &json!({"memory": {"limit": MEMORY}, "pids": {"limit": 77}}),
    )?;
    ensure!(limit(pid, "memory", &["memory.max", "memory.limit_in_bytes"])? == MEMORY.to_string());
    ensure!(limit(pid, "pids", &["pids.max"])? == "77");

    // A processor beyond the kernel's maximum. crun ignores a value of a wrong type.
    let refused = client.update("web", &json!({"cpu": {"cpus": "99999"}}));
    ensure!(
        refused.is_err(),
        "a limit that the kernel refuses was accepted"
    );
    ensure!(
        client.update("no-such-container", &json!({})).is_err(),
        "the limits of a container that does not exist were changed"
    );
    ensure!(
        limit(pid, "pids", &["pids.max"])? == "77",
        "a call that was refused changed something"
    );
    ctr.remove("web")
}

/// With cgroup v2 alone the shim enables, after create, all controllers in the cgroups above the
/// container's.
fn all_controllers_reach(pid: u32) -> Result<()> {
    let Ok(of_node) = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers") else {
        return Ok(());
    };
    let own = fs::read_to_string(cgroup(pid, "memory")?.join("cgroup.controllers"))?;
    let missing: Vec<&str> = of_node
        .split_whitespace()
        .filter(|name| !own.split_whitespace().any(|own| own == *name))
        .collect();
    ensure!(
        missing.is_empty(),
        "controllers that do not reach the container: {missing:?}"
    );
    Ok(())
}

/// A limit of the process's cgroup, from the first of these files that is there.
fn limit(pid: u32, controller: &str, files: &[&str]) -> Result<String> {
    let folder = cgroup(pid, controller)?;
    let text = files
        .iter()
        .find_map(|file| fs::read_to_string(folder.join(file)).ok());
    Ok(text
        .with_context(|| format!("find one of {files:?} in {}", folder.display()))?
        .trim()
        .to_owned())
}

/// The cgroup's folder, in the controller's hierarchy or in the unified hierarchy: see cgroups(7).
fn cgroup(pid: u32, controller: &str) -> Result<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))
        .context("read the container's cgroups")?;
    let lines = || {
        text.lines().filter_map(|line| {
            line.split_once(':')
                .and_then(|(_, rest)| rest.split_once(':'))
        })
    };
    let own =
        lines().find(|(controllers, _)| controllers.split(',').any(|name| name == controller));
    let only = || lines().find(|(controllers, _)| controllers.is_empty());
    let (hierarchy, path) = own
        .or_else(only)
        .with_context(|| format!("find {controller} in {text}"))?;
    Ok(Path::new("/sys/fs/cgroup")
        .join(hierarchy)
        .join(path.trim_start_matches('/')))
}
