//! A handler's options may set any key that containerd's default configuration shows. For each key,
//! a pod has the same fate as under the stock shim. `CriuImagePath` once made each create a
//! restore.

use bindguard_integration::prelude::*;
use std::fs::File;
use std::io::Write as _;

const STOCK: &str = "io.containerd.runc.v2";
const OWN: &str = "io.containerd.bindguard.v2";

// Older containerds than 1.7 ignore `runtime_path`.
mod older {
    use super::*;

    #[test]
    fn containerd_1_7() {
        Setup::on(Generation::V1_7).cri().story(story);
    }
}

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(story);
}

/// A way to a shim: the prefix of its handlers, and their lines in containerd's file.
struct Entry {
    prefix: &'static str,
    lines: String,
}

fn story(node: &Node) -> Result<()> {
    let options = options(node);
    let entries = entries(node);
    let mut file = File::options()
        .append(true)
        .open(node.containerd_config())?;
    for (key, value) in &options {
        for Entry { prefix, lines } in &entries {
            let table = format!(
                "plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.{}",
                handler(prefix, key)
            );
            writeln!(
                file,
                "[{table}]\n{lines}[{table}.options]\n  {key} = {value}"
            )?;
        }
    }
    node.restart_containerd(Signal::SIGTERM)?;
    for (key, value) in &options {
        let of_stock = pod_runs(node, &handler("stock", key));
        for entry in &entries {
            if entry.prefix == "stock" {
                continue;
            }
            let fate = pod_runs(node, &handler(entry.prefix, key));
            let are_equal = fate.is_ok() == of_stock.is_ok();
            ensure!(
                are_equal,
                "{key} = {value}, {}: {fate:?}; the stock shim: {of_stock:?}",
                entry.prefix
            );
        }
        // Only this key may fail with the stock shim, because the node has no systemd.
        ensure!(
            of_stock.is_ok() || *key == "SystemdCgroup",
            "{key} = {value}: {of_stock:?}"
        );
    }
    Ok(())
}

/// The keys of containerd's default configuration, with values that demand something.
fn options(node: &Node) -> [(&'static str, String); 11] {
    let below = |name: &str| format!("\"{}/{name}\"", node.disk().display());
    [
        ("BinaryName", below("bin/runc")),
        ("Root", below("state-of-runc")),
        ("NoPivotRoot", "true".to_owned()),
        ("NoNewKeyring", "true".to_owned()),
        ("IoUid", "1000".to_owned()),
        ("IoGid", "1000".to_owned()),
        ("ShimCgroup", format!("\"/{}/node\"", node.name())),
        ("SystemdCgroup", "true".to_owned()),
        ("CriuPath", below("criu")),
        ("CriuImagePath", below("images")),
        ("CriuWorkPath", below("work-of-criu")),
    ]
}

fn entries(node: &Node) -> [Entry; 3] {
    let of_type = |name: &str| format!("  runtime_type = \"{name}\"\n");
    let shim = node.programs().join("containerd-shim-bindguard-v2");
    let path = format!(
        "{}  runtime_path = \"{}\"\n",
        of_type(STOCK),
        shim.display()
    );
    [
        Entry {
            prefix: "stock",
            lines: of_type(STOCK),
        },
        Entry {
            prefix: "path",
            lines: path,
        },
        Entry {
            prefix: "own",
            lines: of_type(OWN),
        },
    ]
}

fn handler(prefix: &str, key: &str) -> String {
    format!("{prefix}-{}", key.to_lowercase())
}

/// A container of a pod runs under this handler, and has its output read.
fn pod_runs(node: &Node, handler: &str) -> Result<()> {
    let cri = node.cri()?;
    let pod = cri.run_pod(handler, handler, &format!("uid-{handler}"))?;
    // A start returns before the container's process has become its program.
    let runs = cri
        .start_container(&pod, "app", &["sleep", "1000000"], &[])
        .and_then(|app| {
            until(&format!("the container of {handler} runs sleep"), || {
                Ok(cri.read(&app, "/proc/1/comm")?.trim() == "sleep")
            })
        });
    cri.remove_pod(&pod)
        .with_context(|| format!("remove the pod of {handler}"))?;
    runs?;
    Ok(fs::remove_dir_all(format!("/run/pods/uid-{handler}"))?)
}
