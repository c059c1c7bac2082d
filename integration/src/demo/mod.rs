//! The demo: faults with the stock shim, the same steps with bindguard, and a file and a volume that
//! change in a running container.
//!
//! The parts print their progress and return observations, which decide the final table and the
//! exit code. Everything runs in a separate node: nothing is installed, nothing is left behind.

mod configmap;
mod host_root;
mod race;
mod refresh;
mod signals;
mod table;
mod volume;

use anyhow::{Context, Result};

use crate::ctr::Runtime;
use crate::node::{Node, Setup};
use crate::process::host;
use crate::programs::Generation;

pub use self::signals::Signals;
pub use self::table::{Observation, Table};

/// Runs the demo on a generation of containerd, and returns whether everything was seen as said.
pub fn run(generation: Generation, signals: &Signals) -> Result<bool> {
    let node = Setup::on(generation)
        .cri()
        .obedient_runtime()
        .start_with_keeper(|keeper| signals.end_node_on_signal(keeper));
    let node = node.context("make a node for the demo")?;
    introduce(&node)?;
    let mut table = Table::default();
    configmap::show(&node, &mut table)?;
    race::show(&node, &mut table)?;
    host_root::show(&node, &mut table)?;
    refresh::show(&node, &mut table)?;
    volume::show(&node, &mut table)?;
    table.print();
    Ok(table.is_as_said())
}

fn introduce(node: &Node) -> Result<()> {
    let runc = host([
        node.programs().join("runc").as_os_str(),
        "--version".as_ref(),
    ])?;
    let runc = runc.lines().next().unwrap_or("runc").to_owned();
    let kernel = host(["uname", "-r"])?;
    println!(
        "bindguard demo: {}, {runc}, kernel {}",
        node.generation(),
        kernel.trim()
    );
    println!("in a mount namespace of its own: nothing is installed, nothing stays behind");
    Ok(())
}

fn name(runtime: Runtime) -> &'static str {
    match runtime {
        Runtime::Stock => "io.containerd.runc.v2",
        Runtime::Bindguard => "io.containerd.bindguard.v2",
        Runtime::BindguardByPath => "containerd-shim-bindguard-v2 by path",
        Runtime::Wrapper => "io.containerd.runc.v2 with bindguard-runtime",
        Runtime::Named(name) => name,
    }
}

/// Words of a program, indented and with long lines broken, so that a real error can be read.
fn quote(words: &str) {
    const WIDTH: usize = 96;
    let mut line = String::new();
    for word in words.split_whitespace() {
        if !line.is_empty() && line.len() + word.len() >= WIDTH {
            println!("      | {line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    println!("      | {line}");
}
