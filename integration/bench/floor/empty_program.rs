//! The floor of `start` with its server: with an argument the program starts itself without
//! arguments; without arguments it ends. `make bench` builds it with the flags of bindguard's
//! programs, static and small.

use std::env;
use std::io;
use std::process::{Command, Stdio};

fn main() -> io::Result<()> {
    if env::args_os().len() > 1 {
        // It ends by itself, as a server is left behind.
        let _ = Command::new(env::current_exe()?)
            .stdin(Stdio::null())
            .spawn()?;
    }
    Ok(())
}
