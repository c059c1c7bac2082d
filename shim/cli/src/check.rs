//! `bindguard check BUNDLE`: steps 2 to 6 of an admission, without any change. And
//! `bindguard hook precreate`: a door for engines that let a hook edit the spec before any runtime
//! sees it.
//!
//! Podman and CRI-O run a `precreate` hook with the spec on stdin and read the spec from its
//! stdout: see oci-hooks(5). The admission is the same as for a runtime. After any error the hook
//! returns the spec unchanged, byte for byte, and writes the reason to stderr. Only a policy of
//! `refuse` makes the hook, and so the container, fail.

use std::fs;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::judge::{VerdictName, refusal_of_unseen};
use bindguard_core::report::CreateLine;
use bindguard_guard::{Attempt, admit, check_bundle, record};
use bindguard_installer::private_folder;
use bindguard_sys::write_new_file;
use clap::{Args, Subcommand};

use crate::named_file::check_answers;
use crate::show::{self, Lines, Output, print_remark};

/// The place of containerd's bundles.
const A_BUNDLE: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/ID";

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// The folder with config.json.
    bundle: PathBuf,
    #[command(flatten)]
    output: Output,
}

impl Check {
    pub fn run(self, config: &Config) -> Result<ExitCode> {
        // The report names the bundle: a relative path is useless to a reader in a different
        // folder.
        let bundle = std::path::absolute(&self.bundle)?;
        check_answers(&bundle.join("config.json"))?;
        let report = check_bundle(&bundle, config.policy(), config.places());
        if let ([problem], true, false) = (
            &report.problems[..],
            report.binds.is_empty(),
            !self.output.is_text(),
        ) {
            bail!(
                "{problem}: BUNDLE is a folder with a container's config.json, such as {A_BUNDLE}"
            );
        }
        let (mut found, mut is_incomplete) = (0, !report.problems.is_empty());
        for bind in &report.binds {
            found += usize::from(bind.finding.verdict.is_finding());
            is_incomplete |= bind.verdict() == VerdictName::Unknown;
        }
        let mut lines = Lines::of_problems(&report.problems);
        for bind in &report.binds {
            lines.bind(&bind.into());
        }
        lines.line(&format!(
            "{} checked, {found} with findings, {} foreign",
            report.binds.len(),
            report.foreign
        ));
        show::finish(&report, self.output, lines, is_incomplete, found > 0)
    }
}

/// Verbs of `hook`.
#[derive(Debug, Subcommand)]
pub enum HookVerb {
    /// Read a spec from stdin, check and repair it, write it to stdout.
    Precreate,
}

impl HookVerb {
    pub fn run(self, config: &Config) -> Result<ExitCode> {
        let Self::Precreate = self;
        let mut spec = Vec::new();
        io::stdin()
            .read_to_end(&mut spec)
            .context("read the spec on stdin")?;
        let (refusal, spec) = admitted(&spec, config).unwrap_or_else(|error| {
            let refusal = refusal_of_unseen(&format!("{error:#}"), config.policy());
            if refusal.is_none() {
                print_remark(format_args!("{error:#}; the spec goes on as it came"));
            }
            (refusal, spec)
        });
        if let Some(reason) = refusal {
            print_remark(format_args!("refused: {reason}"));
            return Ok(ExitCode::FAILURE);
        }
        let mut out = io::stdout().lock();
        out.write_all(&spec)
            .and_then(|()| out.flush())
            .context("write the spec to stdout")?;
        Ok(ExitCode::SUCCESS)
    }
}

/// There is no bundle yet: the admission gets a temporary bundle.
fn admitted(spec: &[u8], config: &Config) -> Result<(Option<String>, Vec<u8>)> {
    let bundle = private_folder().context("create a folder for the spec")?;
    let file = bundle.path().join("config.json");
    write_new_file(&file, spec, 0o600).with_context(|| format!("write {}", file.display()))?;
    let (policy, places) = (config.policy(), config.places());
    let mut admission = admit(bundle.path(), policy, places, Attempt::First);
    let report = &mut admission.report;
    // the temporary bundle is removed after the admission
    report.bundle = None;
    for bind in &report.binds {
        if let Some(remark) = bind.log_message() {
            print_remark(remark);
        }
    }
    report.problems.iter().for_each(print_remark);
    let mut line = CreateLine::new(&*report);
    line.refused.clone_from(&admission.refusal);
    if let Some(journal) = config.journal()
        && let Err(problem) = record(journal, line)
    {
        print_remark(error_chain(&problem));
    }
    let edited = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
    Ok((admission.refusal, edited))
}
