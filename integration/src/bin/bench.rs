//! `make bench`: the shim beside containerd's own, in one run on one containerd. Compare the ratios, not the figures.

use std::process::ExitCode;

use bindguard_integration::bench::run;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
