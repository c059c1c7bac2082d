//! The node agent: keeps the host's subpaths current between creates, and refreshes running
//! containers that opted in.
//!
//! It is optional. Creates, restarts and containers behave as if it were not installed when it
//! dies, hangs or is removed.
#![forbid(unsafe_code)]

mod annotate_pod;
mod args;
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
mod node_state;
mod nri;
mod pod_refreshes;
mod pods;
mod refresh_queue;
mod refresher;
mod reporting;
mod roots;
mod run;
mod status;
mod survey;
mod updates;
mod wall_clock;
mod watch;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let args = args::Args::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .map_event_format(log_line::OneLine)
        .init();
    let ended = match &args.command {
        Some(args::Verb::AnnotatePod(verb)) => verb.run(),
        None => run::run(&args),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bindguard-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
