//! The agent's manual page and completions, for the Debian package: `package_files DIR`.
//!
//! An example and no option of the agent, so that the agent stays small.

#[path = "../src/args.rs"]
#[allow(dead_code, reason = "only the definition of the command line is used")]
mod args;
#[path = "../../cli/src/man_page.rs"]
mod man_page;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;

fn main() -> Result<()> {
    let folder: PathBuf = std::env::args_os()
        .nth(1)
        .context("name the folder to write to")?
        .into();
    let mut command = args::Args::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let path = folder.join(format!("bindguard-agent.{shell}"));
        clap_complete::generate(shell, &mut command, "bindguard-agent", &mut create(&path)?);
    }
    let page = folder.join("man/bindguard-agent.1");
    create(&page)?
        .write_all(&man_page::page(command)?)
        .with_context(|| format!("write {}", page.display()))
}

fn create(path: &Path) -> Result<File> {
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .with_context(|| format!("make room for {}", path.display()))?;
    File::create(path).with_context(|| format!("create {}", path.display()))
}
