//! helm on a cluster, with the chart of the repository.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use super::Cluster;
use crate::doc_commands::repository;

/// The release that a story installs.
#[derive(Debug)]
pub struct Helm {
    program: PathBuf,
    kubeconfig: PathBuf,
    home: PathBuf,
    namespace: &'static str,
}

impl Helm {
    /// The program of `helm/fetch.sh`: `$BINDGUARD_HELM/bin/helm`.
    pub fn program() -> Option<PathBuf> {
        let program = Path::new(&env::var_os("BINDGUARD_HELM")?).join("bin/helm");
        program.is_file().then_some(program)
    }

    /// helm for a namespace of this cluster.
    pub fn on(cluster: &Cluster<'_>, namespace: &'static str) -> Result<Self> {
        let program = Self::program().context("no helm: run integration/helm/fetch.sh, set BINDGUARD_HELM")?;
        Ok(Self { program, kubeconfig: cluster.kubeconfig.clone(), home: cluster.folder().join("helm"), namespace })
    }

    /// The folder of the chart.
    pub fn chart() -> String {
        repository().join("config/chart").display().to_string()
    }

    /// Starts helm with these words. It may wait for pods, and the story plays systemd meanwhile.
    pub fn start(&self, words: &[&str]) -> Result<Child> {
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(["--namespace", self.namespace]).args(words);
        command.env("HOME", &self.home).stdin(Stdio::null());
        command.spawn().with_context(|| format!("start helm {words:?}"))
    }
}
