//! The threads of each kubelet root: the first follows the kubelet's updates, the second follows
//! the mounts of drivers, and the third starts the refreshes of containers. A fourth thread follows
//! replaced files of the host, once a pod opted in to `host-files`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::policy::Mode;
use bindguard_guard::refresh::HelperProcess;
use bindguard_operator::kubelets_here;
use tracing::error;

use crate::pods::PodLookup;
use crate::say_once::SayOnce;
use crate::sources::engines::EngineContainers;
use crate::sources::host_files::PodFiles;
use crate::sources::http::Served;
use crate::sources::volumes::{KubeletVolumes, MountedVolumes, OfContainers};
use crate::sources::watch::{self, AFTER_START, Rules, Schedule, Watches};
use crate::threads::{Backoff, retry_with_backoff, spawn};
use crate::work::pod_refreshes::{PodOfRoot, PodRefreshes, Updates};
use crate::work::refresher::Refresher;
use crate::work::turns::Turns;

/// Everything that the threads share.
#[derive(Debug)]
pub struct KubeletRoots {
    pub config: Config,
    /// The figures, and the state that requests read.
    pub served: Arc<Served>,
    /// The pods that requested refreshes.
    pub pods: PodLookup,
    /// Starts the children in containers; `None` if no container is refreshed.
    pub helper: Option<Arc<HelperProcess>>,
}

impl KubeletRoots {
    /// Starts the threads of each kubelet root once it answers: a root may be mounted later, or
    /// hang.
    pub fn find_for_ever(self: &Arc<Self>) {
        let mut followed: Vec<FollowedRoot> = Vec::new();
        let mut said = SayOnce::default();
        let survey = self.config.agent().survey;
        self.retry_with_backoff("find kubelet roots", || {
            let mut pauses = Backoff::of_surveys(survey);
            loop {
                if self.find(&mut followed, &mut said) {
                    pauses.reset();
                    thread::sleep(survey);
                } else {
                    thread::sleep(pauses.after(Duration::ZERO));
                }
            }
        });
    }

    /// Returns false if no root is there yet, or a root is not followed: a node may boot.
    fn find(
        self: &Arc<Self>,
        followed: &mut Vec<FollowedRoot>,
        said: &mut SayOnce<String>,
    ) -> bool {
        let (here, problems) = kubelets_here(self.config.places());
        let mut is_complete = problems.is_empty() && !here.is_empty();
        self.served.metrics.silent_roots.set(problems.len() as i64);
        said.warn(
            (),
            problems.iter().map(|why| format!("{why}; trying again")),
        );
        let is_off = self.config.policy().stale_subpaths == Mode::Off;
        if followed.is_empty() && (here.is_empty() || is_off) {
            self.served.ready.store(true, Ordering::Relaxed);
        }
        if is_off {
            return true;
        }
        for path in here {
            if !followed.iter().any(|known| known.root.path == path) {
                let root = Root {
                    node: Arc::clone(self),
                    path,
                    refreshes: Turns::default(),
                    are_files_followed: AtomicBool::new(false),
                };
                followed.push(FollowedRoot {
                    root: Arc::new(root),
                    threads: 0,
                });
            }
        }
        for followed in followed {
            is_complete &= followed.start_threads();
        }
        is_complete
    }

    /// Refreshes containers of Docker and Podman that opted in, on a node with or without a
    /// kubelet.
    pub fn follow_engines_for_ever(&self) {
        let Some(refresher) = self.refresher() else {
            return;
        };
        if self.config.policy().stale_subpaths == Mode::Off {
            return;
        }
        let settings = self.config.agent();
        let (mode, places) = (settings.refresh, self.config.places());
        let engines = EngineContainers::new(&refresher, Path::new("/"), mode, places);
        let refresh = || {
            let restarts = &self.served.metrics.restarts;
            engines
                .turns
                .run(restarts, |planned| engines.refresh(planned))
        };
        self.retry_with_backoff("refresh the containers of Docker and Podman", || {
            thread::scope(|scope| {
                let worker = thread::Builder::new().name("engine-refresh".to_owned());
                worker.spawn_scoped(scope, || {
                    self.retry_with_backoff("refresh containers", refresh);
                })?;
                self.retry_with_backoff("follow the containers of Docker and Podman", || {
                    engines.follow(settings.survey)
                });
                Ok(())
            })
        });
    }

