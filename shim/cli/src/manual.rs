//! `bindguard completions` and `bindguard man`, generated from the definition of the command line. The
//! names of pods in completions come from `bindguard diagnose`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use bindguard_config::SHIPPED;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::man_page::{finish, page};
use crate::show::print_bytes;

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    shell: Shell,
}

impl Completions {
    pub fn run(self, mut command: Command) -> Result<ExitCode> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "bindguard", &mut script);
        match self.shell {
            Shell::Bash => script.extend(include_bytes!("pods.bash")),
            Shell::Fish => script.extend(include_bytes!("pods.fish")),
            _ => {}
        }
        print_bytes(&script)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub struct Manual {
    /// Write a page for each verb into this folder, bindguard.1, bindguard-diagnose.1 and so on, and
    /// bindguard.toml.5, instead of printing one.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Manual {
    pub fn run(self, command: Command) -> Result<ExitCode> {
        if let Some(folder) = &self.dir {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
            let mut command = command.disable_help_subcommand(true);
            command.build();
            let config = include_bytes!("bindguard.toml.5").to_vec();
            write_pages(&command, folder)
                .and_then(|()| fs::write(folder.join("bindguard.toml.5"), finish(config, SHIPPED)?))
                .with_context(|| format!("write the manual into {}", folder.display()))?;
        } else {
            print_bytes(&page(command).context("make a page of the manual")?)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn write_pages(command: &Command, folder: &Path) -> std::io::Result<()> {
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        write_pages(verb, folder)?;
    }
    let name = command.get_display_name().unwrap_or(command.get_name());
    fs::write(folder.join(format!("{name}.1")), page(command.clone())?)
}
