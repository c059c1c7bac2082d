//! Checks that documentation, comments and messages are plain technical English; `make lint` runs
//! it.
//!
//! Three rules, each with few false alarms: no private word (`words.rs` has the list and the
//! field's word for each), no sentence over 40 words in a document, and no doc comment that opens
//! with a question word. Code blocks and `inline code` are not prose. The argument is the tree to
//! check, this repository by default.

mod prose;
mod rules;
mod sources;
mod words;

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    let root = env::args_os().nth(1).map_or_else(
        || concat!(env!("CARGO_MANIFEST_DIR"), "/..").into(),
        PathBuf::from,
    );
    let mut problems = 0;
    for file in sources::files(&root)? {
        for passage in prose::passages(&file) {
            for (line, problem) in rules::problems(&passage) {
                println!("{}:{line}: {problem}", file.path.display());
                problems += 1;
            }
        }
    }
    println!("language: {problems} problems");
    Ok(if problems == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
