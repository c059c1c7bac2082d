//! `make demo`: the faults with the stock shim, and their end with bindguard, on a private
//! containerd.
//!
//! `demo [1.7|2.1]` chooses containerd's generation. The exit code is 0 only if every step was
//! seen as said.

use std::process::ExitCode;

use anyhow::{Result, bail};
use bindguard_integration::demo::{Signals, run};
use bindguard_integration::{Generation, privilege};

fn main() -> ExitCode {
    match demo() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<bool> {
    let generation = generation()?;
    if let Some(why) = privilege::missing() {
        bail!("needs a root shell on a machine with cgroups: {why}");
    }
    run(generation, &Signals::wait_in_background()?)
}

fn generation() -> Result<Generation> {
    match std::env::args().nth(1).as_deref() {
        Some("1.7") => Ok(Generation::V1_7),
        None | Some("2.1") => Ok(Generation::V2_1),
        Some(other) => bail!("no containerd {other}; there are 1.7 and 2.1"),
    }
}
