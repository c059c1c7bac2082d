//! The pods of this node by name, from the sources that know the names.
//!
//! ```text
//! containerd's CRI socket ──── names, states, how often a container was created ─┐
//! bundles' config.json ─────── names of running containers, without any query ────┼─► Pods
//! shims' and conmons' argv ─── whether the guard runs before a pod's creates ──────┘
//! ```
//!
//! If containerd does not answer, the bundles still have names. Without both, uids remain.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use bindguard_config::{Config, RefreshMode};
use bindguard_core::handover::{SHIM, VERSION_FILE, WRAPPER};
use bindguard_core::identity::{Identity, PodName};
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_operator::containers::{recorded_init_of, spec_of_container, tasks};
use bindguard_operator::cri;
use bindguard_operator::doctor::RunningPods;
use bindguard_operator::node::arguments_of_processes;
use bindguard_operator::pods::{ContainerState, PodContainer, Pods, is_called};
use bindguard_sys::files::read_spec;
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
        let (pods, has_cri) = self.pods_and_cri();
        if let Err(error) = has_cri {
            print_remark(format_args!(
                "pod names come from the bundles, without the CRI: {error:#}"
            ));
        }
        pods
    }

    /// All pods with a known name, and whether a CRI listed them.
    fn pods_and_cri(&self) -> (Pods, anyhow::Result<bool>) {
        let listed = cri::pods(self.cri.as_deref());
        let (mut pods, has_cri) = match listed {
            Ok(Some(pods)) => (pods, Ok(true)),
            Ok(None) => (Pods::default(), Ok(false)),
            Err(error) => (Pods::default(), Err(error)),
        };
        for bundle in bundled_containers(Path::new("/")) {
            let mut known = pods.containers.iter_mut();
            match known.find(|known| known.id == bundle.id) {
                Some(known) => {
                    known.guarded = bundle.guarded;
                    known.shim_version = bundle.shim_version;
                }
                None => pods.containers.push(bundle),
            }
        }
        let supervised = guarded();
        for container in &mut pods.containers {
            let supervised = supervised.get(&container.id);
            container.guarded = container.guarded.or(supervised.copied());
        }
        (pods, has_cri)
    }

    /// All pods, where the node's config may opt in every pod.
    pub fn pods_under(&self, config: &Config) -> Pods {
        under(config, self.pods())
    }

    /// The same, and the number of running pods. `Ok(None)` without a CRI.
    pub fn counted_under(&self, config: &Config) -> (Pods, anyhow::Result<Option<RunningPods>>) {
        let (pods, has_cri) = self.pods_and_cri();
        let count = has_cri.map(|has_cri| has_cri.then(|| running_pods(&pods)));
        (under(config, pods), count)
    }

    /// The user namespaces in the spec of a container: of its bundle, or of the spec that the CRI
    /// reports. `None` if neither is known.
    pub fn spec_of(&self, container: &str) -> Option<SpecUsers> {
        if let Some(spec) = spec_of_container(Path::new("/"), container) {
            return SpecUsers::from_spec(&spec).ok();
        }
        let info = cri::info_of(self.cri.as_deref(), container).ok()?;
        SpecUsers::from_spec(&info.spec?).ok()
    }

    /// The pid of a container's init, by the record of its runtime or by the CRI.
    pub fn init_of(&self, container: &str) -> Option<u32> {
        recorded_init_of(Path::new("/"), container)
            .or_else(|| cri::info_of(self.cri.as_deref(), container).ok()?.pid)
    }

    /// The sources of all writable mounts of a pod's containers in any state.
    ///
    /// # Errors
    /// If there is no CRI, or if the CRI does not answer.
    pub fn writable_mounts(&self, uid: &str) -> anyhow::Result<Vec<PathBuf>> {
        cri::writable_mounts(self.cri.as_deref(), uid)
    }
}

fn under(config: &Config, mut pods: Pods) -> Pods {
    if config.agent().refresh == RefreshMode::All {
        pods.opt_all_in();
    }
    pods
}

/// The running pods, and those among them before whose creates no guard runs. containerd keeps the
/// shim of a pod, whatever its files say later.
pub fn running_pods(pods: &Pods) -> RunningPods {
    let (mut all, mut unguarded) = (0, 0);
    for container in &pods.containers {
        if container.name.is_none() && container.state == Some(ContainerState::Running) {
            all += 1;
            unguarded += usize::from(container.guarded == Some(false));
        }
    }
    RunningPods { all, unguarded }
}

/// Fails for a pod that neither a runtime nor the kubelet's folders know: the operator expects it
/// here, and an empty report would mislead.
pub fn check_known(pods: &Pods, pod: Option<&str>) -> anyhow::Result<()> {
    let Some(pod) = pod else { return Ok(()) };
    let mut containers = pods.containers.iter();
    ensure!(
        containers.any(|container| is_called(&container.pod, pod)),
        "this node has no subpath and no volume of a pod {pod}: is it another node's?"
    );
    Ok(())
}

