//! The agent from start to end.
//!
//! ```text
//! config ─► host's namespace ─► one thread for each kubelet root ─► HTTP ─► ready ─► signal
//! ```
//!
//! The main thread runs tokio and never touches a kubelet root. Everything that may hang runs in threads of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bindguard_config::{Config, load};
use bindguard_core::error_chain;
use bindguard_core::policy::Mode;
use bindguard_operator::kubelets_here;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use crate::args::Args;
use crate::host;
use crate::http::{self, Served};
use crate::metrics::{Metrics, RootLabel};
use crate::survey::Surveyor;
use crate::updates::Updates;
use crate::watch::{self, Cause, Notice};

/// The pause before a thread that failed starts again; it doubles up to the longest.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Runs the agent until a signal ends it.
///
/// # Errors
/// If the config that was named is invalid, the host's namespace cannot be entered, or nothing can be served.
pub fn run(args: &Args) -> Result<()> {
    let config = config(args)?;
    if let Some(root) = &args.host {
        host::enter(args.cri.as_deref(), root)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    runtime.block_on(serve(config))
}

/// A config that `--config` names must be valid. An invalid config of the node is ignored, as in an admission.
fn config(args: &Args) -> Result<Config> {
    if let Some(path) = &args.config {
        return Config::from_file(path).map_err(|error| anyhow::anyhow!(error_chain(&error)));
    }
    let loaded = load();
    if let Some(problem) = loaded.problem {
        warn!("ignoring the config, using defaults: {}", error_chain(&problem));
    }
    Ok(loaded.config)
}

async fn serve(config: Config) -> Result<()> {
    let config = Arc::new(config);
    let metrics = Metrics::new();
    let surveyor = Arc::new(Surveyor::new(*config.policy(), config.places().clone(), Arc::clone(&metrics)));
    let served = Arc::new(Served { metrics: Arc::clone(&metrics), surveyor, ready: AtomicBool::new(false) });
    let agent = config.agent();
    http::serve_socket(&agent.socket, Arc::clone(&served))
        .await
        .with_context(|| format!("serve on {}", agent.socket.display()))?;
    if let Some(address) = agent.metrics {
        http::serve_address(address, Arc::clone(&served)).await.with_context(|| format!("serve on {address}"))?;
    }
    let roots = Arc::clone(&served);
    let (for_roots, for_survey) = (Arc::clone(&config), Arc::clone(&served));
    spawn("roots", move || find_roots(&for_roots, &roots))?;
    let interval = agent.survey;
    spawn("survey", move || survey_for_ever(&for_survey, interval))?;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    info!("watching the kubelet's volumes, policy {:?}", config.policy().stale_subpaths);
    ended().await
}

async fn ended() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    // A re-bind that ends half way leaves whole content; the next one finishes it. So no thread is waited for: one of them
    // may wait for a server.
    std::process::exit(0)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(work).with_context(|| format!("start the thread {name}"))?;
    Ok(())
}

fn survey_for_ever(served: &Served, interval: Duration) {
    loop {
        served.surveyor.json();
        thread::sleep(interval);
    }
}

/// Starts a thread for each kubelet root once it answers: a root may be mounted later, or hang.
fn find_roots(config: &Arc<Config>, served: &Arc<Served>) {
    let mut watched: Vec<PathBuf> = Vec::new();
    loop {
        let (here, problems) = kubelets_here(config.places());
        problems.iter().for_each(|problem| warn!("{problem}"));
        served.metrics.silent_roots.set(problems.len() as i64);
        for root in &here {
            if config.policy().stale_subpaths != Mode::Off && !watched.iter().any(|known| known == root) {
                let (config, served, root) = (Arc::clone(config), Arc::clone(served), root.to_owned());
                watched.push(root.clone());
                if let Err(error) = spawn("kubelet-root", move || follow_for_ever(&root, &config, &served)) {
                    error!("{error:#}");
                }
            }
        }
        if watched.is_empty() {
            served.ready.store(true, Ordering::Relaxed);
        }
        thread::sleep(config.agent().survey);
    }
}

/// Follows a kubelet root. A failure or a panic costs a pause and a survey.
fn follow_for_ever(root: &Path, config: &Config, served: &Served) {
    let mut pause = PAUSE;
    loop {
        let began = Instant::now();
        let mut updates = Updates::new(config, &served.metrics);
        let act = |notice| act(notice, root, &mut updates, served);
        let follow = || watch::follow(root.to_owned(), config.agent().survey, act);
        match catch_unwind(AssertUnwindSafe(follow)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => error!("follow {}: {error}", root.display()),
            Err(_) => error!("follow {}: the thread panicked", root.display()),
        }
        served.metrics.restarts.inc();
        pause = if began.elapsed() > LONGEST_PAUSE { PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        thread::sleep(pause);
    }
}

fn act(notice: Notice, root: &Path, updates: &mut Updates<'_>, served: &Served) {
    let metrics = &served.metrics;
    match notice {
        Notice::Changed(volume, cause) => {
            if cause == Cause::Update {
                metrics.volume_updates.inc();
            }
            updates.follow(&volume);
        }
        Notice::Surveyed { volumes, took } => {
            let label = RootLabel { root: root.display().to_string() };
            metrics.watched_volumes.get_or_create(&label).set(volumes as i64);
            if !served.ready.swap(true, Ordering::Relaxed) {
                info!("surveyed {} in {took:?}: {volumes} volumes", root.display());
            }
        }
        Notice::Overflow => drop(metrics.overflows.inc()),
        Notice::NotWatched(error) => {
            metrics.watch_errors.inc();
            warn!("{}", error_chain(&error));
        }
    }
}
