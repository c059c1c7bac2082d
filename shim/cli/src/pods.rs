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

use anyhow::bail;
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
use clap::builder::NonEmptyStringValueParser;

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
        // The ids that supervisors were started for (containerd: the id of the pod's sandbox), and
        // whether the guard runs there.
        let mut supervised = HashMap::new();
        for words in arguments_of_processes(SHIMS) {
            supervised.extend(of_shim(&words));
        }
        for words in arguments_of_processes("conmon") {
            supervised.extend(of_conmon(&words));
        }
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

/// The pods that the operator means.
#[derive(Debug, Clone, Default, Args)]
pub struct Selection {
    /// Only this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD", value_parser = NonEmptyStringValueParser::new())]
    pub pod: Option<String>,
    /// Only pods of this namespace.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    pub namespace: Option<String>,
    /// The pods of all namespaces on this node.
    #[arg(short = 'A', long, conflicts_with_all = ["namespace", "pod"])]
    pub all_namespaces: bool,
}

/// Parses `pod/NAME`.
///
/// # Errors
/// If it has another form.
pub fn pod_argument(text: &str) -> anyhow::Result<String> {
    match text.split_once('/') {
        Some(("pod" | "pods" | "po", name)) if !name.is_empty() => Ok(name.to_owned()),
        _ => bail!("expected pod/NAME; `--pod` takes NAMESPACE/NAME or a uid"),
    }
}

impl Selection {
    /// The same, with the pod of a `pod/NAME`.
    #[must_use]
    pub fn with(mut self, named: Option<String>) -> Self {
        self.pod = named.or(self.pod);
        self
    }

    pub fn is_all(&self) -> bool {
        self.pod.is_none() && self.namespace.is_none()
    }

    pub fn includes(&self, pod: &PodName) -> bool {
        self.pod.as_ref().is_none_or(|name| is_called(pod, name))
            && (self.namespace.is_none() || self.namespace == pod.namespace)
    }

    /// The command that repairs the subpaths of these pods.
    pub fn repair_command(&self) -> String {
        let mut command = "bindguard repair".to_owned();
        for (flag, value) in [("--pod", &self.pod), ("--namespace", &self.namespace)] {
            if let Some(value) = value {
                command += &format!(" {flag} {value}");
            }
        }
        command + if self.is_all() { " --all" } else { "" }
    }

    /// The uids of these pods: several if a pod was created again under its name. An unknown name
    /// may itself be a uid.
    ///
    /// # Errors
    /// If pods of several namespaces have the name.
    pub fn uids(&self, pods: &Pods) -> anyhow::Result<BTreeSet<String>> {
        let mut uids = BTreeSet::new();
        let (mut namespaces, mut names) = (BTreeSet::new(), BTreeSet::new());
        for PodContainer { pod, .. } in &pods.containers {
            if self.includes(pod) {
                namespaces.insert(&pod.namespace);
                names.extend(pod.display_name());
                uids.extend(pod.uid.clone());
            }
        }
        let Some(name) = &self.pod else {
            return Ok(uids);
        };
        if namespaces.len() > 1 {
            bail!(
                "more than one pod is called {name}: say which, {}",
                Vec::from_iter(names).join(" or ")
            );
        }
        if uids.is_empty() && self.includes(&PodName::of_uid(name)) {
            uids.insert(name.clone());
        }
        Ok(uids)
    }

    /// Fails for pods that neither a runtime nor the kubelet's folders know: the operator expects
    /// them here, and an empty report would mislead.
    pub fn check_known(&self, pods: &Pods) -> anyhow::Result<()> {
        let mut containers = pods.containers.iter();
        if self.is_all() || containers.any(|container| self.includes(&container.pod)) {
            return Ok(());
        }
        let Some(pod) = &self.pod else {
            let namespace = self.namespace.as_deref().unwrap_or_default();
            bail!(
                "this node has no pod of namespace {namespace}: `bindguard diagnose` lists all namespaces"
            );
        };
        let mut message = format!("this node has no subpath and no volume of a pod {pod}");
        if let Some(namespace) = &self.namespace {
            message += &format!(" in namespace {namespace}");
        }
        message += ": is it another node's?";
        let similar = similar(pods, pod);
        if !similar.is_empty() {
            message += &format!("; known here: {}", similar.join(", "));
        }
        bail!(message)
    }
}

/// The pods whose names resemble a name, at most three. A name may lack the suffix of its
/// `ReplicaSet`.
fn similar(pods: &Pods, name: &str) -> Vec<String> {
    let wanted = name.rsplit('/').next().unwrap_or(name);
    let mut known = BTreeSet::new();
    for container in &pods.containers {
        known.extend(container.pod.display_name());
    }
    let mut ranked = Vec::new();
    for pod in known {
        let called = pod.rsplit('/').next().unwrap_or(&pod);
        let likeness = match called.contains(wanted) || wanted.contains(called) {
            true => 1.0,
            false => strsim::jaro_winkler(called, wanted),
        };
        if likeness > 0.8 {
            ranked.push((likeness, pod));
        }
    }
    ranked.sort_by(|one, other| other.0.total_cmp(&one.0));
    ranked.into_iter().take(3).map(|(_, pod)| pod).collect()
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
mod selection_tests {
    use super::*;

    fn pods(names: &[(&str, &str)]) -> Pods {
        let mut pods = Pods::default();
        for (namespace, name) in names {
            let pod = PodName {
                uid: Some(format!("uid-{namespace}-{name}")),
                namespace: Some((*namespace).to_owned()),
                name: Some((*name).to_owned()),
            };
            let container = PodContainer {
                pod,
                ..PodContainer::default()
            };
            pods.containers.push(container);
        }
        pods
    }

    #[test]
    fn a_namespace_tells_pods_of_one_name_apart() {
        let pods = pods(&[("shop", "web"), ("default", "web"), ("shop", "db")]);
        let named = |pod: Option<&str>, namespace: Option<&str>| Selection {
            pod: pod.map(str::to_owned),
            namespace: namespace.map(str::to_owned),
            all_namespaces: false,
        };
        assert!(named(Some("web"), None).uids(&pods).is_err());
        let web = named(Some("web"), Some("shop"));
        assert_eq!(Vec::from_iter(web.uids(&pods).unwrap()), ["uid-shop-web"]);
        assert_eq!(named(None, Some("shop")).uids(&pods).unwrap().len(), 2);
        assert!(
            named(Some("web"), Some("other"))
                .uids(&pods)
                .unwrap()
                .is_empty()
        );
        for (selection, command) in [
            (Selection::default(), "bindguard repair --all"),
            (web, "bindguard repair --pod web --namespace shop"),
        ] {
            assert_eq!(selection.repair_command(), command);
        }
    }

    #[test]
    fn pods_that_resemble_an_unknown_name_are_named() {
        let pods = pods(&[
            ("shop", "web-5d8f7c9b5-x2x4j"),
            ("shop", "payments"),
            ("shop", "db"),
        ]);
        let error = |pod: &str| {
            let selection = Selection::default().with(Some(pod.to_owned()));
            selection.check_known(&pods).unwrap_err().to_string()
        };
        assert!(error("web").ends_with("; known here: shop/web-5d8f7c9b5-x2x4j"));
        assert!(error("shop/paymnets").ends_with("; known here: shop/payments"));
        assert!(error("zzz").ends_with("is it another node's?"));
        let known = Selection::default().with(Some("db".to_owned()));
        assert!(known.check_known(&pods).is_ok());
        assert_eq!(pod_argument("pod/web").unwrap(), "web");
        assert!(pod_argument("web").is_err() && pod_argument("pod/").is_err());
    }
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
