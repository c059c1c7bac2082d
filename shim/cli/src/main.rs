//! `bindguard`: the operator's command line. The verbs of a topic are a file; text, JSON and YAML are
//! the same report.
//!
//! Exit codes: 0 no findings, 1 findings, 2 incomplete: a part could not be checked.
#![forbid(unsafe_code)]

mod check;
mod config;
mod diagnose;
mod doctor;
mod findings;
mod holders;
mod journal;
mod man_page;
mod manual;
mod named_file;
mod pods;
mod refresh;
mod selftest;
mod show;
mod status;

use std::path::PathBuf;
use std::process::ExitCode;

use crate::man_page::end_of_help;
use bindguard_config::{Config, Loaded, load};
use bindguard_installer::session::{DEBUG_ROOT, enter_node, is_in_debug_pod};
use bindguard_operator::node::is_root;
use clap::{ColorChoice, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

/// Find stale, dead and pinning mounts of this node and repair them, so that no container starts on
/// a wrong bind mount.
#[derive(Debug, Parser)]
#[command(name = "bindguard", version, arg_required_else_help = true)]
struct Arguments {
    /// Read this config instead of $BINDGUARD_CONFIG or /etc/bindguard/config.toml.
    #[arg(long, global = true, value_name = "FILE", display_order = 100)]
    config: Option<PathBuf>,
    /// The node's root directory as this privileged pod with the node's processes sees it. Every
    /// other path is a path of the node.
    #[arg(long, global = true, value_name = "DIR", display_order = 101)]
    root: Option<PathBuf>,
    /// Colour the text. By default, only on a terminal and without `NO_COLOR`.
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        value_enum,
        default_value_t,
        hide_default_value = true,
        display_order = 102
    )]
    color: ColorChoice,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Report what a create would find and do in a bundle.
    ///
    /// Changes nothing.
    Check(check::Check),
    /// Report stale, dead and pinned mounts, grouped by pod.
    ///
    /// Judges every volume-subpath and volume of this node and the binds of running containers.
    /// Changes nothing.
    Diagnose(diagnose::Diagnose),
    /// Bind the current files over stale volume-subpaths.
    Repair(diagnose::Repair),
    /// Replace stale mounts of running containers.
    ///
    /// SubPaths, volumes, binds of the host's root, files of the host: see --what.
    Refresh(refresh::Refresh),
    /// Report what keeps a mount busy: "device or resource busy".
    ///
    /// Reports the mount namespaces with a mount at or below the path. Changes nothing.
    Holders(holders::Holders),
    /// Unmount containers' copies of mounts that are gone here.
    ///
    /// In running containers with a private bind of the host's root.
    Release(holders::ReleaseVerb),
    /// Check this node and print a command for each problem.
    ///
    /// Changes nothing.
    Doctor(doctor::Doctor),
    /// Test this node's kernel and OCI runtimes with bindguard.
    ///
    /// In namespaces of its own. Changes nothing, and leaves nothing.
    Selftest(selftest::Selftest),
    /// Report whether this node is guarded.
    ///
    /// Runtimes, restart owed, config, pods, last creates, findings. Changes nothing.
    Status(status::StatusVerb),
    /// Print what creates and refreshes found and did.
    Journal(journal::Journal),
    /// Install the programs, and a runtime `bindguard`.
    ///
    /// The runtime is added to the files of containerd, Docker, Podman and CRI-O.
    Install(bindguard_installer::Install),
    /// Remove bindguard: restore every file as it was before.
    Uninstall(bindguard_installer::Uninstall),
    /// Check and repair the spec of an engine's hook.
    #[command(subcommand)]
    Hook(check::HookVerb),
    /// Check or print the config: active settings, defaults.
    #[command(subcommand)]
    Config(config::ConfigVerb),
    /// Print the version and the revision.
    Version,
    /// Print the completions for a shell.
    Completions(manual::Completions),
    /// Print the manual, or write a page for each verb.
    Man(manual::Manual),
}

/// Adds the list of the verbs by task, and examples and exit codes.
fn with_ends(command: Command) -> Command {
    command
        .mut_subcommands(|verb| {
            let end = end_of_help(&format!("bindguard-{}", verb.get_name()));
            verb.after_help(end)
        })
        .before_help(include_str!("tasks.txt"))
        .after_help(end_of_help("bindguard"))
        .help_template(
            "{about-with-newline}\n{usage-heading} {usage}\n\n{before-help}Options:\n{options}{after-help}",
        )
}

