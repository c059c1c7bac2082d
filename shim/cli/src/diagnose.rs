//! `bindguard diagnose`: every volume-subpath of the node, judged as an admission would.

use std::process::ExitCode;

use bindguard_core::policy::Policy;
use bindguard_guard::diagnose_node;
use clap::Args;

use crate::show;

/// Arguments of `diagnose`.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// Print the report as JSON, in the journal's words.
    #[arg(long)]
    json: bool,
}

impl Diagnose {
    /// Runs it.
    pub fn run(self, policy: &Policy) -> anyhow::Result<ExitCode> {
        let report = diagnose_node(policy);
        show::print(&report, self.json)?;
        Ok(show::exit_code(&report))
    }
}
