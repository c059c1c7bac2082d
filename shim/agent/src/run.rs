//! The agent from start to end.
//!
//! ```text
//! host's namespace ─► config ─► helper process ─► HTTP ─► one thread for each kubelet root ─► ready ─► signal
//! ```
//!
//! The main thread runs tokio and never touches a kubelet root. Everything that may hang runs in
//! threads of its own.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bindguard_config::{Config, DEFAULT_PATH, Loaded, RefreshMode, keep_valid, load};
use bindguard_core::error_chain;
use bindguard_guard::refresh::HelperProcess;
use bindguard_sys::require_calls;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::args::Args;
use crate::host::{self, RuntimeNamespace};
use crate::pods::{self, PodLookup};
use crate::sinks::journal::JournalWriter;
use crate::sinks::kubernetes;
use crate::sinks::metrics::Metrics;
use crate::sinks::status::StatusSource;
use crate::sources::http::{self, Audience, BoundSocket, Served};
use crate::sources::journal::{JournalReader, follow_journal};
use crate::sources::kubediag::{Kubediag, PodReader};
use crate::sources::nri;
use crate::sources::roots::KubeletRoots;
use crate::threads::IdleMemory;
use crate::threads::{Backoff, retry_with_backoff, spawn};
use crate::work::survey::Surveyor;
use bindguard_kubernetes::{Access, AccessError, ServiceAccount, node_name};

/// Runs the agent until a signal ends it.
///
/// # Errors
/// If the config that was named is invalid, the host's namespace cannot be entered, or nothing can
/// be served.
pub fn run(args: &Args) -> Result<()> {
    // The file that was named is in the agent's own mount namespace, the node's file in the host's.
    let named = args.config.as_deref().map(Loaded::from_file).transpose();
    let named = named.map_err(|error| anyhow::anyhow!(error_chain(&error)))?;
    // So is the service account.
    let service_account = ServiceAccount::of_this_pod();
    let mut entered = None;
    if let Some(root) = &args.host {
        host::enter(args.cri.as_deref(), root)?;
        entered = Some(RuntimeNamespace::default());
    }
    let mut ignored_config = None;
    let loaded = match named {
        None => load(),
        Some(named) if args.host.is_some() => {
            let node = Loaded::from_file(Path::new(DEFAULT_PATH)).ok();
            let (loaded, ignored) = config_in_a_pod(named, node);
            ignored_config = ignored;
            loaded
        }
        Some(named) => named,
    };
    let config = reported(loaded);
    if let Err(old) = require_calls() {
        warn!("{old}");
    }
    let settings = args.over(config.agent());
    let config = config.with_agent(settings);
    let cri = host::cri_socket(args.cri.as_deref(), Path::new("/"))
        .unwrap_or_else(|| host::USUAL_SOCKET.into());
    // Before the first thread and the first socket.
    let enters_containers =
        config.agent().refresh != RefreshMode::Off || config.agent().nri.is_some();
    let helper = enters_containers
        .then(|| HelperProcess::start().context("start the helper process"))
        .transpose()?
        .map(Arc::new);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start tokio")?;
    let ended = runtime.block_on(serve(
        config,
        ignored_config,
        service_account,
        &cri,
        entered,
        helper,
    ));
    // The process ends. A destructor would wait for a task that waits for a server.
    std::mem::forget(runtime);
    ended
}

/// The active config. An invalid file is not used, as in an admission.
fn reported(loaded: Loaded) -> Config {
    loaded.remarks().iter().for_each(|remark| warn!("{remark}"));
    loaded.config
}

/// The config of an agent in a pod, and why the pod is not ready. `named`: the config of the fleet.
/// With a mistake in it, the node's installer keeps the node's own file, and so does the agent. Both
/// are the same after a rollback, where a newer version knew every key.
fn config_in_a_pod(named: Loaded, node: Option<Loaded>) -> (Loaded, Option<String>) {
    let mistakes = named.warnings.clone();
    if mistakes.is_empty() {
        return (named, None);
    }
    let reason = format!(
        "the config of the fleet has a mistake: {}; correct the config, or run a version that knows the key",
        mistakes.join("; ")
    );
    match node {
        None => (named, Some(reason)),
        Some(node) if node.text == named.text => (named, None),
        Some(node) => {
            warn!("{reason}; using {DEFAULT_PATH} of the node");
            (node, Some(reason))
        }
    }
}