fn main() -> ExitCode {
    let matches = with_ends(Arguments::command()).get_matches();
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match arguments.color {
        ColorChoice::Auto => {}
        ColorChoice::Always => anstream::ColorChoice::Always.write_global(),
        ColorChoice::Never => anstream::ColorChoice::Never.write_global(),
    }
    match run(arguments) {
        Ok(code) => {
            if code == ExitCode::from(show::COULD_NOT_TELL) && !is_root() {
                show::print_remark("not everything could be checked: run it as root");
            }
            code
        }
        Err(error) => {
            let mut line = format!("{error:#}");
            // EPERM and EACCES, by number: their text depends on the locale.
            let is_denied = line.contains("(os error 1)") || line.contains("(os error 13)");
            if is_denied && !is_root() {
                line += ": run it as root";
            }
            show::print_remark(line);
            ExitCode::from(show::COULD_NOT_TELL)
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    if let Some(root) = arguments.root {
        match &arguments.verb {
            // of an image
            Verb::Install(_) | Verb::Uninstall(_) => {}
            // reads files below the directory
            Verb::Diagnose(diagnose) if diagnose.mountinfo.is_some() => {}
            // These read files, and no mounts.
            Verb::Status(_) | Verb::Journal(_) | Verb::Config(_) => {
                enter_node(&root, false)?;
            }
            _ => enter_node(&root, true)?,
        }
        let _ = show::NODE_ROOT.set(root);
    } else if is_in_debug_pod() {
        let verb = match &arguments.verb {
            Verb::Status(_) => "status",
            Verb::Doctor(_) => "doctor",
            Verb::Diagnose(_) => "diagnose",
            _ => "",
        };
        anyhow::ensure!(
            verb.is_empty(),
            "this is a pod, and the root of its node is {DEBUG_ROOT}; run bindguard {verb} --root {DEBUG_ROOT}"
        );
    }
    let named = arguments.config;
    // A config that `--config` names must be valid. An invalid config of the node is not used, as
    // in an admission.
    let config = || -> anyhow::Result<Config> {
        let loaded = loaded(named.clone())?;
        loaded.remarks().iter().for_each(show::print_remark);
        Ok(loaded.config)
    };
    match arguments.verb {
        Verb::Check(verb) => verb.run(&config()?),
        Verb::Diagnose(verb) => verb.run(&config()?),
        Verb::Repair(verb) => verb.run(&config()?),
        Verb::Refresh(verb) => verb.run(&config()?),
        Verb::Holders(verb) => verb.run(&config()?),
        Verb::Release(verb) => verb.run(&config()?),
        Verb::Doctor(verb) => verb.run(&loaded(named)?),
        Verb::Selftest(verb) => verb.run(),
        Verb::Status(verb) => verb.run(&loaded(named)?),
        Verb::Journal(verb) => verb.run(&config()?),
        Verb::Install(verb) => verb.run(),
        Verb::Uninstall(verb) => verb.run(),
        Verb::Hook(verb) => verb.run(&config()?),
        Verb::Config(verb) => verb.run(named),
        Verb::Version => config::print_version(),
        Verb::Completions(verb) => verb.run(Arguments::command()),
        Verb::Man(verb) => verb.run(Arguments::command()),
    }
}

fn loaded(named: Option<PathBuf>) -> anyhow::Result<Loaded> {
    named_file::check_answers(&named.clone().unwrap_or_else(config::in_force))?;
    match named {
        Some(path) => Ok(Loaded::from_file(&path)?),
        None => Ok(load()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_has_every_verb_once_in_eighty_columns() {
        let mut command = with_ends(Arguments::command());
        let tasks = include_str!("tasks.txt");
        for verb in command.get_subcommands() {
            let line = format!(
                "\n  {:<12} {}\n",
                verb.get_name(),
                verb.get_about().unwrap()
            );
            assert_eq!(tasks.matches(&line).count(), 1, "{line}");
        }
        assert!(
            tasks.lines().all(|line| line.chars().count() <= 80),
            "{tasks}"
        );
        let help = command.render_help().to_string();
        assert!(
            help.starts_with("Find stale, dead and pinning mounts"),
            "{help}"
        );
        assert!(
            help.contains(tasks.trim_end()) && help.contains("\nExamples:\n"),
            "{help}"
        );
    }
}
