//! A container's whole life: `ctr run --rm` of a program that ends at once, until its shim has
//! ended.
//!
//! The CPU time of client, containerd, shim, guard and runtime together; for a bare runtime, of the
//! runtime's calls.

use std::time::Instant;

use anyhow::Result;

use crate::bare::Bare;
use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::ground::Ground;
use crate::results::Results;
use crate::turns::in_turns;

const ROUNDS: usize = 25;

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    let bare = Bare::lay_out(ground)?;
    in_turns(results, ROUNDS, &ground.everybody(), 0, |candidate| {
        life(ground, &bare, candidate)
    })
}

/// Measures the life of a container.
pub fn life(ground: &Ground, bare: &Bare, candidate: Candidate) -> Result<Vec<(Figure, f64)>> {
    let (cpu, begun) = (ground.account.spent()?, Instant::now());
    match candidate {
        Candidate::Runc | Candidate::Crun => {
            bare.life(&ground.node.programs().join(candidate.link()))?
        }
        shim => drop(
            ground
                .node
                .ctr()
                .container("life")
                .runtime(shim.runtime())
                .runs(&["true"])
                .run()?
                .success()?,
        ),
    }
    let wall = begun.elapsed().as_secs_f64() * 1e3;
    ground.account.settle()?;
    Ok(vec![
        (Figure::LifeCpu, ground.account.spent()? - cpu),
        (Figure::LifeWall, wall),
    ])
}
