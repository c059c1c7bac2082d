//! A container's whole life: `ctr run --rm` of a program that ends at once, until its shim has ended.
//!
//! CPU time is that of client, containerd, shim, guard and runtime together.

use std::time::Instant;

use anyhow::Result;

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::ground::Ground;
use crate::results::Results;
use crate::turns::in_turns;

const ROUNDS: usize = 25;

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    in_turns(results, ROUNDS, &ground.shims, 0, |shim| life(ground, shim))
}

/// One life.
pub fn life(ground: &Ground, shim: Candidate) -> Result<Vec<(Figure, f64)>> {
    let ctr = ground.node.ctr();
    let (cpu, begun) = (ground.account.spent()?, Instant::now());
    ctr.container("life").runtime(shim.runtime()).runs(&["true"]).run()?.success()?;
    let wall = begun.elapsed().as_secs_f64() * 1e3;
    ground.account.settle()?;
    Ok(vec![(Figure::LifeCpu, ground.account.spent()? - cpu), (Figure::LifeWall, wall)])
}
