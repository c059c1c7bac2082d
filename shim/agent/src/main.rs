//! The node agent: keeps the host's subpaths current between creates, and refreshes running
//! containers that opted in.
//!
//! It is optional. Creates, restarts and containers behave as if it were not installed when it
//! dies, hangs or is removed.
#![forbid(unsafe_code)]

mod args;
mod container;
mod engines;
mod events;
mod host;
mod http;
mod idle_memory;
mod journal;
mod kubediag;
mod kubernetes;
mod log_line;
mod metrics;
mod nri;
mod pod_refreshes;
mod pods;
mod refresh_queue;
mod refresher;
mod removal;
mod reporting;
mod restart_slot;
mod roots;
mod run;
mod status;
mod survey;
mod threads;
mod updates;
mod volumes;
mod wall_clock;
mod watch;

use std::process::ExitCode;

use bindguard_core::text::one_line;
use clap::Parser;
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> ExitCode {
    let args = args::Args::parse();
    log_line::log_to(std::io::stderr, args.log_format, args.log_level).init();
    let ended = match &args.command {
        Some(args::Verb::RestartSlot(verb)) => verb.run(),
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
