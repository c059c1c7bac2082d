//! The memory of a further pod: more and more single-container pods, with all shims side by side.
//!
//! Pages that shims share (program, libraries) count a part for each, so a pod gets cheaper with
//! the number of pods.

use std::thread::sleep;

use anyhow::Result;
use bindguard_integration::footprint::Footprint;

use crate::figure::Figure;
use crate::ground::{Ground, IDLE};
use crate::results::Results;

const NUMBERS: [u64; 4] = [1, 10, 25, 50];

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    let mut pids = Vec::new();
    let mut running = 0;
    for number in NUMBERS {
        for pod in running..number {
            for &shim in &ground.shims {
                let name = format!("{shim:?}-{pod}").to_lowercase();
                pids.push((shim, ground.start_pod(shim, &name, 1)?));
            }
        }
        running = number;
        sleep(IDLE);
        for &(shim, pid) in &pids {
            results.add(
                Figure::Pss,
                shim,
                number,
                Footprint::of(pid)?.pss_kib as f64,
            );
        }
    }
    Ok(())
}
