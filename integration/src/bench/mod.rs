//! What a node pays for each shim: CPU and wall time of a container's whole life, and memory while it runs.
//!
//! The shims take turns, and each round another one begins, so that a drift of the machine hits both alike.

mod account;

use std::time::Instant;

use anyhow::{Context, Result, bail};

use self::account::CpuAccount;
use crate::footprint::Footprint;
use crate::{Generation, Node, Runtime, Setup, privilege};

const ROUNDS: usize = 25;
const SHIMS: [(&str, Runtime); 2] =
    [("containerd-shim-runc-v2", Runtime::Stock), ("containerd-shim-bindguard-v2", Runtime::Bindguard)];

/// Measures and prints.
pub fn run() -> Result<()> {
    if let Some(why) = privilege::missing() {
        bail!("needs a root shell on a machine with cgroups: {why}");
    }
    let account = CpuAccount::open()?;
    let node = Setup::on(Generation::V2_1).start()?;
    let lives = lives(&node, &account)?;
    println!(
        "{:<30} {:>12} {:>12} {:>14} {:>8}",
        "containerd 2.1, medians", "CPU ms", "wall ms", "private KiB", "threads"
    );
    let mut rows = Vec::new();
    for (shim, (name, runtime)) in SHIMS.iter().enumerate() {
        let (cpu, wall): (Vec<f64>, Vec<f64>) = lives[shim].iter().copied().unzip();
        let footprint = footprint(&node, *runtime)?;
        let row = [median(cpu), median(wall), footprint.private_kib as f64, footprint.threads as f64];
        println!("{name:<30} {:>12.1} {:>12.1} {:>14} {:>8}", row[0], row[1], row[2], row[3]);
        rows.push(row);
    }
    let ratio = |column: usize| rows[1][column] / rows[0][column];
    println!("{:<30} {:>12.2} {:>12.2} {:>14.2} {:>8.2}", "ratio", ratio(0), ratio(1), ratio(2), ratio(3));
    Ok(())
}

/// CPU and wall milliseconds of `ctr run --rm` of a program that ends at once, for each shim.
fn lives(node: &Node, account: &CpuAccount) -> Result<[Vec<(f64, f64)>; 2]> {
    let mut lives = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for turn in 0..SHIMS.len() {
            let shim = (round + turn) % SHIMS.len();
            let (cpu, start) = (account.spent()?, Instant::now());
            let id = format!("life-{round}-{shim}");
            node.ctr().container(&id).runtime(SHIMS[shim].1).runs(&["true"]).run()?.success()?;
            lives[shim].push((account.spent()? - cpu, start.elapsed().as_secs_f64() * 1e3));
        }
    }
    Ok(lives)
}

fn footprint(node: &Node, runtime: Runtime) -> Result<Footprint> {
    let ctr = node.ctr();
    ctr.container("resident").runtime(runtime).start()?.success()?;
    let footprint = Footprint::of_parent(ctr.pid("resident")?).context("measure the shim")?;
    ctr.remove("resident")?;
    Ok(footprint)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
