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

use std::sync::atomic::Ordering;

use bindguard_core::policy::Mode;
use bindguard_operator::kubelets_here;
use tracing::error;

use crate::limits::{SayOnce, spawn, survey_for_ever};
use crate::sinks::metrics::Level;
use crate::sources::kubelet_volumes::follow_volumes;
use crate::sources::pod_binds::follow_mounts;
use crate::work::Node;
use crate::work::kubelet_root::KubeletRoot;

pub use crate::sources::engines::follow_engines;

type WorkOfRoot = fn(&'static KubeletRoot);

/// The threads of a root. Only the first is needed if no container is refreshed.
const THREADS: [(&str, WorkOfRoot); 3] = [
    ("kubelet-root", follow_volumes),
    ("volumes", follow_mounts),
    ("refresh", KubeletRoot::refresh_pods),
];

/// Starts the threads of each kubelet root once it answers: a root may be mounted later, or hang.
pub fn find_for_ever(node: &'static Node) {
    // The roots, and the number of threads that were started for each.
    let mut followed: Vec<(&KubeletRoot, usize)> = Vec::new();
    let mut said = SayOnce::<()>::default();
    node.retry_with_backoff("find kubelet roots", || {
        survey_for_ever(node.config.agent().survey, || {
            // A survey returns false if no root is there yet, or a root is not followed: a node may
            // boot.
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
                if !followed.iter().any(|(known, _)| known.path == path) {
                    followed.push((KubeletRoot::new(node, path), 0));
                }
            }
            for (root, threads) in &mut followed {
                let root = *root;
                let needed = if root.refresher.is_some() {
                    THREADS.len()
                } else {
                    1
                };
                for (name, work) in &THREADS[*threads..needed] {
                    if let Err(error) = spawn(name, || work(root)) {
                        error!("follow {}: {error:#}", root.path.display());
                        is_complete = false;
                        break;
                    }
                    *threads += 1;
                }
            }
            is_complete
        })
    });
}
