//! `make bench`: measures bindguard's costs and every peer's, in a single run and in turns.
//!
//! ```text
//!   main ── a part each ──► Ground (a node, every shim on it, an account of CPU time) ──► Results ──► report
//! ```
//! `bench PART...` measures some parts only. A file keeps the figures until they are measured
//! again; the last part, `document`, writes docs/benchmarks.md and its plots from the file.
//! `figure.rs` defines the figures, `goals.rs` the goals.

mod account;
mod bare;
mod candidate;
mod clocks;
mod crowd;
mod figure;
mod goals;
mod ground;
mod machine;
mod parts;
mod report;
mod results;
mod turns;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use bindguard_integration::doc_commands::repository;
use bindguard_integration::privilege;
use clap::Parser;

use crate::parts::Part;
use crate::results::Results;

/// Measure bindguard beside its peers.
#[derive(Debug, Parser)]
struct Arguments {
    /// Parts to measure (default: all).
    parts: Vec<Part>,
    /// File that keeps the figures.
    #[arg(long, value_name = "FILE", default_value_os_t = repository().join("target/bench.json"))]
    results: PathBuf,
}

fn main() -> ExitCode {
    match bench(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench(arguments: Arguments) -> Result<()> {
    if let Some(why) = privilege::missing() {
        bail!("needs a root shell on a machine with cgroups: {why}");
    }
    let (parts, mut results) = match arguments.parts.is_empty() {
        true => (Part::all(), Results::default()),
        false => (arguments.parts, Results::load(&arguments.results)?),
    };
    for part in parts {
        eprintln!("bench: {part}");
        if part == Part::Document {
            report::write_documents(&results)?;
            continue;
        }
        let measured = part.measure()?;
        println!("\n{}", report::figures(&measured));
        results.replace(measured);
        results.save(&arguments.results)?;
    }
    println!("\n{}", report::goals(&results));
    Ok(())
}
