//! Fifty pods at once, by eight clients: what a node does after a drain, or when its runtime comes
//! back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow};

use crate::candidate::Candidate;
use crate::figure::Figure;
use crate::ground::Ground;
use crate::results::Results;
use crate::turns::in_turns;

const PODS: usize = 50;
const CLIENTS: usize = 8;
const ROUNDS: usize = 3;

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    in_turns(results, ROUNDS, &ground.shims, 0, |shim| {
        let (cpu, begun) = (ground.account.spent()?, Instant::now());
        start_all(ground, shim)?;
        let wall = begun.elapsed().as_secs_f64();
        let cpu = (ground.account.spent()? - cpu) / 1e3;
        let ids: Vec<String> = (0..PODS).map(name).collect();
        ground.node.ctr().remove_all(&ids)?;
        ground.account.settle()?;
        Ok(vec![(Figure::BurstWall, wall), (Figure::BurstCpu, cpu)])
    })
}

fn start_all(ground: &Ground, shim: Candidate) -> Result<()> {
    let (ctr, next) = (ground.node.ctr(), AtomicUsize::new(0));
    let client = || -> Result<()> {
        loop {
            let pod = next.fetch_add(1, Ordering::Relaxed);
            if pod >= PODS {
                return Ok(());
            }
            ctr.container(&name(pod))
                .runtime(shim.runtime())
                .start()?
                .success()?;
        }
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        clients
            .into_iter()
            .try_for_each(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
    })
}

fn name(pod: usize) -> String {
    format!("burst-{pod}")
}