async fn serve(
    config: Config,
    ignored_config: Option<String>,
    account: Option<Result<ServiceAccount, AccessError>>,
    cri: &Path,
    entered: Option<RuntimeNamespace>,
    helper: Option<Arc<HelperProcess>>,
) -> Result<()> {
    let metrics = Metrics::new();
    let client = pods::client(cri, entered.clone());
    let pods = PodLookup::new(client, config.agent().refresh);
    let writer = match config.journal() {
        Some(journal) => JournalWriter::start(journal, pods.clone(), Arc::clone(&metrics)),
        None => JournalWriter::off(Arc::clone(&metrics)),
    };
    let to_api = &config.agent().kubernetes;
    let access = Access::choose(to_api.kubeconfig.clone(), account).map(Arc::new);
    let memory = IdleMemory::default();
    tokio::spawn(memory.clone().run());
    let reporting = kubernetes::start(
        to_api,
        &access,
        pods.clone(),
        &metrics,
        writer.clone(),
        memory,
    );
    let pods_of_node = PodReader::new(access.ok(), node_name(to_api.node.as_deref()));
    let kubediag = Kubediag::new(
        &config,
        pods_of_node,
        Arc::clone(&metrics),
        reporting.clone(),
    );
    let surveyor = Arc::new(Surveyor::new(
        &config,
        Arc::clone(&metrics),
        reporting.clone(),
        pods.clone(),
        cri,
    ));
    let position = config.agent().socket.with_extension("position");
    let journal = config
        .journal()
        .map(|journal| Arc::new(JournalReader::new(journal.to_owned(), position)));
    let status = StatusSource::new(&config);
    let ready = AtomicBool::new(false);
    let served = Arc::new(Served {
        metrics,
        journal,
        reporting,
        surveyor,
        status,
        kubediag,
        ignored_config,
        ready,
    });
    let settings = config.agent().clone();
    let socket = http::serve_socket(&settings.socket, Arc::clone(&served))
        .await
        .with_context(|| format!("serve on {}", settings.socket.display()))?;
    if let Some(address) = settings.metrics {
        let served = Arc::clone(&served);
        tokio::spawn(http::serve_address(address, None, served, Audience::Public));
    }
    if let Some(address) = settings.kubediag {
        // kubediag's agent calls the loopback address of the node.
        let node = entered.as_ref().map(|_| cri.to_owned());
        let served = Arc::clone(&served);
        tokio::spawn(http::serve_address(
            address,
            node,
            served,
            Audience::Kubediag,
        ));
    }
    let survey = Arc::clone(&served);
    spawn("survey", move || {
        retry_with_backoff("survey the node", &survey.metrics.restarts, || {
            survey_for_ever(&survey, settings.survey)
        })
    })?;
    follow_journal_if_needed(&config, &served)?;
    info!(
        "watching the kubelet's volumes, stale-subpaths = {}",
        config.policy().stale_subpaths
    );
    if let Some(socket) = &settings.nri {
        let metrics = Arc::clone(&served.metrics);
        let plugin = nri::NriPlugin::new(socket, &config, metrics, writer, helper.clone());
        spawn("nri", move || plugin.run_for_ever())?;
    }
    let roots = Arc::new(KubeletRoots {
        config,
        served,
        pods,
        helper: helper
            .clone()
            .filter(|_| settings.refresh != RefreshMode::Off),
    });
    let engines = Arc::clone(&roots);
    spawn("engines", move || engines.follow_engines_for_ever())?;
    let finding = Arc::clone(&roots);
    spawn("roots", move || finding.find_for_ever())?;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let (helper_ended, end_of_helper) = oneshot::channel();
    if let Some(helper) = helper {
        watch_helper(helper, helper_ended)?;
    }
    ended(&socket, entered.unwrap_or_default(), end_of_helper).await
}

/// Follows the journal for those who do not wait for a request for figures.
fn follow_journal_if_needed(config: &Config, served: &Arc<Served>) -> Result<()> {
    let (Some(journal), Some(path)) =
        (served.journal.clone(), config.journal().map(Path::to_owned))
    else {
        return Ok(());
    };
    if !served.reporting.is_on() {
        return Ok(());
    }
    let (served, interval) = (Arc::clone(served), config.agent().survey);
    spawn("journal", move || {
        let what = format!("follow {}", path.display());
        retry_with_backoff(&what, &served.metrics.restarts, || {
            follow_journal(&path, interval, || {
                journal.read_new(|line| served.journaled(line))
            })
        })
    })
}

async fn ended(
    socket: &BoundSocket,
    entered: RuntimeNamespace,
    helper: oneshot::Receiver<()>,
) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = entered.changed() => {
            socket.remove();
            bail!(
                "the container runtime was started again in another mount namespace; ending, so that the supervisor starts the agent there"
            );
        }
        Ok(()) = helper => {
            socket.remove();
            bail!(
                "the helper process, which starts children in containers, was killed; ending, so that the supervisor starts both again"
            );
        }
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    socket.remove();
    // A re-bind that ends half way leaves whole content; the next re-bind completes the work. So
    // exit without a join of threads: a thread may hang on a file server.
    std::process::exit(0)
}

/// Waits in a thread for the end of the helper process, which ends only by a kill.
fn watch_helper(helper: Arc<HelperProcess>, ended: oneshot::Sender<()>) -> Result<()> {
    spawn("helper", move || {
        helper.wait();
        let _ = ended.send(());
    })
}

fn survey_for_ever(served: &Served, interval: Duration) -> ! {
    let mut pauses = Backoff::of_surveys(interval);
    loop {
        // An invalid file was reported at the start, and each create reports it.
        let _ = keep_valid();
        if served.surveyor.survey() {
            pauses.reset();
            thread::sleep(interval);
        } else {
            thread::sleep(pauses.after(Duration::ZERO));
        }
    }
}
