//! `make differential`: the programs of another build beside today's, on the same inputs.
//!
//! `differential OLD NEW EXPECTED [SPECS]`: two folders with the four programs, a file of expected
//! differences, and a folder with more specs. The exit code is 0 only if every difference is
//! expected, and every expected difference occurs.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use bindguard_integration::differential::{Builds, RECORD, compare, record};

fn main() -> ExitCode {
    let words: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    match differential(&words) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("differential: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn differential(words: &[PathBuf]) -> Result<bool> {
    let specs = |specs: Option<&PathBuf>| specs.cloned();
    match words {
        [first, part, out, more @ ..] if first.as_os_str() == RECORD => {
            record(&part.to_string_lossy(), out, specs(more.first())).map(|()| true)
        }
        [old, new, expected, more @ ..] => {
            let (old, new) = (old.clone(), new.clone());
            compare(&Builds { old, new }, expected, specs(more.first()))
        }
        _ => bail!("usage: differential OLD NEW EXPECTED [SPECS]"),
    }
}
