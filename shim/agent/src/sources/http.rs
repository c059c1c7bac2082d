//! `/metrics`, `/healthz` and `/readyz` on an address; these, the reports and kubediag's processors
//! on the unix socket. The processors can have an address of their own.

mod connections;

use std::convert::Infallible;
use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bindguard_core::report::{JournalLine, UnreadLine};
use bindguard_operator::agent_status::STATUS_PATH;
use bindguard_sys::make_folders;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::task::spawn_blocking;
use tokio::time::{Duration, sleep};
use tracing::{info, warn};

use self::connections::accept;
use crate::host::bind_on_node;
use crate::sinks::metrics::{Metrics, plain_text};
use crate::sinks::reporting::Reporting;
use crate::sinks::status::StatusSource;
use crate::sources::journal::JournalReader;
use crate::sources::kubediag::{self, Kubediag};
use crate::work::survey::Surveyor;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Prometheus' own format, which is older than OpenMetrics.
const PLAIN_METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const NO_SUCH_PATH: &str = "no such path\n";

/// Time limit for the head of a request.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause before an address is bound again.
const BIND_INTERVAL: Duration = Duration::from_secs(10);

/// Time limit for the journal.
const JOURNAL_READ_TIMEOUT: Duration = Duration::from_secs(1);

/// The state that requests read.
#[derive(Debug)]
pub struct Served {
    pub metrics: Arc<Metrics>,
    /// The journal, if the agent reads a journal.
    pub journal: Option<Arc<JournalReader>>,
    /// Takes what is for the API server.
    pub reporting: Reporting,
    pub surveyor: Arc<Surveyor>,
    pub status: StatusSource,
    /// kubediag's processors.
    pub kubediag: Arc<Kubediag>,
    /// A mistake in the config of the fleet, which makes the agent's pod unready: the rollout stops.
    pub ignored_config: Option<String>,
    /// True once every kubelet root that answers is watched.
    pub ready: AtomicBool,
}

impl Served {
    /// Counts a line of the journal, and hands it to the events.
    pub fn journaled(&self, line: &Result<JournalLine, UnreadLine>) {
        self.metrics.journaled(line);
        if let Ok(line) = line {
            self.reporting.journaled(line);
        }
    }
}

/// The paths that a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// Figures and health, for anyone who reaches the address.
    Public,
    /// Everything, for root.
    Local,
    /// kubediag's processors and health.
    Kubediag,
}

/// Serves an audience on an address, in the network namespace of the runtime behind the CRI's socket
/// `node` if it is given. Any user of the node may have the address first: the agent tries again, and
/// does its work meanwhile.
pub async fn serve_address(
    address: SocketAddr,
    node: Option<PathBuf>,
    served: Arc<Served>,
    audience: Audience,
) {
    let listener = bound(address, node, &served.status).await;
    accept(listener, move |stream| {
        converse(stream, Arc::clone(&served), audience)
    })
    .await
}

async fn bound(address: SocketAddr, node: Option<PathBuf>, status: &StatusSource) -> TcpListener {
    loop {
        match bind(address, node.clone()).await {
            Ok(listener) => {
                if status.note_address(address, None) {
                    info!("serving on {address}");
                }
                return listener;
            }
            Err(error) => {
                if status.note_address(address, Some(error.to_string())) {
                    warn!("serve on {address}: {error}; trying again every {BIND_INTERVAL:?}");
                }
            }
        }
        sleep(BIND_INTERVAL).await;
    }
}

