//! The options of `containerd.runc.v1.Options` that `ctr` cannot set, or whose effect a container
//! does not see: what the runtime is called with, and where the shim itself is.
//!
//! Of systemd as cgroup manager this story shows that runc gets the option;
//! systemd_makes_the_scopes has the rest.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, ObedientRuntime};
use bindguard_integration::shim::{Bundle, Shim, options_any, spec};
use containerd_shim_protos::shim::oci::Options;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let before = Leftovers::of(node)?;
            roots_and_flags(node)?;
            shim_cgroup(node)?;
            systemd(node)?;
            before.are_all(node)
        });
}

fn roots_and_flags(node: &Node) -> Result<()> {
    let root = node.disk().join("runc-root");
    let bundle = Bundle::create(node, "flags", &["sleep", "1000000"])?;
    let options = Options {
        root: root.display().to_string(),
        no_pivot_root: true,
        no_new_keyring: true,
        ..Default::default()
    };
    let client = Shim::start(node, &bundle, &options)?.connect()?;
    let mut request = bundle.request();
    request.options = Some(options_any(&options)?).into();
    client.create(&request)?;
    let create = ObedientRuntime::of(&node.programs()).last_call("create")?;
    let of_namespace = root.join(node.name());
    ensure!(
        create.contains(&format!("--root {} ", of_namespace.display())),
        "{create}"
    );
    ensure!(
        create.contains(" --no-pivot ") && create.contains(" --no-new-keyring "),
        "{create}"
    );
    ensure!(
        of_namespace.join("flags/state.json").is_file(),
        "no state of runc in {}",
        of_namespace.display()
    );
    client.start("flags", "")?;
    ensure!(client.end("flags")?.exit_status == 137);
    ensure!(
        fs::read_dir(&of_namespace)?.count() == 0,
        "state of runc is left in {}",
        of_namespace.display()
    );
    Ok(client.shut_down("flags")?)
}

fn shim_cgroup(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "grouped", &["sleep", "1000000"])?;
    let options = Options {
        shim_cgroup: format!("/{}/of-the-shim", node.name()),
        ..Default::default()
    };
    let shim = Shim::start(node, &bundle, &options)?;
    let client = shim.connect()?;
    let pid: u32 = fs::read_to_string(bundle.path().join("shim.pid"))?
        .trim()
        .parse()?;
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let outside: Vec<&str> = groups
        .lines()
        .filter(|line| !line.ends_with(&options.shim_cgroup))
        .collect();
    // a named hierarchy without controllers may be mounted elsewhere, or not at all
    ensure!(
        outside
            .iter()
            .all(|line| line.contains("name=") || line.starts_with("0::")),
        "outside: {outside:?}"
    );
    ensure!(
        outside.len() < groups.lines().count(),
        "it is in none: {groups}"
    );
    client.shut_down("grouped")?;
    // a cgroup that the options name is its owner's to remove
    for hierarchy in fs::read_dir("/sys/fs/cgroup")?.flatten() {
        let group = hierarchy.path().join(node.name()).join("of-the-shim");
        // busy until the shim's process is gone
        until("the shim leaves its cgroup", || {
            Ok(!group.is_dir() || fs::remove_dir(&group).is_ok())
        })?;
    }
    Ok(())
}

/// The option decides. Where there are no options, a path in systemd's form does, if systemd runs
/// on the node.
fn systemd(node: &Node) -> Result<()> {
    let options = Options {
        systemd_cgroup: true,
        ..Default::default()
    };
    let by_systemd = "system.slice:test:app";
    ensure!(
        is_systemds(node, "by-option", None, Some(&options))?,
        "the option does not reach the runtime"
    );
    ensure!(
        !is_systemds(
            node,
            "not-by-option",
            Some(by_systemd),
            Some(&Options::default())
        )?,
        "the path goes before"
    );
    ensure!(
        !is_systemds(node, "no-systemd", Some(by_systemd), None)?,
        "there is no systemd here"
    );
    // the path that sd_booted(3) checks; the node's /run is its own
    fs::create_dir_all("/run/systemd/system")?;
    ensure!(
        is_systemds(node, "by-path", Some(by_systemd), None)?,
        "the path does not count"
    );
    Ok(fs::remove_dir_all("/run/systemd")?)
}

/// True if the runtime gets the option that systemd makes the cgroups.
fn is_systemds(
    node: &Node,
    id: &str,
    cgroups_path: Option<&str>,
    options: Option<&Options>,
) -> Result<bool> {
    let runtime = ObedientRuntime::of(&node.programs());
    let mut spec = spec(node, id, &["true"]);
    if let Some(path) = cgroups_path {
        spec["linux"]["cgroupsPath"] = json!(path);
    }
    let bundle = Bundle::create_with(node, id, &spec)?;
    let client = Shim::start(node, &bundle, options.unwrap_or(&Options::default()))?.connect()?;
    runtime.next("create", Fault::OnlyRecord)?;
    let mut request = bundle.request();
    request.options = options.map(options_any).transpose()?.into();
    ensure!(
        client.create(&request).is_err(),
        "a runtime that failed has created {id}"
    );
    let create = runtime.last_call("create")?;
    ensure!(create.contains(id), "{id} was not created: {create}");
    client.shut_down(id)?;
    Ok(create.contains(" --systemd-cgroup create "))
}
