//! `bindguard`: the operator's command line. The verbs of a topic are a file; text and `--json` are
//! the same report.
//!
//! Exit codes: 0 no findings, 1 findings, 2 incomplete: a part could not be checked.
#![forbid(unsafe_code)]

mod check;
mod config;
mod diagnose;
mod doctor;
mod holders;
mod journal;
mod named_file;
mod pods;
mod refresh;
mod selftest;
mod show;
mod status;

use std::path::PathBuf;
use std::process::ExitCode;

use bindguard_config::{Config, Loaded, load};
use bindguard_installer::session::{DEBUG_ROOT, enter_node, is_in_debug_pod};
use bindguard_operator::node::is_root;
use clap::{CommandFactory, Parser, Subcommand};

/// The end of the help of every verb that checks something.
const EXIT_CODES: &str =
    "Exit status: 0 no problems, 1 problems found, 2 incomplete (an error prevented a full check).";
const CHANGE_CODES: &str = "Exit status: 0 done, 1 work remains, 2 failed.";
const WHERE_TO_BEGIN: &str = "Where to begin:
  bindguard diagnose --pod default/web   a pod does not start, or shows old files
  bindguard holders /mnt/disk            \"device or resource busy\"
  bindguard status                       is this node guarded?
  bindguard doctor                       the node itself
  bindguard selftest                     its kernel and runtimes, by trying them
  bindguard install --dry-run            what an installation would change

Exit status: 0 no problems, 1 problems found, 2 incomplete (an error prevented a full check).";

/// Find stale, dead and pinning mounts of this node and repair them, so that no container starts on
/// a wrong bind mount.
#[derive(Debug, Parser)]
#[command(name = "bindguard", version, about, arg_required_else_help = true, after_help = WHERE_TO_BEGIN)]
struct Arguments {
    /// Read this config instead of $BINDGUARD_CONFIG or /etc/bindguard/config.toml.
    #[arg(long, global = true, value_name = "FILE", display_order = 100)]
    config: Option<PathBuf>,
    /// The node's root directory as this privileged pod with the node's processes sees it. Every
    /// other path is a path of the node.
    #[arg(long, global = true, value_name = "DIR", display_order = 101)]
    root: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Report what the check of a create would find in a bundle, and what it would do. Changes nothing.
    #[command(after_help = EXIT_CODES)]
    Check(check::Check),
    /// Judge every volume-subpath and volume of this node and the binds of running containers.
    /// Changes nothing.
    #[command(after_help = EXIT_CODES)]
    Diagnose(diagnose::Diagnose),
    /// Bind the current files over stale volume-subpaths, now.
    #[command(after_help = EXIT_CODES)]
    Repair(diagnose::Repair),
    /// Replace stale mounts of running containers, now: subPaths, volumes, binds of the host's root,
    /// files of the host.
    #[command(after_help = EXIT_CODES)]
    Refresh(refresh::Refresh),
    /// Report who keeps the mounts at or below a path alive: "device or resource busy". Changes
    /// nothing.
    #[command(after_help = EXIT_CODES)]
    Holders(holders::Holders),
    /// Unmount copies of mounts that this node has unmounted, in running containers with a private
    /// bind of the host's root.
    #[command(after_help = EXIT_CODES)]
    Release(holders::ReleaseVerb),
    /// Check this node, point by point, and print a command for each problem. Changes nothing.
    #[command(after_help = EXIT_CODES)]
    Doctor(doctor::Doctor),
    /// Test what this node's kernel and OCI runtimes do with bindguard, in namespaces of its own.
    /// Changes nothing, and leaves nothing.
    #[command(after_help = EXIT_CODES)]
    Selftest(selftest::Selftest),
    /// Report whether this node is guarded: runtimes, restart owed, config, pods, last creates,
    /// findings. Changes nothing.
    #[command(after_help = EXIT_CODES)]
    Status(status::StatusVerb),
    /// Print what was found and done at this node's creates and refreshes.
    #[command(after_help = EXIT_CODES)]
    Journal(journal::Journal),
    /// Install bindguard on this node: the programs, and a runtime `bindguard` in the runtimes' own
    /// files.
    #[command(after_help = CHANGE_CODES)]
    Install(bindguard_installer::Install),
    /// Remove bindguard from this node: restore every file as it was before.
    #[command(after_help = CHANGE_CODES)]
    Uninstall(bindguard_installer::Uninstall),
    /// Run as an engine's hook: check and repair the spec that the engine passes.
    #[command(subcommand)]
    Hook(check::HookVerb),
    /// Check the config file, or print the active settings, or a config with every key.
    #[command(subcommand)]
    Config(config::ConfigVerb),
    /// Print the completions for a shell.
    Completions(config::Completions),
    /// Print the manual, or write a page for each verb.
    Man(config::Manual),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
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
