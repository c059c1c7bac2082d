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
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use bindguard_config::{DEFAULT_PATH, Loaded, RefreshMode, keep_valid, load};
use bindguard_core::error_chain;
use bindguard_guard::refresh::HelperProcess;
use bindguard_kubernetes::{Access, Failure, ServiceAccount};
use bindguard_sys::require_calls;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::args::Args;
use crate::host::{self, RuntimeNamespace};
use crate::limits::{since_epoch, spawn, survey_for_ever};
use crate::pods::PodLookup;
use crate::sinks::Reporting;
use crate::sinks::metrics::Metrics;
use crate::sources::http::{self, Audience, Served};
use crate::sources::journal::{JournalReader, follow_journal};
use crate::sources::kubediag::Kubediag;
use crate::sources::{find_for_ever, follow_engines, nri};
use crate::work::Node;
use crate::work::survey::Surveyor;

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
    let mut loaded = named.unwrap_or_else(load);
    // The config of the fleet. With a mistake in it, the node's installer keeps the node's own file,
    // and so does the agent. Both are the same after a rollback, where a newer version knew every key.
    if args.config.is_some() && args.host.is_some() && !loaded.warnings.is_empty() {
        let reason = format!(
            "the config of the fleet has a mistake: {}; correct the config, or run a version that knows the key",
            loaded.warnings.join("; ")
        );
        match Loaded::from_file(Path::new(DEFAULT_PATH)) {
            Ok(node) if node.text == loaded.text => {}
            Ok(node) => {
                warn!("{reason}; using {DEFAULT_PATH} of the node");
                loaded = node;
                ignored_config = Some(reason);
            }
            Err(_) => ignored_config = Some(reason),
        }
    }
    // An invalid file is not used, as in an admission.
    loaded.remarks().iter().for_each(|remark| warn!("{remark}"));
    let config = loaded.config;
    if let Err(old) = require_calls() {
        warn!("{old}");
    }
    let settings = args.over(config.agent());
    let config = config.with_agent(settings);
    // Before the first thread and the first socket.
    let enters_containers =
        config.agent().refresh != RefreshMode::Off || config.agent().nri.is_some();
    let mut helper = None;
    if enters_containers {
        let started = HelperProcess::start().context("start the helper process")?;
        helper = Some(&*Box::leak(Box::new(started)));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start tokio")?;
    let cri = host::cri_socket(args.cri.as_deref(), Path::new("/"));
    let cri = cri.unwrap_or_else(|| host::USUAL_SOCKET.into());
    let ended = runtime.block_on(async {
        let settings = config.agent();
        let kubeconfig = settings.kubernetes.kubeconfig.clone();
        let access = Access::choose(kubeconfig, service_account).map(Arc::new);
        let metrics = Metrics::new();
        let pods = PodLookup::new(&cri, entered.clone(), settings.refresh);
        let node = Node {
            reporting: Reporting::start(&config, &access, pods, metrics),
            config,
            ignored_config,
            cri,
            started: since_epoch(),
            metrics,
            pods,
            helper,
            ready: AtomicBool::new(false),
            unserved: Mutex::default(),
        };
        serve(Box::leak(Box::new(node)), access, entered).await
    });
    // The process ends. A destructor would wait for a task that waits for a server.
    std::mem::forget(runtime);
    ended
}

async fn serve(
    node: &'static Node,
    access: Result<Arc<Access>, Failure>,
    entered: Option<RuntimeNamespace>,
) -> Result<()> {
    let settings = node.config.agent();
    let position = settings.socket.with_extension("position");
    let journal = node.config.journal();
    let served: &Served = Box::leak(Box::new(Served {
        node,
        journal: journal.map(|journal| JournalReader::new(journal.to_owned(), position)),
        surveyor: Surveyor::new(node),
        kubediag: Kubediag::new(node, access.ok()),
    }));
    let socket = http::serve_socket(&settings.socket, served)
        .await
        .with_context(|| format!("serve on {}", settings.socket.display()))?;
    if let Some(address) = settings.metrics {
        tokio::spawn(http::serve_address(address, None, served, Audience::Public));
    }
    if let Some(address) = settings.kubediag {
        // kubediag's agent calls the loopback address of the node.
        let cri = entered.as_ref().map(|_| node.cri.as_path());
        tokio::spawn(http::serve_address(
            address,
            cri,
            served,
            Audience::Kubediag,
        ));
    }
    spawn("survey", move || {
        node.retry_with_backoff("survey the node", || {
            survey_for_ever(settings.survey, || {
                // An invalid file was reported at the start, and each create reports it.
                let _ = keep_valid();
                served.surveyor.survey()
            })
        })
    })?;
    // For those who do not wait for a request for figures.
    if let (Some(path), Some(reader)) = (journal, &served.journal)
        && node.reporting.writes_events()
    {
        spawn("journal", move || {
            node.retry_with_backoff(&format!("follow {}", path.display()), || {
                follow_journal(path, settings.survey, || {
                    reader.read_new(|line| node.journaled(line))
                })
            })
        })?;
    }
    info!(
        "watching the kubelet's volumes, stale-subpaths = {}",
        node.config.policy().stale_subpaths
    );
    if let Some(socket) = &settings.nri {
        spawn("nri", move || nri::serve_for_ever(node, socket))?;
    }
    spawn("engines", || follow_engines(node))?;
    spawn("roots", || find_for_ever(node))?;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let (helper_ended, end_of_helper) = oneshot::channel();
    if let Some(helper) = node.helper {
        // The helper process ends only by a kill.
        spawn("helper", move || {
            helper.wait();
            let _ = helper_ended.send(());
        })?;
    }
    let entered = entered.unwrap_or_default();
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        () = entered.changed() => Some(
            "the container runtime was started again in another mount namespace; ending, so that the supervisor starts the agent there"
        ),
        Ok(()) = end_of_helper => Some(
            "the helper process, which starts children in containers, was killed; ending, so that the supervisor starts both again"
        ),
    };
    socket.remove();
    if let Some(failure) = failure {
        bail!(failure);
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    // A re-bind that ends half way leaves whole content; the next re-bind completes the work. So
    // exit without a join of threads: a thread may hang on a file server.
    std::process::exit(0)
}
