//! A part a file: what it measures, on a ground of its own.

mod lives;
mod memory;
mod pods;
mod start;

use std::fmt;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::ground::Ground;
use crate::results::Results;

/// A part of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Memory, threads and wake-ups of idle shims.
    Memory,
    /// Memory over the number of pods.
    Pods,
    /// The command `start`, until the shim answers.
    Start,
    /// A container's life, by CPU and wall time.
    Lives,
}

impl Part {
    /// Every part.
    pub fn all() -> Vec<Self> {
        Self::value_variants().to_vec()
    }

    /// Makes a node, measures, and ends the node.
    pub fn measure(self) -> Result<Results> {
        let (ground, mut results) = (Ground::prepare()?, Results::default());
        let measured = match self {
            Self::Memory => memory::measure(&ground, &mut results),
            Self::Pods => pods::measure(&ground, &mut results),
            Self::Start => start::measure(&ground, &mut results),
            Self::Lives => lives::measure(&ground, &mut results),
        };
        measured.with_context(|| self.to_string())?;
        Ok(results)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.to_possible_value();
        f.write_str(name.as_ref().map_or("", |value| value.get_name()))
    }
}
