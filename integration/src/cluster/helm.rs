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
    validation: &'static [&'static str],
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
        let program = Self::program()
            .context("no helm: run integration/helm/fetch.sh, set BINDGUARD_HELM")?;
        let validation: &[_] = if cluster.is_own_build {
            &["--disable-openapi-validation"]
        } else {
            &[]
        };
        let home = cluster.folder().join("helm");
        Ok(Self {
            program,
            kubeconfig: cluster.kubeconfig.clone(),
            home,
            validation,
            namespace,
        })
    }

    /// The folder of the chart.
    pub fn chart() -> String {
        repository().join("config/chart").display().to_string()
    }

    /// Starts `helm install` or `helm upgrade` of the chart with these words. See [`Helm::start`].
    pub fn apply_chart(&self, words: &[&str]) -> Result<Child> {
        self.start(&[words, self.validation].concat())
    }

    /// Starts helm with these words. It may wait for pods, and the story plays systemd meanwhile.
    pub fn start(&self, words: &[&str]) -> Result<Child> {
        let mut command = Command::new(&self.program);
        command
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(["--namespace", self.namespace])
            .args(words);
        command.env("HOME", &self.home).stdin(Stdio::null());
        command
            .spawn()
            .with_context(|| format!("start helm {words:?}"))
    }
}