    fn refresher(&self) -> Option<Refresher<'_>> {
        let (served, policy) = (&self.served, self.config.policy());
        let helper = self.helper.as_ref()?;
        Some(Refresher::new(
            helper,
            &served.metrics,
            &served.reporting,
            policy,
        ))
    }

    fn retry_with_backoff(&self, what: &str, work: impl FnMut() -> io::Result<()>) {
        retry_with_backoff(what, &self.served.metrics.restarts, work);
    }
}

/// A kubelet root, and the number of its threads that were started.
struct FollowedRoot {
    root: Arc<Root>,
    threads: usize,
}

/// The state that the threads of a root share.
struct Root {
    node: Arc<KubeletRoots>,
    path: PathBuf,
    refreshes: Turns<PodOfRoot>,
    are_files_followed: AtomicBool,
}

type WorkOfRoot = fn(&Arc<Root>);

/// The threads of a root. Only the first is needed if no container is refreshed.
const THREADS: [(&str, WorkOfRoot); 3] = [
    ("kubelet-root", Root::follow_updates),
    ("volumes", Root::follow_mounts),
    ("refresh", Root::refresh),
];

impl FollowedRoot {
    /// Starts the threads that do not run yet. Returns false if one could not be started.
    fn start_threads(&mut self) -> bool {
        let needed = match self.root.node.helper {
            Some(_) => THREADS.len(),
            None => 1,
        };
        for (name, work) in &THREADS[self.threads..needed] {
            let root = Arc::clone(&self.root);
            if let Err(error) = spawn(name, move || work(&root)) {
                error!("follow {}: {error:#}", self.root.path.display());
                return false;
            }
            self.threads += 1;
        }
        true
    }
}

impl Root {
    fn updates(&self) -> Updates<'_> {
        let (node, served) = (&self.node, &self.node.served);
        let refreshes = node.helper.is_some().then_some(&self.refreshes);
        Updates::new(
            &node.config,
            &served.metrics,
            &served.reporting,
            &node.pods,
            refreshes,
        )
    }

    fn follow_updates(self: &Arc<Self>) {
        let (node, path, served) = (&self.node, &self.path, &self.node.served);
        let interval = node.config.agent().survey;
        node.retry_with_backoff(&format!("follow {}", path.display()), || {
            KubeletVolumes::follow(
                path,
                self.updates(),
                &served.metrics,
                &served.ready,
                interval,
            )
        });
    }

    fn follow_mounts(self: &Arc<Self>) {
        let (node, path) = (&self.node, &self.path);
        let follow_files = || {
            if self.are_files_followed.swap(true, Ordering::Relaxed) {
                return;
            }
            let root = Arc::clone(self);
            if let Err(error) = spawn("host-files", move || root.follow_files()) {
                self.are_files_followed.store(false, Ordering::Relaxed);
                error!("{error:#}");
            }
        };
        let what = format!("follow the mounts below {}", path.display());
        let interval = node.config.agent().survey;
        node.retry_with_backoff(&what, || {
            let (updates, refreshes) = (self.updates(), &self.refreshes);
            MountedVolumes::follow(path, &node.pods, refreshes, updates, interval, follow_files)
        });
    }

    fn refresh(self: &Arc<Self>) {
        let node = &self.node;
        let Some(refresher) = node.refresher() else {
            return;
        };
        let pods = PodRefreshes {
            pods: &node.pods,
            places: node.config.places(),
            refresher,
        };
        let turns = &self.refreshes;
        node.retry_with_backoff("refresh containers", || {
            turns.run(&node.served.metrics.restarts, |planned| {
                pods.refresh(planned, turns.others_wait())
            })
        });
    }

    fn follow_files(&self) {
        let (node, path) = (&self.node, &self.path);
        let what = format!("follow files of the host in pods below {}", path.display());
        node.retry_with_backoff(&what, || {
            let mut files = PodFiles {
                root: path,
                pods: &node.pods,
                places: node.config.places(),
                refreshes: &self.refreshes,
                metrics: &node.served.metrics,
                watches: Watches::new()?,
                files: OfContainers::new(),
                failures: SayOnce::default(),
            };
            let rules = Rules::of_files(node.config.agent().survey, &AFTER_START);
            watch::follow(&mut files, Schedule::new(rules, Instant::now()))
        });
    }
}
