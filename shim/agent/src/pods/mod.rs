//! The pods of this node from the CRI: all pods for a survey, and pods that requested refreshes.
//!
//! Threads wait for an answer, within a time limit. The main thread waits for none.

mod cri;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::error_chain;
use bindguard_core::identity::{Identity, PodName};
use bindguard_core::refresh_request::{OptIn, RefreshRequest, RequestedBinds};
use bindguard_operator::cri::{Cri, CriError};
use bindguard_operator::pods::Pods as PodsOfNode;
use lru::LruCache;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::container::Container;
use crate::pods::cri::{Init, pod};

pub use crate::pods::cri::{client, client_in};

/// Time limit of one lookup, which is several queries.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// The time for which a pod without a request is not queried again: its annotations are fixed, but
/// a sandbox of the same uid can be created again.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The time for which a listing of all pods is kept after the last lookup.
const LISTING_KEPT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct Pod {
    /// The id of its sandbox.
    pub sandbox: String,
    pub name: String,
    pub namespace: String,
    /// The request in the annotations that it had when the sandbox was made.
    pub request: RefreshRequest,
}

/// A pod that requested refreshes, and the containers to refresh.
#[derive(Debug, Clone)]
pub struct OptedIn {
    pub pod: Pod,
    pub request: RefreshRequest,
    /// Its running containers: all containers if the request is for binds besides subPaths, else
    /// the named containers.
    pub containers: Vec<Container>,
}

/// The pods that requested refreshes of binds other than subPaths, by uid.
pub type PodsWithBinds = HashMap<String, RequestedBinds>;

/// Finds pods, from any thread and any task. All clones share the known pods and names.
#[derive(Debug, Clone)]
pub struct PodLookup(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    cri: Cri,
    mode: RefreshMode,
    runtime: Handle,
    /// Locked for a whole query: of several at once, the first one lists the pods for all.
    known: tokio::sync::Mutex<KnownPods>,
    names: Mutex<PodNames>,
}

#[derive(Debug)]
struct KnownPods {
    without_request: HashMap<String, Instant>,
    listing: Option<Listing>,
    /// The last query that may have used the listing.
    used: Instant,
    inits: Inits,
}

impl PodLookup {
    /// A lookup at this CRI, for the threads beside the running runtime of tokio.
    pub fn new(cri: Cri, mode: RefreshMode) -> Self {
        let known = KnownPods {
            without_request: HashMap::new(),
            listing: None,
            used: Instant::now(),
            inits: Inits::default(),
        };
        Self(Arc::new(Shared {
            cri,
            mode,
            runtime: Handle::current(),
            known: known.into(),
            names: Mutex::default(),
        }))
    }

    /// A lookup at a CRI that does not answer.
    #[cfg(test)]
    pub fn unanswered() -> Self {
        Self::unanswered_at(std::path::Path::new("/nowhere.sock"))
    }

    /// The same, with this socket.
    #[cfg(test)]
    pub fn unanswered_at(socket: &std::path::Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let lookup = {
            let _entered = runtime.enter();
            Self::new(client(socket), RefreshMode::Off)
        };
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        lookup
    }

