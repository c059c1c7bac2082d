//! The dependency rules of docs/architecture.md, as cargo resolves them.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};

const PROGRAMS: [&str; 4] = [
    "containerd-shim-bindguard-v2",
    "bindguard-runtime",
    "bindguard",
    "bindguard-agent",
];

/// Every crate that the package links, itself left out.
fn dependencies(package: &str) -> Result<BTreeSet<String>> {
    let mut tree = Command::new(env!("CARGO"));
    tree.args([
        "tree",
        "--offline",
        "--locked",
        "--edges",
        "normal,build",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]);
    let output = tree
        .args(["--package", package])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    ensure!(
        output.status.success(),
        "cargo tree of {package}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).context("the output of cargo tree")?;
    let names = text
        .lines()
        .filter_map(|line| line.split(' ').next())
        .map(str::to_owned);
    Ok(names
        .filter(|name| !name.is_empty() && name != package)
        .collect())
}

fn ensure_without(package: &str, unwanted: &[&str]) -> Result<()> {
    let linked = dependencies(package)?;
    for name in unwanted {
        ensure!(!linked.contains(*name), "{package} depends on {name}");
    }
    Ok(())
}

#[test]
fn the_shim_and_the_runtime_do_not_link_the_operator_crate() -> Result<()> {
    ensure!(
        dependencies("bindguard")?.contains("bindguard-operator"),
        "the command line links it"
    );
    ensure_without(
        "containerd-shim-bindguard-v2",
        &[
            "bindguard-operator",
            "bindguard-guard",
            "bindguard-sys",
            "bindguard-kubernetes",
        ],
    )?;
    ensure_without(
        "bindguard-runtime",
        &["bindguard-operator", "bindguard-kubernetes", "tokio"],
    )
}

#[test]
fn a_crate_depends_only_on_the_crates_below_it() -> Result<()> {
    ensure_without(
        "bindguard-core",
        &[
            "bindguard-sys",
            "bindguard-config",
            "rustix",
            "nix",
            "tokio",
        ],
    )?;
    ensure_without(
        "bindguard-sys",
        &["bindguard-guard", "bindguard-config", "tokio"],
    )?;
    ensure_without(
        "bindguard-guard",
        &["bindguard-operator", "bindguard-config", "tokio"],
    )?;
    ensure_without("bindguard-operator", &["bindguard-config", "tokio"])?;
    ensure_without(
        "bindguard-kubernetes",
        &["bindguard-sys", "bindguard-guard", "bindguard-config"],
    )?;
    ensure_without(
        "bindguard-config",
        &["bindguard-sys", "bindguard-guard", "bindguard-operator"],
    )
}

#[test]
fn no_program_depends_on_a_program() -> Result<()> {
    PROGRAMS.iter().try_for_each(|program| {
        let others: Vec<_> = PROGRAMS
            .into_iter()
            .filter(|other| other != program)
            .collect();
        ensure_without(program, &others)
    })
}
