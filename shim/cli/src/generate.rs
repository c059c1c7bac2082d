//! `bindguard completions` and `bindguard man`, generated from the definition of the command line.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::show::print_bytes;

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    shell: Shell,
}

impl Completions {
    pub fn run(self, mut command: Command) -> anyhow::Result<ExitCode> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "bindguard", &mut script);
        print_bytes(&script)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub struct Manual {
    /// Write a page for each verb into this folder, bindguard.1, bindguard-diagnose.1 and so on,
    /// instead of printing one.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Manual {
    pub fn run(self, command: Command) -> anyhow::Result<ExitCode> {
        if let Some(folder) = &self.dir {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
            clap_mangen::generate_to(command, folder)
                .with_context(|| format!("write the manual into {}", folder.display()))?;
        } else {
            let mut page = Vec::new();
            Man::new(command)
                .manual("bindguard")
                .render(&mut page)
                .context("make a page of the manual")?;
            print_bytes(&page)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
