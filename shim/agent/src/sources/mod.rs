//! The causes of work: the kubelet's updates, the mounts of drivers, replaced files of the host,
//! NRI, requests over HTTP, and new lines in the journal.
//!
//! The threads of each kubelet root: the first follows the kubelet's updates, the second follows
//! the mounts of drivers, and the third starts the refreshes of containers. A fourth thread follows
//! replaced files of the host, once a pod opted in to `host-files`.

mod engines;
pub mod http;
pub mod journal;
pub mod kubediag;
mod kubelet_volumes;
pub mod nri;
mod pod_binds;
mod watch;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;

use bindguard_core::policy::Mode;
use bindguard_operator::kubelets_here;
use tracing::error;

use crate::log::SayOnce;
use crate::node::Node;
use crate::sinks::metrics::{Level, Total};
use crate::sources::engines::EngineContainers;
use crate::sources::kubelet_volumes::follow_volumes;
use crate::sources::pod_binds::follow_mounts;
use crate::threads::{spawn, survey_for_ever};
use crate::work::pod_refreshes::{KubeletRoot, PodRefreshes};
use crate::work::refresher::Refresher;

/// Starts the threads of each kubelet root once it answers: a root may be mounted later, or hang.
pub fn find_for_ever(node: &'static Node) {
    let (mut followed, mut said) = (Vec::new(), SayOnce::default());
    node.retry_with_backoff("find kubelet roots", || {
        survey_for_ever(node.config.agent().survey, || {
            find(node, &mut followed, &mut said)
        })
    });
}

/// Returns false if no root is there yet, or a root is not followed: a node may boot.
fn find(node: &'static Node, followed: &mut Vec<FollowedRoot>, said: &mut SayOnce) -> bool {
    let (here, problems) = kubelets_here(node.config.places());
    let mut is_complete = problems.is_empty() && !here.is_empty();
    node.metrics[Level::AgentSilentRoots].set(problems.len() as i64);
    let is_off = node.config.policy().stale_subpaths == Mode::Off;
    if followed.is_empty() && (here.is_empty() || is_off) {
        node.ready.store(true, Ordering::Relaxed);
    }
    said.warn_of_retry(problems);
    if is_off {
        return true;
    }
    for path in here {
        if !followed.iter().any(|known| known.root.path == path) {
            let root = KubeletRoot::new(node, path);
            followed.push(FollowedRoot { root, threads: 0 });
        }
    }
    for followed in followed {
        is_complete &= followed.start_threads();
    }
    is_complete
}

/// Refreshes containers of Docker and Podman that opted in, on a node with or without a kubelet.
pub fn follow_engines_for_ever(node: &'static Node) {
    let Some(helper) = node.refreshing() else {
        return;
    };
    if node.config.policy().stale_subpaths == Mode::Off {
        return;
    }
    let engines = EngineContainers::new(Refresher::new(helper, node), Path::new("/"));
    let refresh = || {
        let restarts = &node.metrics[Total::AgentThreadRestarts];
        let turns = &engines.turns;
        turns.run(restarts, |planned| engines.refresh(planned))
    };
    node.retry_with_backoff("refresh the containers of Docker and Podman", || {
        thread::scope(|scope| {
            let worker = thread::Builder::new().name("engine-refresh".to_owned());
            worker.spawn_scoped(scope, || {
                node.retry_with_backoff("refresh containers", refresh);
            })?;
            node.retry_with_backoff("follow the containers of Docker and Podman", || {
                engines.follow(node.config.agent().survey)
            });
            Ok(())
        })
    });
}

/// A kubelet root, and the number of its threads that were started.
struct FollowedRoot {
    root: &'static KubeletRoot,
    threads: usize,
}

type WorkOfRoot = fn(&'static KubeletRoot);

/// The threads of a root. Only the first is needed if no container is refreshed.
const THREADS: [(&str, WorkOfRoot); 3] = [
    ("kubelet-root", |root| {
        let (node, what) = (root.node, format!("follow {}", root.path.display()));
        node.retry_with_backoff(&what, || follow_volumes(root, node.config.agent().survey));
    }),
    ("volumes", |root| {
        let what = format!("follow the mounts below {}", root.path.display());
        let node = root.node;
        node.retry_with_backoff(&what, || follow_mounts(root, node.config.agent().survey));
    }),
    ("refresh", refresh),
];

impl FollowedRoot {
    /// Starts the threads that do not run yet. Returns false if one could not be started.
    fn start_threads(&mut self) -> bool {
        let root = self.root;
        let needed = match root.node.refreshing() {
            Some(_) => THREADS.len(),
            None => 1,
        };
        for (name, work) in &THREADS[self.threads..needed] {
            if let Err(error) = spawn(name, || work(root)) {
                error!("follow {}: {error:#}", root.path.display());
                return false;
            }
            self.threads += 1;
        }
        true
    }
}

fn refresh(root: &'static KubeletRoot) {
    let (node, turns) = (root.node, &root.refreshes);
    let Some(helper) = node.refreshing() else {
        return;
    };
    let refresher = Refresher::new(helper, node);
    let pods = PodRefreshes { root, refresher };
    node.retry_with_backoff("refresh containers", || {
        turns.run(&node.metrics[Total::AgentThreadRestarts], |planned| {
            pods.refresh(planned, turns.others_wait())
        })
    });
}
