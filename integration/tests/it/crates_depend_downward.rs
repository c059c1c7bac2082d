//! The dependency rules of docs/architecture.md, as cargo resolves them.

use bindguard_integration::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

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
    // It has the client of the CRI, so that tokio is in the agent and the command line alone.
    ensure_without("bindguard-operator", &["bindguard-config"])?;
    ensure_without("bindguard-installer", &["bindguard-kubernetes"])?;
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

/// The modules of each crate, by the `use crate::` lines of its files.
#[test]
fn the_modules_of_a_crate_form_no_circle() -> Result<()> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for crate_of in CRATES {
        let uses = uses_between_modules(&repository.join(crate_of).join("src"))?;
        ensure!(
            !uses.is_empty(),
            "{crate_of} has no module that uses another"
        );
        for module in uses.keys() {
            let reached = reached_from(module, &uses);
            ensure!(
                !reached.contains(module),
                "{crate_of}: the module {module} uses itself through {reached:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_circle_of_modules_is_found() -> Result<()> {
    let of = |code| named_modules(code).map(str::to_owned).collect();
    let uses = Uses::from([
        ("a".to_owned(), of("use crate::b::Type;")),
        (
            "b".to_owned(),
            of("use crate::{x, c::Other};\n// crate::d\n"),
        ),
        ("c".to_owned(), of("fn f() { crate::a::g() }")),
    ]);
    let reached = reached_from("a", &uses);
    ensure!(reached == of("crate::{a, b, c, x}"), "{reached:?}");
    Ok(())
}

const CRATES: [&str; 13] = [
    "hooks/core",
    "hooks/sys",
    "hooks/guard",
    "hooks/kubernetes",
    "hooks/operator",
    "hooks/testing",
    "shim/containerd",
    "shim/runtime",
    "shim/cli",
    "shim/cli/installer",
    "shim/agent",
    "config",
    "integration",
];

/// The imports between top-level modules, without tests: module to used modules.
type Uses = BTreeMap<String, BTreeSet<String>>;

fn uses_between_modules(source: &Path) -> Result<Uses> {
    let mut uses = Uses::new();
    let mut folders = vec![source.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let below = path.strip_prefix(source)?.with_extension("");
            let module = below.iter().next().context("a file has a name")?;
            let module = module.to_string_lossy().into_owned();
            let is_root = ["lib", "main"].contains(&module.as_str());
            if is_root || path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let text = fs::read_to_string(&path)?;
            let code = text
                .split("#[cfg(test)]\nmod tests")
                .next()
                .unwrap_or_default();
            let named = named_modules(code).filter(|name| *name != module);
            uses.entry(module.clone())
                .or_default()
                .extend(named.map(str::to_owned));
        }
    }
    Ok(uses)
}

/// The names after `crate::`, also those in braces.
fn named_modules(code: &str) -> impl Iterator<Item = &str> {
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let after = lines.flat_map(|line| line.split("crate::").skip(1));
    after.flat_map(|rest| {
        let list = match rest.strip_prefix('{') {
            Some(braces) => braces.split(", ").collect(),
            None => vec![rest],
        };
        list.into_iter().filter_map(|name| {
            name.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
                .next()
        })
    })
}

fn reached_from(module: &str, uses: &Uses) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![module];
    while let Some(module) = open.pop() {
        for name in uses.get(module).into_iter().flatten() {
            if reached.insert(name.clone()) {
                open.push(name);
            }
        }
    }
    reached
}
