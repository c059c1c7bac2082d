//! A containerd shim that prevents containers from starting on a wrong bind mount.
//!
//! It supervises tasks as containerd-shim-runc-v2 does and does not check mounts itself: `create`
//! goes through `bindguard-runtime`, which checks the bundle and then becomes runc. containerd runs
//! this program with a verb (`start`, `delete`, `-info`). `start` runs it again without a verb:
//! that is the server.

mod args;
mod bootstrap;
mod bundle;
mod cgroup;
mod events;
mod exits;
mod io;
mod kernel;
mod logging;
mod rootfs;
mod runtime;
mod serve;
mod service;
mod task;
mod work;

use std::error::Error;
use std::process::ExitCode;

use bindguard_core::error_chain;

use args::{Args, ShimVerb, USAGE};

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(error.exit_code);
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        // containerd shows a verb's stderr to its user.
        Err(error) => {
            eprintln!("{}", error_chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    match args.verb {
        ShimVerb::Serve => serve::serve(args)?,
        ShimVerb::Start => bootstrap::start(args)?,
        ShimVerb::Delete => bootstrap::delete(args)?,
        ShimVerb::Help => println!("{USAGE}"),
        ShimVerb::Info => bootstrap::info()?,
        ShimVerb::Version => bootstrap::version(),
    }
    Ok(())
}
