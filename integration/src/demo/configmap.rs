//! Part 1: a configMap changes, its container restarts (kubernetes#68211).

use anyhow::Result;

use super::table::{Observation, Table};
use super::{name, quote};
use crate::ctr::{Bind, Ctr, Runtime};
use crate::kubelet::{Subpath, VolumeKind};
use crate::node::Node;

const FILE: &str = "/etc/app/app.conf";
const STEP: &str = "restart after the configMap changed";

pub(super) fn show(node: &Node, table: &mut Table) -> Result<()> {
    println!(
        "\n1. A container mounts one file of a configMap (subPath). The configMap changes, the container restarts.\n   \
         The kubelet does not bind again before a restart, as kubelets before 1.19. Newer kubelets do; scene 2 is about all."
    );
    let pod = node.kubelet().pod("11111111-2222-3333-4444-555555555555")?;
    let volume = pod.volume(
        VolumeKind::ConfigMap,
        "conf",
        &[("app.conf", "colour = blue")],
    )?;
    let subpath = volume.subpath("app", 0, "app.conf");
    subpath.bind()?;
    start_first(&node.ctr(), &subpath)?;

    volume.update(&[("app.conf", "colour = green")])?;
    node.ctr().remove("app-1")?;
    println!("   the kubelet writes `colour = green`, and the container ends");
    table.add(with_the_stock_shim(&node.ctr(), &subpath)?);
    table.add(with_bindguard(&node.ctr(), &subpath)?);
    pod.delete()
}

fn start_first(ctr: &Ctr, subpath: &Subpath) -> Result<()> {
    container(ctr, "app-1", Runtime::Stock, subpath)
        .start()?
        .success()?;
    println!("   it runs, and reads `{}`", ctr.read("app-1", FILE)?);
    Ok(())
}

fn with_the_stock_shim(ctr: &Ctr, subpath: &Subpath) -> Result<Observation> {
    let runtime = Runtime::Stock;
    println!("\n   {} starts it again:", name(runtime));
    let words = container(ctr, "app-2", runtime, subpath)
        .start()?
        .failure()
        .unwrap_or_default();
    let mounts = subpath.mounts()?;
    quote(if words.is_empty() {
        "it started"
    } else {
        &words
    });
    for mount in &mounts {
        println!(
            "   because the kernel's mount table has, for that source:\n      | {}",
            mount.root
        );
    }
    let is_as_said =
        words.contains("volume-subpaths") && mounts.iter().all(|mount| mount.is_deleted());
    if !words.is_empty() {
        ctr.forget("app-2")?;
    }
    let seen = if is_as_said {
        "fails: no such file or directory"
    } else {
        "no such failure"
    };
    Ok(Observation {
        step: STEP,
        runtime: name(runtime),
        seen: seen.to_owned(),
        is_as_said,
    })
}

fn with_bindguard(ctr: &Ctr, subpath: &Subpath) -> Result<Observation> {
    let runtime = Runtime::Bindguard;
    println!(
        "\n   {} starts it again, from the very same source:",
        name(runtime)
    );
    let started = container(ctr, "app-3", runtime, subpath).start()?;
    let (is_as_said, seen) = if started.status.success() {
        let content = ctr.read("app-3", FILE)?;
        ctr.remove("app-3")?;
        let mounts = subpath.mounts()?.len();
        println!("   it runs, and reads `{content}`; {mounts} mount at the bind's source");
        (
            content == "colour = green" && mounts == 1,
            format!("starts, reads `{content}`"),
        )
    } else {
        quote(&started.stderr);
        ctr.forget("app-3")?;
        (false, "fails".to_owned())
    };
    Ok(Observation {
        step: STEP,
        runtime: name(runtime),
        seen,
        is_as_said,
    })
}

fn container<'a>(
    ctr: &'a Ctr,
    id: &str,
    runtime: Runtime,
    subpath: &Subpath,
) -> crate::ctr::Container<'a> {
    ctr.container(id)
        .runtime(runtime)
        .mount(Bind::new(subpath.target(), FILE))
}