/// The uids of the pod that the operator names: several if the pod was created again under its
/// name. An unknown name may itself be a uid.
///
/// # Errors
/// If pods of several namespaces have this name.
pub fn uids_of(pods: &Pods, pod: Option<&str>) -> anyhow::Result<BTreeSet<String>> {
    let mut uids = BTreeSet::new();
    let Some(pod) = pod else { return Ok(uids) };
    let mut namespaces = BTreeSet::new();
    let mut names = BTreeSet::new();
    for PodContainer { pod: known, .. } in &pods.containers {
        if is_called(known, pod) {
            namespaces.insert(&known.namespace);
            names.extend(known.display_name());
            uids.extend(known.uid.clone());
        }
    }
    if namespaces.len() > 1 {
        bail!(
            "more than one pod is called {pod}: say which, {}",
            Vec::from_iter(names).join(" or ")
        );
    }
    if uids.is_empty() && is_called(&PodName::of_uid(pod), pod) {
        uids.insert(pod.to_owned());
    }
    Ok(uids)
}

// The running containers, from the annotations of containerd's bundles.

/// The containers that have a bundle of containerd, on a node whose `/` is at `root`.
pub fn bundled_containers(root: &Path) -> Vec<PodContainer> {
    tasks(root)
        .filter_map(|bundle| container(&bundle))
        .collect()
}

/// A bundle may disappear while it is read: its container is then gone as well.
fn container(bundle: &Path) -> Option<PodContainer> {
    let bytes = read_spec(bundle).ok()?;
    let identity = Identity::from_spec(&SpecView::from_bytes(&bytes).ok()?);
    // A shim writes the name of its OCI runtime into the bundle, and calls it until the container
    // is deleted.
    let runtime = fs::read_to_string(bundle.join("runtime"));
    let is_guarded = runtime.is_ok_and(|runtime| is_named(runtime.trim(), WRAPPER));
    // The shim writes its version into the bundle of the pod's first container alone.
    let version = fs::read_to_string(bundle.join(VERSION_FILE)).unwrap_or_default();
    let version = version.trim();
    Some(PodContainer {
        id: bundle.file_name()?.to_str()?.to_owned(),
        name: identity.container,
        state: None,
        attempt: None,
        pod: identity.pod,
        guarded: is_guarded.then_some(true),
        shim_version: (!version.is_empty()).then(|| version.to_owned()),
    })
}

// Checks whether the guard runs before the creates of a container, from the programs that
// supervise containers now.
//
// containerd keeps the shim of a pod's sandbox for all containers of the pod, even after a change
// of its config. So the running process decides, not the config. A conmon without the wrapper
// proves nothing: CRI-O and Podman may call the guard through a hook.

/// The kernel cuts the names of all of containerd's shims to this.
const SHIMS: &str = "containerd-shim";

const CONMON: &str = "conmon";

/// The ids that supervisors were started for (containerd: the id of the pod's sandbox), and whether
/// the guard runs there.
fn guarded() -> HashMap<String, bool> {
    let mut guarded = HashMap::new();
    for words in arguments_of_processes(SHIMS) {
        guarded.extend(of_shim(&words));
    }
    for words in arguments_of_processes(CONMON) {
        guarded.extend(of_conmon(&words));
    }
    guarded
}

fn of_shim(words: &[String]) -> Option<(String, bool)> {
    Some((
        value(words, &["-id", "--id"])?,
        is_named(words.first()?, SHIM),
    ))
}

fn of_conmon(words: &[String]) -> Option<(String, bool)> {
    let id = value(words, &["-c", "--cid"])?;
    is_named(&value(words, &["-r", "--runtime"])?, WRAPPER).then_some((id, true))
}

fn is_named(path: &str, name: &str) -> bool {
    Path::new(path).file_name().is_some_and(|file| file == name)
}

fn value(words: &[String], flags: &[&str]) -> Option<String> {
    let at = words
        .iter()
        .position(|word| flags.contains(&word.as_str()))?;
    words.get(at + 1).cloned()
}

#[cfg(test)]
mod supervisors_tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_shim_says_by_its_name_whether_it_calls_the_guard() {
        let of = |name: &str| {
            of_shim(&words(&format!(
                "/usr/bin/{name} -namespace k8s.io -id s-1 -address /run/c.sock"
            )))
        };
        assert_eq!(
            of("containerd-shim-bindguard-v2"),
            Some(("s-1".to_owned(), true))
        );
        assert_eq!(
            of("containerd-shim-runc-v2"),
            Some(("s-1".to_owned(), false))
        );
    }

    #[test]
    fn a_conmon_proves_only_the_wrapper() {
        let of = |runtime: &str| {
            of_conmon(&words(&format!(
                "/usr/bin/conmon -b /b -c c-1 -r {runtime} --syslog"
            )))
        };
        assert_eq!(
            of("/usr/local/bin/bindguard-runtime"),
            Some(("c-1".to_owned(), true))
        );
        assert_eq!(of("/usr/bin/crun"), None);
    }
}