    /// All pods with their containers. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn all(&self) -> Result<PodsOfNode, CriError> {
        self.wait_for(async {
            let mut pods = self.0.cri.pods().await?;
            let mut known = self.0.known.lock().await;
            known
                .inits
                .forget_others(|id| pods.containers.iter().any(|container| container.id == id));
            if self.0.mode == RefreshMode::All {
                pods.opt_all_in();
            }
            Ok(pods)
        })
    }

    /// The pods that requested refreshes of binds besides subPaths. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn with_binds(&self) -> Result<PodsWithBinds, CriError> {
        self.wait_for(async {
            let pods = cri::running_pods(&self.0.cri).await?.into_iter();
            let requested = pods.map(|(uid, pod)| (uid, pod.request.binds));
            Ok(requested.filter(|(_, binds)| binds.any()).collect())
        })
    }

    /// The pod with this uid, if it requested refreshes, with its containers at the moment of an
    /// update or later. If queries about other pods follow, one listing answers them all. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn opted_in(
        &self,
        uid: &str,
        update: Instant,
        others_wait: bool,
    ) -> Result<Option<OptedIn>, CriError> {
        self.wait_for(async {
            let mut known = self.0.known.lock().await;
            known.used = Instant::now();
            if others_wait && known.list(&self.0.cri, update).await? {
                tokio::spawn(forget_listing(Arc::clone(&self.0)));
            }
            known.opted_in(&self.0, uid, update).await
        })
    }

    /// The sources of all writable mounts of a pod's containers, also of those that ended. Waits, and
    /// delays no other query.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn writable_mounts(&self, uid: &str) -> Result<Vec<PathBuf>, CriError> {
        self.wait_for(self.0.cri.writable_mounts(uid))
    }

    /// As [`PodLookup::find_names`]. Waits.
    pub fn names(&self, uid: &str) -> Option<PodName> {
        self.0.runtime.block_on(self.find_names(uid))
    }

    /// The names of the pod with this uid. `None` if it has no sandbox any more, or the CRI does not
    /// answer. Delays no other query.
    pub async fn find_names(&self, uid: &str) -> Option<PodName> {
        {
            let mut names = self.known_names();
            let known = names.of(uid);
            if known.is_some() || names.is_silent() {
                return known;
            }
        }
        let found = match self.listed(uid) {
            Some(pod) => Ok(Some(pod)),
            None => pod(&self.0.cri, uid).await,
        };
        self.known_names().add(uid, found)
    }

    /// A pod is never renamed, so an old listing has the right names.
    fn listed(&self, uid: &str) -> Option<Pod> {
        let known = self.0.known.try_lock().ok()?;
        known.listing.as_ref()?.pod(uid).cloned()
    }

    fn known_names(&self) -> MutexGuard<'_, PodNames> {
        self.0.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread polls the query, and the main thread's tokio waits for the socket: a runtime that
    /// hangs costs the thread its time limit, and the agent nothing.
    fn wait_for<A>(&self, query: impl Future<Output = Result<A, CriError>>) -> Result<A, CriError> {
        let limited = async { timeout(LIST_TIMEOUT, query).await };
        let answer = self.0.runtime.block_on(limited);
        answer.unwrap_or(Err(CriError::Silent))
    }
}

/// Drops the listing once no query may use it.
async fn forget_listing(shared: Arc<Shared>) {
    loop {
        sleep(LISTING_KEPT).await;
        let mut known = shared.known.lock().await;
        if known.used.elapsed() >= LISTING_KEPT {
            known.listing = None;
            return;
        }
    }
}

impl KnownPods {
    async fn opted_in(
        &mut self,
        shared: &Shared,
        uid: &str,
        update: Instant,
    ) -> Result<Option<OptedIn>, CriError> {
        let (cri, now) = (&shared.cri, Instant::now());
        self.without_request.retain(|_, until| *until > now);
        if self.without_request.contains_key(uid) {
            return Ok(None);
        }
        let listing = self
            .listing
            .as_ref()
            .filter(|listing| listing.is_enough_for(update));
        let pod = match listing {
            Some(listing) => listing.pod(uid).cloned(),
            None => pod(cri, uid).await?,
        };
        let Some(pod) = pod else { return Ok(None) };
        let mut request = pod.request.clone();
        if shared.mode == RefreshMode::All {
            request.containers = OptIn::All;
        }
        if request.is_none() {
            self.without_request
                .insert(uid.to_owned(), now + REMEMBERED);
            return Ok(None);
        }
        let mut named = match listing {
            Some(listing) => listing.containers(&pod.sandbox).to_vec(),
            None => cri::containers(cri, &pod.sandbox).await?,
        };
        named.retain(|named| request.binds.any() || request.containers.includes(&named.name));
        let containers = self.inits.add(cri, named).await?;
        Ok(Some(OptedIn {
            pod,
            request,
            containers,
        }))
    }

    /// Lists all pods, unless the last listing is of after this update. True if there was no listing
    /// before.
    async fn list(&mut self, cri: &Cri, update: Instant) -> Result<bool, CriError> {
        let last = self.listing.as_ref();
        if last.is_some_and(|listing| listing.is_enough_for(update)) {
            return Ok(false);
        }
        let listing = cri::listing(cri).await?;
        self.inits.forget_others(|id| listing.is_running(id));
        Ok(self.listing.replace(listing).is_none())
    }
}

// The init processes of containers. The CRI writes a container's whole spec into the answer that
// has its pid, and neither ever changes: so both are queried once. Of the spec, only the user
// namespaces are kept.
//
// A refresh checks the cgroup of the process before it uses the pid.

/// Limit of init processes that are kept, each with a part of its spec. The others are queried at
/// each refresh.
const MAX_INITS: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// The init processes that are known, by the ids of the containers.
#[derive(Debug)]
pub struct Inits(LruCache<String, Init>);

impl Default for Inits {
    fn default() -> Self {
        Self(LruCache::new(MAX_INITS))
    }
}

