//! The threads of each kubelet root: the first follows the kubelet's updates, the second follows
//! the mounts of drivers, and the third starts the refreshes of containers. A fourth thread follows
//! replaced files of the host, once a pod opted in to `host-files`.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::policy::Mode;
use bindguard_guard::refresh::HelperProcess;
use bindguard_operator::kubelets_here;
use tracing::{error, info, warn};

use crate::pods::PodLookup;
use crate::sources::engines;
use crate::sources::host_files;
use crate::sources::http::Served;
use crate::sources::volumes::FollowedVolumes;
use crate::sources::watch::{self, Cause, Notice};
use crate::threads::{Backoff, retry_with_backoff, spawn};
use crate::work::pod_refreshes::{PodRefreshes, Refreshes, refreshes};
use crate::work::refresh_queue::Planned;
use crate::work::refresh_queue::Updates;
use crate::work::refresher::Refresher;

/// The work of a thread of a kubelet root.
type WorkOfRoot = Box<dyn FnOnce(&Arc<KubeletRoots>, &Path) + Send>;

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
        let mut watched: Vec<PathBuf> = Vec::new();
        let mut said: Vec<String> = Vec::new();
        let survey = self.config.agent().survey;
        self.retry_with_backoff("find kubelet roots", || {
            let mut pauses = Backoff::of_surveys(survey);
            loop {
                if self.find(&mut watched, &mut said) {
                    pauses = Backoff::of_surveys(survey);
                    thread::sleep(survey);
                } else {
                    thread::sleep(pauses.after(Duration::ZERO));
                }
            }
        });
    }

    /// Returns false if no root is there yet, or a root is not followed: a node may boot.
    fn find(self: &Arc<Self>, watched: &mut Vec<PathBuf>, said: &mut Vec<String>) -> bool {
        let (here, problems) = kubelets_here(self.config.places());
        let new = problems.iter().filter(|problem| !said.contains(problem));
        new.for_each(|problem| warn!("{problem}; trying again"));
        let mut is_complete = problems.is_empty() && !here.is_empty();
        self.served.metrics.silent_roots.set(problems.len() as i64);
        *said = problems;
        let is_off = self.config.policy().stale_subpaths == Mode::Off;
        if watched.is_empty() && (here.is_empty() || is_off) {
            self.served.ready.store(true, Ordering::Relaxed);
        }
        for root in here.into_iter().filter(|_| !is_off) {
            if !watched.contains(&root) {
                match self.start(&root) {
                    Ok(()) => watched.push(root),
                    Err(error) => {
                        error!("follow {}: {error:#}", root.display());
                        is_complete = false;
                    }
                }
            }
        }
        is_complete || is_off
    }

    /// Refreshes containers of Docker and Podman that opted in, on a node with or without a
    /// kubelet.
    pub fn follow_engines_for_ever(&self) {
        let (mode, policy) = (self.config.agent().refresh, self.config.policy());
        let Some(helper) = &self.helper else {
            return;
        };
        if policy.stale_subpaths == Mode::Off {
            return;
        }
        self.retry_with_backoff("follow the containers of Docker and Podman", || {
            let served = &self.served;
            let refresher = Refresher::new(helper, &served.metrics, &served.reporting, policy);
            engines::follow(
                mode,
                self.config.places(),
                self.config.agent().survey,
                &refresher,
            )
        });
    }

    /// Starts all threads of a root. If a thread cannot be started, the others end at once: the next
    /// search starts all of them.
    fn start(self: &Arc<Self>, root: &Path) -> Result<()> {
        let are_all_started = Arc::new(Mutex::new(false));
        // The threads wait for this lock.
        let mut all_started = are_all_started
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let start = |name, work: WorkOfRoot| {
            let (this, root) = (Arc::clone(self), root.to_owned());
            let are_all_started = Arc::clone(&are_all_started);
            spawn(name, move || {
                if *are_all_started
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                {
                    work(&this, &root);
                }
            })
        };
        let (plan, planned) = refreshes();
        let refreshes = self.helper.is_some().then_some(plan);
        if let Some(refreshes) = refreshes.clone() {
            let work = move |this: &Arc<Self>, root: &Path| {
                this.follow_mounts_for_ever(root, &refreshes);
            };
            start("volumes", Box::new(work))?;
            let work = move |this: &Arc<Self>, _: &Path| this.refresh_for_ever(&planned);
            start("refresh", Box::new(work))?;
        }
        let work = move |this: &Arc<Self>, root: &Path| this.follow_for_ever(root, &refreshes);
        start("kubelet-root", Box::new(work))?;
        *all_started = true;
        Ok(())
    }

    fn refresh_for_ever(&self, planned: &Receiver<Planned>) {
        let (served, Some(helper)) = (&self.served, &self.helper) else {
            return;
        };
        let policy = self.config.policy();
        let refresher = Refresher::new(helper, &served.metrics, &served.reporting, policy);
        let refreshes = PodRefreshes::new(&self.pods, self.config.places(), refresher);
        self.retry_with_backoff("refresh containers", || {
            refreshes.run(planned);
            Ok(())
        });
    }

    fn follow_mounts_for_ever(self: &Arc<Self>, root: &Path, refreshes: &Refreshes) {
        let are_files_followed = Cell::new(false);
        let follow_files = || {
            if are_files_followed.get() {
                return;
            }
            let (following, refreshes) = (Arc::clone(self), refreshes.clone());
            let root = root.to_owned();
            let started = spawn("host-files", move || {
                following.follow_files_for_ever(&root, &refreshes)
            });
            match started {
                Ok(()) => are_files_followed.set(true),
                Err(error) => error!("{error:#}"),
            }
        };
        let what = format!("follow the mounts below {}", root.display());
        self.retry_with_backoff(&what, || {
            let updates = Updates::new(
                &self.config,
                &self.served.metrics,
                &self.served.reporting,
                Some(refreshes.clone()),
                self.pods.clone(),
            );
            let interval = self.config.agent().survey;
            let mut followed = FollowedVolumes::new(root, &self.pods, refreshes, updates);
            followed.follow(interval, follow_files)
        });
    }

    fn follow_files_for_ever(&self, root: &Path, refreshes: &Refreshes) {
        let what = format!("follow files of the host in pods below {}", root.display());
        self.retry_with_backoff(&what, || {
            let interval = self.config.agent().survey;
            let metrics = &self.served.metrics;
            let places = self.config.places();
            host_files::follow(interval, root, &self.pods, places, refreshes, metrics)
        });
    }

    fn follow_for_ever(&self, root: &Path, refreshes: &Option<Refreshes>) {
        self.retry_with_backoff(&format!("follow {}", root.display()), || {
            let mut updates = Updates::new(
                &self.config,
                &self.served.metrics,
                &self.served.reporting,
                refreshes.clone(),
                self.pods.clone(),
            );
            watch::follow(root.to_owned(), self.config.agent().survey, |notice| {
                self.act(notice, root, &mut updates)
            })
        });
    }

    fn retry_with_backoff(&self, what: &str, work: impl FnMut() -> io::Result<()>) {
        retry_with_backoff(what, &self.served.metrics.restarts, work);
    }

    fn act(&self, notice: Notice, root: &Path, updates: &mut Updates<'_>) {
        let metrics = &self.served.metrics;
        match notice {
            Notice::Changed(volumes, cause) => {
                if cause == Cause::Update {
                    metrics.volume_updates.inc_by(volumes.len() as u64);
                }
                updates.follow(&volumes);
            }
            Notice::Surveyed { volumes, took } => {
                let label = [("root", root.display().to_string())];
                metrics
                    .watched_volumes
                    .get_or_create(&label)
                    .set(volumes as i64);
                if !self.served.ready.swap(true, Ordering::Relaxed) {
                    info!("surveyed {} in {took:?}: {volumes} volumes", root.display());
                }
            }
            Notice::Interrupted => drop(metrics.interruptions.inc()),
            Notice::NotWatched(error) => {
                metrics.watch_errors.inc();
                warn!("{}", error_chain(&error));
            }
        }
    }
}
