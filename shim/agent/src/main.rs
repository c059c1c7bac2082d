//! The node agent: keeps the host's subpaths current between creates, and refreshes running
//! containers that opted in.
//!
//! It is optional. Creates, restarts and containers behave as if it were not installed when it
//! dies, hangs or is removed.
#![forbid(unsafe_code)]

mod args;
mod host;
mod limits;
mod log;
mod pods;
mod restart_slot;
mod run;
mod sinks;
mod sources;
mod work;

use std::process::ExitCode;

use bindguard_core::text::one_line;
use clap::Parser;
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> ExitCode {
    let args = args::Args::parse();
    // a new socket must not be open for others until its mode is set
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    log::log_to(std::io::stderr, args.log_format, args.log_level).init();
    let ended = match &args.command {
        Some(args::Verb::RestartSlot(verb)) => verb.run(),
        Some(args::Verb::NodeLabel) => restart_slot::label_node(),
        None => run::run(&args),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bindguard-agent: {}", one_line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
