//! The pods of this node by name, from the sources that know the names.
//!
//! ```text
//! containerd's CRI socket ──── names, states, how often a container was created ─┐
//! bundles' config.json ─────── names of running containers, without any query ────┼─► Pods
//! shims' and conmons' argv ─── whether the guard runs before a pod's creates ──────┘
//! ```
//!
//! If containerd does not answer, the bundles still have names. Without both, uids remain.

mod bundles;
mod supervisors;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use bindguard_config::{Config, RefreshMode};
use bindguard_core::identity::PodName;
use bindguard_core::spec::SpecUsers;
use bindguard_operator::bundles::spec_of_container;
use bindguard_operator::cri::of_node;
use bindguard_operator::doctor::RunningPods;
use bindguard_operator::pods::{ContainerState, PodContainer, PodSelector, Pods};
use clap::Args;

use crate::show::print_remark;

/// The sources of the names.
#[derive(Debug, Clone, Args)]
pub struct PodsFrom {
    /// The socket of the CRI (default: the first that exists of containerd's, k3s', k0s', MicroK8s'
    /// and CRI-O's).
    #[arg(long, value_name = "SOCKET")]
    cri: Option<PathBuf>,
}

impl PodsFrom {
    /// All pods with a known name. A failure of the CRI goes to stderr and is no error: names are a
    /// convenience.
    pub fn pods(&self) -> Pods {
        let Pods {
            mut containers,
            refresh_requests,
            runtime_directories,
        } = self.listed_by_the_cri();
        for bundle in bundles::containers(Path::new("/")) {
            match containers.iter_mut().find(|known| known.id == bundle.id) {
                Some(known) => {
                    known.guarded = bundle.guarded;
                    known.shim_version = bundle.shim_version;
                }
                None => containers.push(bundle),
            }
        }
        let supervised = supervisors::guarded();
        for container in &mut containers {
            container.guarded = container
                .guarded
                .or_else(|| supervised.get(&container.id).copied());
        }
        Pods {
            containers,
            refresh_requests,
            runtime_directories,
        }
    }

    /// The same, where the node's config may opt in every pod.
    pub fn pods_under(&self, config: &Config) -> Pods {
        let mut pods = self.pods();
        if config.agent().refresh == RefreshMode::All {
            pods.opt_all_in();
        }
        pods
    }

    /// The user namespaces in the spec of a container: of its bundle, or of the spec that the CRI
    /// reports. `None` if neither is known.
    pub fn spec_of(&self, container: &str) -> Option<SpecUsers> {
        if let Some(spec) = spec_of_container(Path::new("/"), container) {
            return SpecUsers::from_spec(&spec).ok();
        }
        let info = of_node::info_of(self.cri.as_deref(), container).ok()?;
        SpecUsers::from_spec(info.spec()?).ok()
    }

    /// The pid of a container's init that the CRI reports. `None` if the CRI knows no pid.
    pub fn init_of(&self, container: &str) -> Option<u32> {
        let info = of_node::info_of(self.cri.as_deref(), container);
        info.ok().and_then(|info| info.pid())
    }

    /// The sources of all writable mounts of a pod's containers in any state.
    ///
    /// # Errors
    /// If there is no CRI, or if the CRI does not answer.
    pub fn writable_mounts(&self, uid: &str) -> anyhow::Result<Vec<PathBuf>> {
        of_node::writable_mounts(self.cri.as_deref(), uid)
    }

    fn listed_by_the_cri(&self) -> Pods {
        of_node::pods(self.cri.as_deref()).unwrap_or_else(|error| {
            print_remark(format_args!(
                "pod names come from the bundles, without the CRI: {error:#}"
            ));
            Pods::default()
        })
    }
}

/// The running pods, and those among them before whose creates no guard runs. containerd keeps the
/// shim of a pod, whatever its files say later.
pub fn running_pods(pods: &Pods) -> RunningPods {
    let is_running = |container: &&PodContainer| {
        container.name.is_none() && container.state == Some(ContainerState::Running)
    };
    let sandboxes = || pods.containers.iter().filter(is_running);
    RunningPods {
        all: sandboxes().count(),
        unguarded: sandboxes()
            .filter(|sandbox| sandbox.guarded == Some(false))
            .count(),
    }
}

/// The error about a pod that neither a runtime nor the kubelet's folders know: the operator
/// expects it here, and an empty report would mislead.
pub fn unknown_pod(pods: &Pods, pod: &str) -> Option<anyhow::Error> {
    let selector = PodSelector::from_argument(pod);
    let is_known = pods.containers.iter().any(|one| selector.is(&one.pod));
    (!is_known).then(|| {
        anyhow!("this node has no subpath and no volume of a pod {pod}: is it another node's?")
    })
}

/// The pods with a bundle on a node whose `/` is at `root`.
pub fn recorded(root: &Path) -> Pods {
    Pods {
        containers: bundles::containers(root),
        ..Pods::default()
    }
}

/// The uids of the pod that the operator names: several if the pod was created again under its
/// name. An unknown name may itself be a uid.
///
/// # Errors
/// If pods of several namespaces have this name.
pub fn uids(pods: &Pods, selector: &PodSelector) -> anyhow::Result<Vec<String>> {
    let meant: Vec<&PodName> = pods
        .containers
        .iter()
        .map(|container| &container.pod)
        .filter(|pod| selector.is(pod))
        .collect();
    let names: BTreeSet<String> = meant.iter().filter_map(|pod| pod.display_name()).collect();
    let namespaces: BTreeSet<_> = meant.iter().map(|pod| &pod.namespace).collect();
    if namespaces.len() > 1 {
        bail!(
            "more than one pod is called {}: say which, {}",
            selector.display_name(),
            Vec::from_iter(names).join(" or ")
        );
    }
    let mut uids: Vec<String> = meant.iter().filter_map(|pod| pod.uid.clone()).collect();
    uids.sort();
    uids.dedup();
    if uids.is_empty() && selector.is(&PodName::of_uid(&selector.display_name())) {
        uids.push(selector.display_name());
    }
    Ok(uids)
}
