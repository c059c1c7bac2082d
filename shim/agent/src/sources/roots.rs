//! The threads of each kubelet root: the first follows the kubelet's updates, the second follows
//! the mounts of drivers, and the third starts the refreshes of containers. A fourth thread follows
//! replaced files of the host, once a pod opted in to `host-files`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::policy::Mode;
use bindguard_guard::refresh::HelperProcess;
use bindguard_operator::kubelets_here;
use tracing::{error, info, warn};

use crate::pods::PodLookup;
use crate::sinks::metrics::RootLabel;
use crate::sources::engines;
use crate::sources::host_files;
use crate::sources::http::Served;
use crate::sources::volumes::FollowedVolumes;
use crate::sources::watch::{self, Cause, Notice};
use crate::threads::spawn;
use crate::work::pod_refreshes::{PodRefreshes, Refreshes, refreshes};
use crate::work::refresher::Refresher;
use crate::work::updates::Updates;

/// The pause before a thread that failed starts again; it doubles up to the longest.
const PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Everything that the threads share.
#[derive(Debug)]
pub struct KubeletRoots {
    /// The settings.
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
        loop {
            let (here, problems) = kubelets_here(self.config.places());
            problems.iter().for_each(|problem| warn!("{problem}"));
            self.served.metrics.silent_roots.set(problems.len() as i64);
            let is_off = self.config.policy().stale_subpaths == Mode::Off;
            for root in here.into_iter().filter(|_| !is_off) {
                if !watched.contains(&root) {
                    watched.push(root.clone());
                    self.start(root);
                }
            }
            if watched.is_empty() {
                self.served.ready.store(true, Ordering::Relaxed);
            }
            thread::sleep(self.config.agent().survey);
        }
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

    fn start(self: &Arc<Self>, root: PathBuf) {
        let (plan, planned) = refreshes();
        let refreshes = self.helper.is_some().then_some(plan);
        if let Some(refreshes) = refreshes.clone() {
            let (mounting, root) = (Arc::clone(self), root.clone());
            if let Err(error) = spawn("volumes", move || {
                mounting.follow_mounts_for_ever(&root, &refreshes)
            }) {
                error!("{error:#}");
            }
        }
        let (following, refreshing) = (Arc::clone(self), Arc::clone(self));
        let started = spawn("kubelet-root", move || {
            following.follow_for_ever(&root, &refreshes)
        })
        .and_then(|()| {
            spawn("refresh", move || {
                let (served, Some(helper)) = (&refreshing.served, &refreshing.helper) else {
                    return;
                };
                let refresher = Refresher::new(
                    helper,
                    &served.metrics,
                    &served.reporting,
                    refreshing.config.policy(),
                );
                let refreshes =
                    PodRefreshes::new(&refreshing.pods, refreshing.config.places(), refresher);
                refreshing.retry_with_backoff("refresh containers", || {
                    refreshes.run(&planned);
                    Ok(())
                });
            })
        });
        if let Err(error) = started {
            error!("{error:#}");
        }
    }

    fn follow_mounts_for_ever(self: &Arc<Self>, root: &Path, refreshes: &Refreshes) {
        let files = Once::new();
        let follow_files = || {
            let (following, refreshes) = (Arc::clone(self), refreshes.clone());
            let root = root.to_owned();
            let started = spawn("host-files", move || {
                following.follow_files_for_ever(&root, &refreshes)
            });
            if let Err(error) = started {
                error!("{error:#}");
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
            followed.follow(interval, || files.call_once(follow_files))
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

    /// Repeats work that ends only by a failure or a panic. Each costs a pause.
    fn retry_with_backoff(&self, what: &str, mut work: impl FnMut() -> std::io::Result<()>) {
        let mut pause = PAUSE;
        loop {
            let began = Instant::now();
            match catch_unwind(AssertUnwindSafe(&mut work)) {
                // Nothing can come any more.
                Ok(Ok(())) => return,
                Ok(Err(error)) => error!("{what}: {error}; trying again in {pause:?}"),
                Err(_) => error!("{what}: the thread panicked; trying again in {pause:?}"),
            }
            self.served.metrics.restarts.inc();
            thread::sleep(pause);
            pause = if began.elapsed() > MAX_PAUSE {
                PAUSE
            } else {
                (pause * 2).min(MAX_PAUSE)
            };
        }
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
                let label = RootLabel {
                    root: root.display().to_string(),
                };
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
