//! A full node: as many single-container pods as a kubelet admits by default, and the memory of all
//! shims together. The kinds of shims are measured in sequence.
//!
//! RSS counts a page of the program once for each shim, PSS once for all shims. Peers publish RSS;
//! the node's real loss is PSS.

use std::thread::sleep;

use anyhow::Result;
use bindguard_integration::footprint::Footprint;

use crate::figure::Figure;
use crate::ground::{Ground, IDLE};
use crate::results::Results;

const PODS: u64 = 110;

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    for &shim in &ground.shims {
        let names: Vec<String> = (0..PODS).map(|pod| format!("pod-{pod}")).collect();
        let mut pids = Vec::new();
        for name in &names {
            pids.push(ground.start_pod(shim, name, 1)?);
        }
        sleep(IDLE);
        let footprints: Vec<Footprint> =
            pids.into_iter().map(Footprint::of).collect::<Result<_>>()?;
        let sum = |of_shim: fn(&Footprint) -> u64| footprints.iter().map(of_shim).sum::<u64>();
        for (figure, kib) in [
            (Figure::PrivateOfAll, sum(|shim| shim.private_kib)),
            (Figure::PssOfAll, sum(|shim| shim.pss_kib)),
            (Figure::RssOfAll, sum(|shim| shim.rss_kib)),
        ] {
            results.add(figure, shim, PODS, kib as f64 / 1024.0);
        }
        ground.node.ctr().remove_all(&names)?;
    }
    Ok(())
}
