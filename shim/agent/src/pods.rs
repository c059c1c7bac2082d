//! The pods of this node from the CRI: all pods for a survey, and pods that requested refreshes.
//!
//! Threads wait for an answer, within a time limit. The main thread waits for none.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::error_chain;
use bindguard_core::identity::{Identity, PodName};
use bindguard_core::refresh_request::{OptIn, RefreshRequest, RequestedBinds};
use bindguard_core::spec::SpecUsers;
use bindguard_operator::cri::{self, Cri, CriError, POD_UID, READY, SandboxFilter};
use bindguard_operator::pods::Pods as PodsOfNode;
use lru::LruCache;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use crate::host::RuntimeNamespace;
use crate::limits::SayOnce;

/// Time limit of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit of one lookup, which is several queries.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// The time for which a pod without a request is not queried again: its annotations are fixed, but
/// a sandbox of the same uid can be created again.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The time for which a listing of all pods is kept after the last lookup.
const LISTING_KEPT: Duration = Duration::from_secs(1);

/// Limit of containers that are kept, each with a part of its spec. Other containers are queried
/// at each refresh.
const MAX_CONTAINERS: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// Limit of names that are kept.
const MAX_NAMES: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The pause after a CRI that gave no answer in time: a line without names is better than a line
/// that waits.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// A running container, as far as a refresh needs it.
#[derive(Debug, Clone)]
pub struct Container {
    pub id: String,
    /// The name for people.
    pub name: String,
    pub pid: u32,
    /// The user namespaces in its spec; `None` if the spec is not known.
    pub spec: Option<Arc<SpecUsers>>,
    /// The pod, and the container's name in the pod; without a pod, the name for people.
    pub identity: Identity,
}

/// A pod that requested refreshes, and the containers to refresh.
#[derive(Debug, Clone)]
pub struct OptedIn {
    pub request: RefreshRequest,
    /// Its running containers: all containers if the request is for binds besides subPaths, else
    /// the named containers.
    pub containers: Vec<Container>,
}

/// The pods that requested refreshes of binds other than subPaths, by uid.
pub type PodsWithBinds = HashMap<String, RequestedBinds>;

/// Finds pods, from any thread and any task.
#[derive(Debug)]
pub struct PodLookup {
    cri: Cri,
    mode: RefreshMode,
    runtime: Handle,
    /// Locked for a whole query: of several at once, the first one lists the pods for all.
    known: tokio::sync::Mutex<KnownPods>,
    names: Mutex<PodNames>,
}

/// A sandbox, and the request in the annotations that the pod had when the sandbox was made.
#[derive(Debug, Clone)]
struct Pod {
    sandbox: String,
    names: PodName,
    request: RefreshRequest,
}

#[derive(Debug)]
struct KnownPods {
    without_request: HashMap<String, Instant>,
    listing: Option<Listing>,
    /// The last query that may have used the listing.
    used: Instant,
    /// The CRI writes a container's whole spec into the answer that has its pid, and neither ever
    /// changes: so both are queried once. A refresh checks the cgroup of the process before it uses
    /// the pid.
    containers: LruCache<String, Container>,
}

/// All running pods by their uids, and the running containers by their sandboxes: after an update
/// of many volumes, single queries would be three for each pod.
#[derive(Debug)]
struct Listing {
    began: Instant,
    pods: HashMap<String, Pod>,
    containers: HashMap<String, Vec<cri::Container>>,
}

/// The names of pods, which are never renamed: the kubelet's folders have only their uids.
#[derive(Debug)]
struct PodNames {
    known: LruCache<String, PodName>,
    /// No query is made until then, because the CRI gave no answer in time.
    silent_until: Option<Instant>,
    said: SayOnce,
}

