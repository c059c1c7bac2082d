//! Idle shims, all at the same time: written pages, threads, and context switches in a minute.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use bindguard_integration::footprint::{Footprint, context_switches};

use crate::figure::Figure;
use crate::ground::{Ground, IDLE};
use crate::results::Results;

const SHIMS_EACH: u64 = 3;
/// Containers in a shim.
const CONTAINERS: [u64; 2] = [1, 5];
const A_MINUTE: Duration = Duration::from_secs(60);

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    let mut watched = Vec::new();
    for n in 0..SHIMS_EACH {
        for &shim in &ground.shims {
            for containers in CONTAINERS {
                let name = format!("{shim:?}-{containers}-{n}").to_lowercase();
                watched.push((shim, containers, ground.start_pod(shim, &name, containers)?));
            }
        }
    }
    sleep(IDLE);
    for &(shim, containers, pid) in &watched {
        let footprint = Footprint::of(pid)?;
        results.add(
            Figure::PrivateDirty,
            shim,
            containers,
            footprint.private_dirty_kib as f64,
        );
        results.add(Figure::Threads, shim, 0, footprint.threads as f64);
    }
    let switches = || {
        watched
            .iter()
            .map(|(.., pid)| context_switches(*pid))
            .collect::<Result<Vec<_>>>()
    };
    let before = switches()?;
    sleep(A_MINUTE);
    for ((&(shim, ..), after), before) in watched.iter().zip(switches()?).zip(before) {
        results.add(
            Figure::WakeUps,
            shim,
            0,
            after.saturating_sub(before) as f64,
        );
    }
    Ok(())
}
