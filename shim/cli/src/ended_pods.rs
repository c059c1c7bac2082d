//! The pods that have ended and still have mounts or folders: `diagnose` lists them, `repair
//! --orphaned-pods` removes what is safe to remove.
//!
//! A pod of the CRI or of the kubelet has not ended. Both must answer; the kubelet's answer can be
//! the API server's. Without an answer nothing is removed.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_kubernetes::{
    Kubelet, NoPods, kubeconfig_here, node_name, pods_of_api_server, pods_of_kubelet,
};
use bindguard_operator::ended_pods::{EndedPods, LeftoversAct, Observations, PodFolders, left_by};
use bindguard_sys::read_mount_table;
use clap::Args;
use http::Uri;
use tokio::time::timeout;

use crate::pods::PodsFrom;
use crate::show::counted;
use crate::time_limits::check_answers;

/// The kubelet's usual port on its own node.
const KUBELET: &str = "https://127.0.0.1:10250";

/// Time limit for the kubelet, and for the API server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The source of the list of pods that have not ended.
#[derive(Debug, Clone, Args)]
pub struct PodsOfKubelet {
    /// Read the pods of this kubelet alone, such as http://127.0.0.1:10255 (default:
    /// https://127.0.0.1:10250, and the API server of the kubeconfig).
    #[arg(long, value_name = "URL")]
    kubelet: Option<Uri>,
    /// The credentials for the kubelet and the API server (default: the config's [agent.kubernetes]
    /// kubeconfig, or the kubelet's own).
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl PodsOfKubelet {
    /// The pods that have ended, for a report: without an answer the report names the reason. None
    /// on a node without a kubelet's kubeconfig.
    pub fn listed(&self, config: &Config, cri: &PodsFrom) -> EndedPods {
        if self.kubelet.is_none() && self.kubeconfig(config).is_none() {
            return EndedPods::default();
        }
        match self.find(config, cri, LeftoversAct::List) {
            Ok(found) => found,
            Err(error) => EndedPods::unchecked(format!("{error:#}")),
        }
    }

    /// Finds the pods that have ended, and removes their leftovers.
    ///
    /// # Errors
    /// If the CRI or the kubelet does not answer. Then nothing was done.
    pub fn find(&self, config: &Config, cri: &PodsFrom, act: LeftoversAct) -> Result<EndedPods> {
        let Some(folders) = PodFolders::here(config.places())? else {
            return Ok(EndedPods::default());
        };
        let in_cri = cri.uids()?;
        let without_sandbox: BTreeSet<String> =
            folders.uids().difference(&in_cri).cloned().collect();
        let observations = Observations::default();
        let absent = if without_sandbox.is_empty() {
            BTreeSet::new()
        } else {
            let known = self.known(config, &folders, observations.boot_id());
            let known = known.with_context(|| {
                let folders = counted(
                    without_sandbox.len(),
                    "pod folder has no sandbox",
                    "pod folders have no sandbox",
                );
                format!("{folders}, and no kubelet reports its pods")
            })?;
            without_sandbox.difference(&known).cloned().collect()
        };
        let absent = observations
            .record(&absent)
            .context("record when pods were first absent")?;
        let table = read_mount_table().map_err(|error| anyhow!("{}", error_chain(&error)))?;
        let pods = absent
            .into_iter()
            .map(|pod| left_by(pod, &folders, &table, act));
        Ok(EndedPods {
            pods: pods.collect(),
            unchecked: None,
        })
    }

    fn kubeconfig(&self, config: &Config) -> Option<PathBuf> {
        let named = self.kubeconfig.as_ref();
        let named = named.or(config.agent().kubernetes.kubeconfig.as_ref());
        named.cloned().or_else(kubeconfig_here)
    }

    /// The uids of the pods that have not ended: from the kubelet and from the API server. An
    /// answer of either suffices.
    fn known(
        &self,
        config: &Config,
        folders: &PodFolders,
        boot_id: &str,
    ) -> Result<BTreeSet<String>> {
        let kubeconfig = self.kubeconfig(config);
        if let Some(path) = &kubeconfig {
            check_answers(path)?;
        }
        let node = node_name(config.agent().kubernetes.node.as_deref());
        let kubelet = Kubelet {
            server: self
                .kubelet
                .clone()
                .unwrap_or_else(|| Uri::from_static(KUBELET)),
            node: node.clone(),
            kubeconfig: kubeconfig.clone(),
            certificates: vec![folders.root().join("pki/kubelet.crt")],
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("make a tokio runtime")?;
        runtime.block_on(async {
            let server = kubelet.server.clone();
            if self.kubelet.is_some() {
                return answered(pods_of_kubelet(kubelet))
                    .await
                    .with_context(|| format!("query {server}"));
            }
            let kubeconfig = kubeconfig
                .context("no kubeconfig is known; give --kubeconfig FILE or --kubelet URL")?;
            let of_kubelet = answered(pods_of_kubelet(kubelet)).await;
            let of_server = answered(pods_of_api_server(kubeconfig, &node, boot_id)).await;
            match (of_kubelet, of_server) {
                (Ok(mut pods), Ok(more)) => {
                    pods.extend(more);
                    Ok(pods)
                }
                (Ok(pods), Err(_)) | (Err(_), Ok(pods)) => Ok(pods),
                (Err(one), Err(other)) => {
                    bail!("query {server}: {one:#}; query the API server: {other:#}")
                }
            }
        })
    }
}

async fn answered(
    pods: impl Future<Output = Result<BTreeSet<String>, NoPods>>,
) -> Result<BTreeSet<String>> {
    match timeout(ANSWER_TIMEOUT, pods).await {
        Ok(Ok(pods)) => Ok(pods),
        Ok(Err(error)) => bail!("{}", error_chain(&error)),
        Err(_) => bail!("no answer within {} s", ANSWER_TIMEOUT.as_secs()),
    }
}