async fn bind(address: SocketAddr, node: Option<PathBuf>) -> io::Result<TcpListener> {
    let Some(cri) = node else {
        return TcpListener::bind(address).await;
    };
    let bound = spawn_blocking(move || bind_on_node(&cri, address)).await;
    let listener = bound.map_err(io::Error::other)??;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// The unix socket of this agent. A newer agent may have replaced it.
#[derive(Debug)]
pub struct BoundSocket {
    path: PathBuf,
    inode: u64,
}

impl BoundSocket {
    /// Removes the socket, unless a new agent has bound the path by now. With a leftover socket an
    /// ended agent would look silent instead of absent.
    pub fn remove(&self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode)
        {
            // A socket that stays costs a wrong report, and the next agent replaces it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Serves everything on a unix socket that only root may open.
///
/// # Errors
/// If it cannot be bound.
pub async fn serve_socket(socket: &Path, served: Arc<Served>) -> io::Result<BoundSocket> {
    if let Some(folder) = socket.parent() {
        make_folders(folder, 0o755)?;
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    let bound = BoundSocket {
        path: socket.to_owned(),
        inode: std::fs::symlink_metadata(socket)?.ino(),
    };
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                // A connection that was made before the socket's mode was set.
                Ok((stream, _)) if !is_of_root(&stream) => {}
                Ok((stream, _)) => drop(tokio::spawn(converse(
                    stream,
                    Arc::clone(&served),
                    Audience::Local,
                ))),
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    });
    Ok(bound)
}

fn is_of_root(stream: &UnixStream) -> bool {
    let client = stream.peer_cred().map(|client| client.uid());
    client.is_ok_and(|uid| uid == 0 || uid == geteuid().as_raw())
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    served: Arc<Served>,
    scope: Audience,
) {
    let service = service_fn(move |request| {
        let served = Arc::clone(&served);
        async move {
            let (status, kind, body) = answer(request, &served, scope).await;
            let mut response = Response::new(Full::new(body));
            *response.status_mut() = status;
            let kind = HeaderValue::from_static(kind);
            response.headers_mut().insert(CONTENT_TYPE, kind);
            Ok::<_, Infallible>(response)
        }
    });
    // A client that goes away is no event of the agent's.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CLIENT_TIMEOUT)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// The parts of an answer: the status, the kind of the body, and the body.
type Answer = (StatusCode, &'static str, Bytes);

fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    (status, TEXT, body.into())
}

/// The body, or a failure of the server.
fn ok_or_failed(kind: &'static str, body: Result<impl Into<Bytes>, impl Display>) -> Answer {
    match body {
        Ok(body) => (StatusCode::OK, kind, body.into()),
        Err(why) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n")),
    }
}

async fn answer(request: Request<Incoming>, served: &Arc<Served>, scope: Audience) -> Answer {
    if scope != Audience::Public && request.uri().path().starts_with(kubediag::FOLDER) {
        return match served.kubediag.answer(request).await {
            Some((StatusCode::OK, json)) => (StatusCode::OK, JSON, json.into()),
            Some((status, why)) => text(status, why),
            None => text(StatusCode::NOT_FOUND, NO_SUCH_PATH),
        };
    }
    // hyper sends no body in answer to HEAD.
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let why = "only GET and HEAD are supported\n";
        return text(StatusCode::METHOD_NOT_ALLOWED, why);
    }
    let is_ready = served.ready.load(Ordering::Relaxed);
    match (request.uri().path(), scope) {
        ("/healthz", _) => text(StatusCode::OK, "OK\n"),
        (_, Audience::Kubediag) => text(StatusCode::NOT_FOUND, NO_SUCH_PATH),
        ("/readyz", _) => match &served.ignored_config {
            _ if !is_ready => text(
                StatusCode::SERVICE_UNAVAILABLE,
                "the first survey is not done\n",
            ),
            Some(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            None => text(StatusCode::OK, "OK\n"),
        },
        ("/metrics", _) => {
            read_journal(served).await;
            match served.metrics.text() {
                Ok(figures) if wants_plain_text(request.headers()) => {
                    (StatusCode::OK, PLAIN_METRICS, plain_text(&figures).into())
                }
                figures => ok_or_failed(OPEN_METRICS, figures),
            }
        }
        (STATUS_PATH, Audience::Local) => {
            let status = served.status.status(&served.metrics, is_ready);
            ok_or_failed(JSON, serde_json::to_string(&status))
        }
        ("/v1/report", Audience::Local) => {
            let surveyor = Arc::clone(&served.surveyor);
            let report = match spawn_blocking(move || surveyor.json()).await {
                Ok(Ok(json)) => Ok(json.to_string()),
                Ok(Err(error)) => Err(format!("write the report: {error}")),
                Err(error) => Err(format!("survey the node: {error}")),
            };
            ok_or_failed(JSON, report)
        }
        _ => text(StatusCode::NOT_FOUND, NO_SUCH_PATH),
    }
}

/// True if a client takes plain text and no OpenMetrics.
fn wants_plain_text(headers: &HeaderMap) -> bool {
    let (mut takes_plain, mut takes_open) = (false, false);
    for value in headers.get_all(ACCEPT) {
        for kind in value.to_str().unwrap_or_default().split(',') {
            let kind = kind.split(';').next().unwrap_or_default().trim();
            takes_plain |= kind.eq_ignore_ascii_case("text/plain");
            takes_open |= kind.eq_ignore_ascii_case("application/openmetrics-text");
        }
    }
    takes_plain && !takes_open
}

/// Counts the new lines of the journal. If the journal's filesystem hangs, only the figures of the
/// journal are late.
async fn read_journal(served: &Arc<Served>) {
    if let Some(journal) = served.journal.clone() {
        let served = Arc::clone(served);
        let reading = spawn_blocking(move || {
            journal.read_new(|line| served.journaled(line));
        });
        let _ = tokio::time::timeout(JOURNAL_READ_TIMEOUT, reading).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use bindguard_config::Config;

    use super::*;

    /// Any user of the node can bind the address first.
    #[tokio::test(start_paused = true)]
    async fn an_address_of_another_process_is_bound_once_it_is_free() {
        let status = StatusSource::new(&Config::default());
        let squatter = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = squatter.local_addr().unwrap();
        let unserved = || {
            let all = status.status(&Metrics::new(), true).unserved;
            all.into_iter().map(|it| it.address).collect::<Vec<_>>()
        };
        let early = tokio::time::timeout(BIND_INTERVAL * 3, bound(address, None, &status)).await;
        assert!(early.is_err());
        assert_eq!(unserved(), [address]);
        drop(squatter);
        let listener = bound(address, None, &status).await;
        assert_eq!(listener.local_addr().unwrap(), address);
        assert_eq!(unserved(), []);
    }
}
