//! `bindguard check BUNDLE`: steps 2 to 6 of an admission, without any change.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use bindguard_config::Config;
use bindguard_core::judge::VerdictName;
use bindguard_core::report::Report;
use bindguard_guard::check_bundle;
use clap::Args;

use crate::named_file::check_answers;
use crate::show::{self, Lines};

/// The place of containerd's bundles.
const A_BUNDLE: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/ID";

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// The folder with config.json.
    bundle: PathBuf,
    /// Print the report as JSON, with the journal's keys.
    #[arg(long)]
    json: bool,
}

impl Check {
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        // The report names the bundle: a relative path is useless to a reader in a different
        // folder.
        let bundle = std::path::absolute(&self.bundle)?;
        check_answers(&bundle.join("config.json"))?;
        let report = check_bundle(&bundle, config.policy(), config.places());
        if let ([problem], true, false) = (&report.problems[..], report.binds.is_empty(), self.json)
        {
            bail!(
                "{problem}: BUNDLE is a folder with a container's config.json, such as {A_BUNDLE}"
            );
        }
        let (mut found, mut is_incomplete) = (0, !report.problems.is_empty());
        for bind in &report.binds {
            found += usize::from(bind.finding.verdict.is_finding());
            is_incomplete |= bind.verdict() == VerdictName::Unknown;
        }
        let text = |report: &Report| {
            let mut lines = Lines::of_problems(&report.problems);
            for bind in &report.binds {
                lines.bind(&bind.into());
            }
            lines.line(&format!(
                "{} checked, {found} with findings, {} foreign",
                report.binds.len(),
                report.foreign
            ));
            lines
        };
        show::finish(&report, self.json, text, is_incomplete, found > 0)
    }
}