impl PodLookup {
    /// A lookup at the CRI of this socket, for as long as the process lives. It connects at the first
    /// query. With `entered`, the runtime must be in the mount namespace that this process entered.
    pub fn new(
        socket: &Path,
        entered: Option<RuntimeNamespace>,
        mode: RefreshMode,
    ) -> &'static Self {
        let cri = match entered {
            None => Cri::of(socket, CALL_TIMEOUT),
            Some(namespace) => {
                Cri::of_accepted(socket, CALL_TIMEOUT, move |stream| namespace.accept(stream))
            }
        };
        Self::of(cri, mode)
    }

    fn of(cri: Cri, mode: RefreshMode) -> &'static Self {
        let known = KnownPods {
            without_request: HashMap::new(),
            listing: None,
            used: Instant::now(),
            containers: LruCache::new(MAX_CONTAINERS),
        };
        let names = PodNames {
            known: LruCache::new(MAX_NAMES),
            silent_until: None,
            said: SayOnce::default(),
        };
        Box::leak(Box::new(Self {
            cri,
            mode,
            // For the threads beside the running runtime of tokio.
            runtime: Handle::current(),
            known: known.into(),
            names: names.into(),
        }))
    }

    /// A lookup at a CRI that does not answer.
    #[cfg(test)]
    pub fn unanswered() -> &'static Self {
        Self::unanswered_at(Path::new("/nowhere.sock"))
    }

    /// The same, with this socket.
    #[cfg(test)]
    pub fn unanswered_at(socket: &Path) -> &'static Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let lookup = {
            let _entered = runtime.enter();
            Self::new(socket, None, RefreshMode::Off)
        };
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        lookup
    }

    /// All pods with their containers. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn all(&self) -> Result<PodsOfNode, CriError> {
        let mut pods = self.wait_for(self.cri.pods())?;
        if self.mode == RefreshMode::All {
            pods.opt_all_in();
        }
        Ok(pods)
    }

    /// The pods that requested refreshes of binds besides subPaths. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn with_binds(&self) -> Result<PodsWithBinds, CriError> {
        let pods = self.wait_for(running_pods(&self.cri, HashMap::new()))?;
        let mut requested = PodsWithBinds::new();
        for (uid, pod) in pods {
            if pod.request.binds.any() {
                requested.insert(uid, pod.request.binds);
            }
        }
        Ok(requested)
    }

    /// The pod with this uid, if it requested refreshes, with its containers at the moment of an
    /// update or later. If queries about other pods follow, one listing answers them all. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn opted_in(
        &'static self,
        uid: &str,
        update: Instant,
        others_wait: bool,
    ) -> Result<Option<OptedIn>, CriError> {
        self.wait_for(async {
            let (cri, mut known) = (&self.cri, self.known.lock().await);
            let known = &mut *known;
            known.used = Instant::now();
            if others_wait && known.list(cri, update).await? {
                // Drops the listing once no query may use it.
                tokio::spawn(async {
                    loop {
                        sleep(LISTING_KEPT).await;
                        let mut known = self.known.lock().await;
                        if known.used.elapsed() >= LISTING_KEPT {
                            known.listing = None;
                            return;
                        }
                    }
                });
            }
            let now = Instant::now();
            known.without_request.retain(|_, until| *until > now);
            if known.without_request.contains_key(uid) {
                return Ok(None);
            }
            let listing = known.listing.as_ref().filter(|it| it.began >= update);
            let pod = match listing {
                Some(listing) => listing.pods.get(uid).cloned(),
                None => running_pod(cri, uid).await?,
            };
            let Some(pod) = pod else {
                return Ok(None);
            };
            let mut request = pod.request;
            if self.mode == RefreshMode::All {
                request.containers = OptIn::All;
            }
            if request.is_none() {
                known
                    .without_request
                    .insert(uid.to_owned(), now + REMEMBERED);
                return Ok(None);
            }
            let listed = match listing {
                Some(listing) => listing.containers.get(&pod.sandbox).cloned(),
                None => Some(cri.running_containers(Some(&pod.sandbox)).await?),
            };
            let pod_name = pod.names.display_name().unwrap_or_default();
            let mut containers = Vec::new();
            for listed in listed.unwrap_or_default() {
                let (id, name) = (listed.id, listed.metadata.name);
                if !request.binds.any() && !request.containers.includes(&name) {
                    continue;
                }
                if !known.containers.contains(&id)
                    && let Some(info) = cri.container_info(&id).await?
                    && let Some(pid) = info.pid
                {
                    let users = info.spec.and_then(|spec| SpecUsers::from_spec(&spec).ok());
                    let container = Container {
                        id: id.clone(),
                        name: format!("{pod_name} container {name}"),
                        pid,
                        spec: users.map(Arc::new),
                        identity: Identity {
                            container: Some(name),
                            pod: pod.names.clone(),
                        },
                    };
                    known.containers.push(id.clone(), container);
                }
                // A container that ended meanwhile is left out.
                containers.extend(known.containers.get(&id).cloned());
            }
            Ok(Some(OptedIn {
                request,
                containers,
            }))
        })
    }

    /// The sources of all writable mounts of a pod's containers, also of those that ended. Waits, and
    /// delays no other query.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn writable_mounts(&self, uid: &str) -> Result<Vec<PathBuf>, CriError> {
        self.wait_for(self.cri.writable_mounts(uid))
    }

    /// As [`PodLookup::find_names`]. Waits.
    pub fn names(&self, uid: &str) -> Option<PodName> {
        self.runtime.block_on(self.find_names(uid))
    }

    /// The names of the pod with this uid. `None` if it has no sandbox any more, or the CRI does not
    /// answer. Delays no other query.
    pub async fn find_names(&self, uid: &str) -> Option<PodName> {
        {
            let mut names = self.known_names();
            let known = names.known.get(uid).cloned();
            let silent_until = names.silent_until;
            if known.is_some() || silent_until.is_some_and(|until| Instant::now() < until) {
                return known;
            }
        }
        // An old listing has the right names.
        let known = self.known.try_lock().ok();
        let listed = known.and_then(|known| known.listing.as_ref()?.pods.get(uid).cloned());
        let found = match listed {
            Some(pod) => Ok(Some(pod)),
            None => running_pod(&self.cri, uid).await,
        };
        let mut names = self.known_names();
        let (mut failure, mut silent_until) = (None, None);
        if let Err(error) = &found {
            failure = Some(format!("name a pod: {}", error_chain(error)));
            // A runtime that starts refuses a query at once, so the next query may follow at once.
            if !error.is_starting() {
                silent_until = Some(Instant::now() + RETRY_INTERVAL);
            }
        }
        names.silent_until = silent_until;
        names.said.warn((), failure);
        let pod = found.ok()??;
        names.known.push(uid.to_owned(), pod.names.clone());
        Some(pod.names)
    }

    fn known_names(&self) -> MutexGuard<'_, PodNames> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread polls the query, and the main thread's tokio waits for the socket: a runtime that
    /// hangs costs the thread its time limit, and the agent nothing.
    fn wait_for<A>(&self, query: impl Future<Output = Result<A, CriError>>) -> Result<A, CriError> {
        let limited = async { timeout(LIST_TIMEOUT, query).await };
        let answer = self.runtime.block_on(limited);
        answer.unwrap_or(Err(CriError::Silent))
    }
}