impl Inits {
    /// Finds the init process of each named container. A container that ended meanwhile is left
    /// out.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub async fn add(
        &mut self,
        cri: &Cri,
        named: Vec<NamedContainer>,
    ) -> Result<Vec<Container>, CriError> {
        let mut containers = Vec::new();
        for NamedContainer { id, name } in named {
            let known = self.0.get(&id).cloned();
            let init = if known.is_some() {
                known
            } else {
                let info = cri.container_info(&id).await?;
                info.as_ref().and_then(Init::from_info)
            };
            if let Some(init) = init {
                self.0.push(id.clone(), init.clone());
                containers.push(Container {
                    identity: Identity::without_pod(&name),
                    id,
                    name,
                    pid: init.pid,
                    spec: init.spec,
                });
            }
        }
        Ok(containers)
    }

    /// Forgets the containers that are gone.
    pub fn forget_others(&mut self, is_there: impl Fn(&str) -> bool) {
        let gone: Vec<String> = self
            .0
            .iter()
            .filter(|(id, _)| !is_there(id))
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            self.0.pop(&id);
        }
    }
}

// The names of pods: the kubelet's folders have only their uids.

/// Limit of names that are kept.
const MAX_NAMES: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// The pause after a CRI that gave no answer in time: a line without names is better than a line
/// that waits.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The names that are known: a pod is never renamed.
#[derive(Debug)]
pub struct PodNames {
    known: LruCache<String, PodName>,
    silent_until: Option<Instant>,
    /// True if the last query failed: further failures are not logged.
    is_failing: bool,
}

impl Default for PodNames {
    fn default() -> Self {
        Self {
            known: LruCache::new(MAX_NAMES),
            silent_until: None,
            is_failing: false,
        }
    }
}

impl PodNames {
    /// The names of a pod, if they are known.
    pub fn of(&mut self, uid: &str) -> Option<PodName> {
        self.known.get(uid).cloned()
    }

    /// True while no query is made, because the CRI gave no answer in time.
    pub fn is_silent(&self) -> bool {
        let now = Instant::now();
        self.silent_until.is_some_and(|until| now < until)
    }

    /// Keeps the answer to a query, and returns the names. A runtime that starts refuses a query at
    /// once, so the next query may follow at once.
    pub fn add(&mut self, uid: &str, answer: Result<Option<Pod>, CriError>) -> Option<PodName> {
        let failure = answer.as_ref().err();
        self.silent_until = failure
            .filter(|error| !error.is_starting())
            .map(|_| Instant::now() + RETRY_INTERVAL);
        if let Some(error) = failure.filter(|_| !self.is_failing) {
            warn!("name a pod: {}", error_chain(error));
        }
        self.is_failing = failure.is_some();
        let pod = answer.ok()??;
        let names = PodName {
            namespace: Some(pod.namespace),
            name: Some(pod.name),
            uid: Some(uid.to_owned()),
        };
        self.known.push(uid.to_owned(), names.clone());
        Some(names)
    }
}

// A listing of the CRI for many pods: after an update of many volumes, single queries would be
// three for each pod.

/// A running container of a pod, as a list of the CRI names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedContainer {
    pub id: String,
    /// Its name in the pod.
    pub name: String,
}

/// The pods of the node at one moment, by their uids, and their running containers, by their
/// sandboxes.
#[derive(Debug)]
pub struct Listing {
    began: Instant,
    pods: HashMap<String, Pod>,
    containers: HashMap<String, Vec<NamedContainer>>,
}

impl Listing {
    /// The lists that were queried at this moment or later.
    pub fn new(
        began: Instant,
        pods: HashMap<String, Pod>,
        containers: HashMap<String, Vec<NamedContainer>>,
    ) -> Self {
        Self {
            began,
            pods,
            containers,
        }
    }

    /// True if the listing has every container that can be stale by an update. A container that
    /// started after the update, and after the re-bind on the host, has the current file.
    pub fn is_enough_for(&self, update: Instant) -> bool {
        self.began >= update
    }

    /// The pod with this uid.
    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.get(uid)
    }

    /// The running containers of a sandbox.
    pub fn containers(&self, sandbox: &str) -> &[NamedContainer] {
        self.containers.get(sandbox).map_or(&[], Vec::as_slice)
    }

    /// True if a container with this id runs.
    pub fn is_running(&self, id: &str) -> bool {
        self.containers
            .values()
            .flatten()
            .any(|container| container.id == id)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::net::UnixListener;
    use std::thread;

    use bindguard_operator::cri::Cri;

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
            PodLookup::new(cri, RefreshMode::Off)
        };
        thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        let now = Instant::now();
        thread::scope(|scope| {
            for pod in 0..8 {
                let lookup = &lookup;
                scope.spawn(move || lookup.opted_in(&pod.to_string(), now, true).unwrap_err());
            }
        });
        assert!(lookup.0.known.try_lock().is_ok());
        assert_eq!(lookup.names("u-1"), None);
        assert!(lookup.known_names().is_silent());
    }
}
