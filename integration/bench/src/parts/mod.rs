//! The parts of the bench: each file measures one subject on a separate node.

mod burst;
mod density;
mod exec;
mod guard;
mod lives;
mod memory;
mod mounts;
mod pods;
mod sizes;
mod start;
mod work;

use std::fmt;

use anyhow::{Context, Result};
use clap::ValueEnum;
use time::UtcDateTime;

use crate::ground::Ground;
use crate::machine::{Machine, load};
use crate::results::{Condition, Results};

/// A part of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Memory, threads and wake-ups of idle shims.
    Memory,
    /// Memory over the number of pods.
    Pods,
    /// Memory of all shims of a full node.
    Density,
    /// The command `start`, until the shim answers.
    Start,
    /// A container's life, by CPU and wall time.
    Lives,
    /// The same among many mounts on the host.
    Mounts,
    /// An exec into a running container.
    Exec,
    /// Fifty pods at once.
    Burst,
    /// The guard with its exec, and a repair.
    Guard,
    /// The guard's work within the process.
    Work,
    /// The programs' sizes.
    Sizes,
    /// Nothing: writes docs/benchmarks.md and its plots from the figures that are kept.
    Document,
}

impl Part {
    /// Every part.
    pub fn all() -> Vec<Self> {
        Self::value_variants().to_vec()
    }

    /// Measures.
    pub fn measure(self) -> Result<Results> {
        let day = UtcDateTime::now().date().to_string();
        let condition = Condition {
            part: self.to_string(),
            day,
            load: load()?,
        };
        let mut results = Results::of(Machine::read()?, condition);
        self.measure_into(&mut results)
            .with_context(|| self.to_string())?;
        Ok(results)
    }

    fn measure_into(self, results: &mut Results) -> Result<()> {
        let measure = match self {
            Self::Document => return Ok(()),
            Self::Work => return work::measure(results),
            Self::Sizes => return sizes::measure(results),
            Self::Memory => memory::measure,
            Self::Pods => pods::measure,
            Self::Density => density::measure,
            Self::Start => start::measure,
            Self::Lives => lives::measure,
            Self::Mounts => mounts::measure,
            Self::Exec => exec::measure,
            Self::Burst => burst::measure,
            Self::Guard => guard::measure,
        };
        measure(&Ground::prepare()?, results)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.to_possible_value();
        f.write_str(name.as_ref().map_or("", |value| value.get_name()))
    }
}