/// The running pods with these labels by their uids, without their containers. If a pod has two
/// sandboxes, the newer sandbox counts.
async fn running_pods(
    cri: &Cri,
    labels: HashMap<String, String>,
) -> Result<HashMap<String, Pod>, CriError> {
    let running = SandboxFilter {
        state: Some(READY),
        label_selector: labels,
    };
    let mut sandboxes = cri.sandboxes(running).await?;
    sandboxes.sort_by_key(|sandbox| sandbox.created_at);
    let mut pods = HashMap::new();
    for sandbox in sandboxes {
        let Some(uid) = sandbox.labels.get(POD_UID).map(str::to_owned) else {
            continue;
        };
        let names = PodName {
            namespace: Some(sandbox.metadata.namespace),
            name: Some(sandbox.metadata.name),
            uid: Some(uid.clone()),
        };
        let pod = Pod {
            request: RefreshRequest::from_annotations(|name| sandbox.annotations.get(name)),
            sandbox: sandbox.id,
            names,
        };
        pods.insert(uid, pod);
    }
    Ok(pods)
}

async fn running_pod(cri: &Cri, uid: &str) -> Result<Option<Pod>, CriError> {
    let label = HashMap::from([(POD_UID.to_owned(), uid.to_owned())]);
    Ok(running_pods(cri, label).await?.remove(uid))
}

impl KnownPods {
    /// Lists all pods, unless the last listing has every container that can be stale by this update:
    /// a container that started after the update, and after the re-bind on the host, has the current
    /// file. True if there was no listing before.
    async fn list(&mut self, cri: &Cri, update: Instant) -> Result<bool, CriError> {
        if self.listing.as_ref().is_some_and(|it| it.began >= update) {
            return Ok(false);
        }
        let mut listing = Listing {
            began: Instant::now(),
            pods: running_pods(cri, HashMap::new()).await?,
            containers: HashMap::new(),
        };
        for container in cri.running_containers(None).await? {
            let sandbox = container.pod_sandbox_id.clone();
            listing
                .containers
                .entry(sandbox)
                .or_default()
                .push(container);
        }
        Ok(self.listing.replace(listing).is_none())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// The query of a thread that gave up ends with it.
    #[test]
    fn a_runtime_that_hangs_costs_each_thread_its_time_limit() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("cri.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let lookup = {
            let _entered = runtime.enter();
            let cri = Cri::of(&socket, Duration::from_millis(50));
            PodLookup::of(cri, RefreshMode::Off)
        };
        thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        let now = Instant::now();
        thread::scope(|scope| {
            for pod in 0..8 {
                let lookup = &lookup;
                scope.spawn(move || lookup.opted_in(&pod.to_string(), now, true).unwrap_err());
            }
        });
        assert!(lookup.known.try_lock().is_ok());
        assert_eq!(lookup.names("u-1"), None);
        assert!(lookup.known_names().silent_until.unwrap() > Instant::now());
    }
}
