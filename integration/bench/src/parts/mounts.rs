//! A container's life among more and more mounts on the host, and the shim's own share of it.
//!
//! The kernel copies a mount table for every container, and runc reads it: that share grows with
//! every shim. A shim's own is what its process works for a further container of a pod, as its CPU
//! clock says.

use anyhow::Result;

use super::lives::life;
use crate::bare::Bare;
use crate::candidate::Candidate;
use crate::clocks;
use crate::crowd::Crowd;
use crate::figure::Figure;
use crate::ground::{Ground, in_pod};
use crate::results::Results;
use crate::turns::in_turns;

const MOUNTS: [u64; 3] = [100, 1_000, 10_000];
const ROUNDS: usize = 8;

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    let mut crowd = Crowd::gather(&ground.node)?;
    let bare = Bare::lay_out(ground)?;
    let everybody = ground.everybody();
    for mounts in MOUNTS {
        crowd.grow_to(mounts)?;
        in_turns(results, ROUNDS, &everybody, mounts, |candidate| {
            Ok(life(ground, &bare, candidate)?
                .into_iter()
                .filter_map(among_mounts)
                .collect())
        })?;
        own_share(ground, results, mounts)?;
    }
    Ok(())
}

fn among_mounts((figure, value): (Figure, f64)) -> Option<(Figure, f64)> {
    (figure == Figure::LifeCpu).then_some((Figure::LifeAmongMounts, value))
}

fn own_share(ground: &Ground, results: &mut Results, mounts: u64) -> Result<()> {
    let pods: Vec<(Candidate, String, u32)> = ground
        .shims
        .iter()
        .map(|&shim| {
            let pod = format!("resident-{shim:?}").to_lowercase();
            let pid = ground.start_pod(shim, &pod, 1)?;
            Ok((shim, pod, pid))
        })
        .collect::<Result<_>>()?;
    let ctr = ground.node.ctr();
    in_turns(results, ROUNDS, &ground.shims, mounts, |shim| {
        let mut own = 0.0;
        for (_, pod, pid) in pods.iter().filter(|(of, ..)| *of == shim) {
            let before = clocks::of_process(*pid)?;
            in_pod(&ctr, shim, "guest", pod)
                .runs(&["true"])
                .run()?
                .success()?;
            own = clocks::of_process(*pid)? - before;
        }
        Ok(vec![(Figure::ShimAmongMounts, own)])
    })?;
    pods.iter().try_for_each(|(_, pod, _)| ctr.remove(pod))?;
    ground.account.settle()
}
