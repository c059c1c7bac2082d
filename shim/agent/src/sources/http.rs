//! `/metrics`, `/healthz` and `/readyz` on an address; these, the reports and kubediag's processors
//! on the unix socket. The processors can have an address of their own.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bindguard_operator::agent_status::{AgentStatus, NriState, STATUS_PATH, UnservedAddress};
use bindguard_sys::make_folders;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::task::{AbortHandle, spawn_blocking, yield_now};
use tokio::time::{Duration, Sleep, sleep, timeout};
use tracing::{info, warn};

use crate::host::bind_on_node;
use crate::limits::time_of;
use crate::sinks::metrics::{Level, plain_text};
use crate::sources::journal::JournalReader;
use crate::sources::kubediag::{self, Kubediag};
use crate::work::Node;
use crate::work::survey::Surveyor;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Prometheus' own format, which is older than OpenMetrics.
const PLAIN_METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

/// Time limit for the head of a request.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause before an address is bound again.
const BIND_INTERVAL: Duration = Duration::from_secs(10);

/// Time limit for the journal.
const JOURNAL_READ_TIMEOUT: Duration = Duration::from_secs(1);

/// The state that requests read.
#[derive(Debug)]
pub struct Served {
    pub node: &'static Node,
    /// The journal, if the agent reads a journal.
    pub journal: Option<JournalReader>,
    pub surveyor: Surveyor,
    /// kubediag's processors.
    pub kubediag: Kubediag,
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
/// `cri` if it is given. Any user of the node may have the address first: the agent tries again, and
/// does its work meanwhile.
pub async fn serve_address(
    address: SocketAddr,
    cri: Option<&'static Path>,
    served: &'static Served,
    audience: Audience,
) {
    let listener = bound(address, cri, served.node).await;
    accept(listener, |stream| converse(stream, served, audience)).await
}

async fn bound(address: SocketAddr, cri: Option<&'static Path>, node: &Node) -> TcpListener {
    loop {
        let bound = bind(address, cri).await;
        let problem = bound.as_ref().err().map(ToString::to_string);
        let is_new = {
            let mut unserved = node.unserved.lock().unwrap_or_else(PoisonError::into_inner);
            let before = match &problem {
                Some(problem) => unserved.insert(address, problem.clone()),
                None => unserved.remove(&address),
            };
            before != problem
        };
        match bound {
            Ok(listener) => {
                if is_new {
                    info!("serving on {address}");
                }
                return listener;
            }
            Err(error) if is_new => {
                warn!("serve on {address}: {error}; trying again every {BIND_INTERVAL:?}");
            }
            Err(_) => {}
        }
        sleep(BIND_INTERVAL).await;
    }
}

async fn bind(address: SocketAddr, cri: Option<&'static Path>) -> io::Result<TcpListener> {
    let Some(cri) = cri else {
        return TcpListener::bind(address).await;
    };
    let bound = spawn_blocking(move || bind_on_node(cri, address)).await;
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
pub async fn serve_socket(socket: &Path, served: &'static Served) -> io::Result<BoundSocket> {
    if let Some(folder) = socket.parent() {
        make_folders(folder, 0o755)?;
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
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
            let Ok((stream, _)) = listener.accept().await else {
                sleep(Duration::from_millis(100)).await;
                continue;
            };
            // A connection may have been made before the socket's mode was set.
            let client = stream.peer_cred().map(|client| client.uid());
            if client.is_ok_and(|uid| uid == 0 || uid == geteuid().as_raw()) {
                tokio::spawn(converse(stream, served, Audience::Local));
            }
        }
    });
    Ok(bound)
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    served: &'static Served,
    scope: Audience,
) {
    let service = service_fn(move |request| async move {
        let (status, kind, body) = answer(request, served, scope).await;
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        let kind = HeaderValue::from_static(kind);
        response.headers_mut().insert(CONTENT_TYPE, kind);
        Ok::<_, Infallible>(response)
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

fn not_found() -> Answer {
    text(StatusCode::NOT_FOUND, "no such path\n")
}

/// The body, or a failure of the server.
fn ok_or_failed(kind: &'static str, body: Result<impl Into<Bytes>, impl Display>) -> Answer {
    match body {
        Ok(body) => (StatusCode::OK, kind, body.into()),
        Err(why) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n")),
    }
}

async fn answer(request: Request<Incoming>, served: &'static Served, scope: Audience) -> Answer {
    if scope != Audience::Public && request.uri().path().starts_with(kubediag::FOLDER) {
        return match served.kubediag.answer(request).await {
            Some((StatusCode::OK, json)) => (StatusCode::OK, JSON, json.into()),
            Some((status, why)) => text(status, why),
            None => not_found(),
        };
    }
    // hyper sends no body in answer to HEAD.
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let why = "only GET and HEAD are supported\n";
        return text(StatusCode::METHOD_NOT_ALLOWED, why);
    }
    let node = served.node;
    let is_ready = node.ready.load(Ordering::Relaxed);
    match (request.uri().path(), scope) {
        ("/healthz", _) => text(StatusCode::OK, "OK\n"),
        (_, Audience::Kubediag) => not_found(),
        ("/readyz", _) => {
            let not_done = (!is_ready).then_some("the first survey is not done");
            match not_done.or(node.ignored_config.as_deref()) {
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
                None => text(StatusCode::OK, "OK\n"),
            }
        }
        ("/metrics", _) => {
            // If the journal's filesystem hangs, only the figures of the journal are late.
            if let Some(journal) = &served.journal {
                let reading = spawn_blocking(|| journal.read_new(|line| node.journaled(line)));
                let _ = timeout(JOURNAL_READ_TIMEOUT, reading).await;
            }
            match node.metrics.text() {
                Ok(figures) if wants_plain_text(request.headers()) => {
                    (StatusCode::OK, PLAIN_METRICS, plain_text(&figures).into())
                }
                figures => ok_or_failed(OPEN_METRICS, figures),
            }
        }
        (STATUS_PATH, Audience::Local) => {
            ok_or_failed(JSON, serde_json::to_string(&status_of(node, is_ready)))
        }
        ("/v1/report", Audience::Local) => {
            let report = match spawn_blocking(|| served.surveyor.json()).await {
                Ok(Ok(json)) => Ok(json),
                Ok(Err(error)) => Err(format!("write the report: {error}")),
                Err(error) => Err(format!("survey the node: {error}")),
            };
            ok_or_failed(JSON, report)
        }
        _ => not_found(),
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

/// The agent's own state, for `bindguard status` and `bindguard doctor`.
fn status_of(node: &Node, ready: bool) -> AgentStatus {
    let (agent, metrics) = (node.config.agent(), node.metrics);
    let last_survey = Duration::try_from_secs_f64(metrics.last_survey.get()).ok();
    let mut unserved = Vec::new();
    for (address, problem) in &*node.unserved.lock().unwrap_or_else(PoisonError::into_inner) {
        unserved.push(UnservedAddress {
            address: *address,
            problem: problem.clone(),
        });
    }
    AgentStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        since: time_of(node.started).unwrap_or_default(),
        ready,
        last_survey: last_survey.filter(|time| !time.is_zero()).and_then(time_of),
        stale_subpaths: node.config.policy().stale_subpaths,
        refresh: agent.refresh,
        nri: match (&agent.nri, metrics[Level::NriConnected].get()) {
            (None, _) => NriState::Off,
            (Some(_), 0) => NriState::Disconnected,
            (Some(_), _) => NriState::Connected,
        },
        kubediag: agent.kubediag.is_some(),
        silent_roots: metrics[Level::AgentSilentRoots].get() as u64,
        unserved,
        hanging_children: metrics.hanging_children.listed(),
    }
}

// Connections of a listener that anyone may reach: clients that never read or never write must not
// block new clients.
//
// A connection has a time limit for each write and a limit for its whole life. When the limit of
// connections is reached, the oldest connection is closed: the kubelet's probe is always accepted.

/// Limit of connections at a time.
const MAX_CONNECTIONS: usize = 32;

/// Time limit for a write: the client reads nothing meanwhile.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a connection. A client that keeps its connection open, as Prometheus does,
/// connects again.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(120);

/// The pause after a failed accept: the process may have no descriptor left.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// Serves each connection of a listener in a task of its own. It never returns.
async fn accept<F>(listener: TcpListener, serve: impl Fn(TimedStream<TcpStream>) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut open = VecDeque::<AbortHandle>::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                open.retain(|connection| !connection.is_finished());
                if open.len() >= MAX_CONNECTIONS {
                    open.pop_front().inspect(AbortHandle::abort);
                }
                let served = timeout(CONNECTION_TIMEOUT, serve(TimedStream::new(stream)));
                open.push_back(tokio::spawn(served).abort_handle());
                // Otherwise a burst of connections could close this connection before its first
                // turn.
                yield_now().await;
            }
            Err(_) => sleep(ACCEPT_INTERVAL).await,
        }
    }
}

/// A stream whose writes have a time limit.
#[derive(Debug)]
struct TimedStream<S> {
    stream: S,
    /// Runs while a write waits for the client.
    limit: Option<Pin<Box<Sleep>>>,
}

impl<S> TimedStream<S> {
    /// A stream that has written nothing yet.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            limit: None,
        }
    }

    fn limited<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.limit = None;
            return written;
        }
        let limit = self
            .limit
            .get_or_insert_with(|| Box::pin(sleep(WRITE_TIMEOUT)));
        limit
            .as_mut()
            .poll(context)
            .map(|()| Err(ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.limited(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limited(context, closed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    /// Any user of the node can bind the address first.
    #[tokio::test(start_paused = true)]
    async fn an_address_of_another_process_is_bound_once_it_is_free() {
        let node = Node::silent("");
        let squatter = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = squatter.local_addr().unwrap();
        let unserved = || {
            let all = status_of(node, true).unserved;
            all.into_iter().map(|it| it.address).collect::<Vec<_>>()
        };
        let early = timeout(BIND_INTERVAL * 3, bound(address, None, node)).await;
        assert!(early.is_err());
        assert_eq!(unserved(), [address]);
        drop(squatter);
        let listener = bound(address, None, node).await;
        assert_eq!(listener.local_addr().unwrap(), address);
        assert_eq!(unserved(), []);
    }
}

#[cfg(test)]
mod connection_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// Longer than a probe needs on a busy machine.
    const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

    /// Clients that send nothing, or read nothing, take all connections.
    #[tokio::test]
    async fn a_probe_is_answered_beside_clients_that_never_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(accept(listener, |mut stream| async move {
            let mut request = [0];
            let _ = stream.read_exact(&mut request).await;
            let _ = stream.write_all(b"OK").await;
        }));
        let mut silent = Vec::new();
        for _ in 0..MAX_CONNECTIONS * 2 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut probe = TcpStream::connect(address).await.unwrap();
        probe.write_all(b"?").await.unwrap();
        let mut answer = String::new();
        probe.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "OK");
        // The oldest connection was closed for a newer connection, and the newest is still open.
        assert!(matches!(silent[0].read(&mut [0]).await, Ok(0) | Err(_)));
        let newest = silent.last_mut().unwrap();
        newest.write_all(b"?").await.unwrap();
        assert_eq!(newest.read(&mut [0; 2]).await.unwrap(), 2);
    }

    /// Clients that connect without a pause. Each new connection closes the oldest connection.
    #[tokio::test]
    async fn a_probe_is_answered_beside_clients_that_connect_in_a_loop() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(accept(listener, |mut stream| async move {
            let mut request = [0];
            let _ = stream.read_exact(&mut request).await;
            let _ = stream.write_all(b"OK").await;
        }));
        let is_over = Arc::new(AtomicBool::new(false));
        let flood = || {
            let (is_over, connected) = (Arc::clone(&is_over), Arc::new(AtomicUsize::new(0)));
            let count = Arc::clone(&connected);
            let client = thread::spawn(move || {
                let mut open = VecDeque::new();
                while !is_over.load(Ordering::Relaxed) {
                    open.extend(std::net::TcpStream::connect(address));
                    count.fetch_add(1, Ordering::Relaxed);
                    if open.len() > 2 * MAX_CONNECTIONS {
                        open.pop_front();
                    }
                }
            });
            (client, connected)
        };
        let floods = [flood(), flood()];
        for (_, connected) in &floods {
            while connected.load(Ordering::Relaxed) <= 2 * MAX_CONNECTIONS {
                sleep(Duration::from_millis(1)).await;
            }
        }
        let mut answered = 0;
        for _ in 0..100 {
            let probe = async {
                let mut probe = TcpStream::connect(address).await?;
                probe.write_all(b"?").await?;
                let mut answer = String::new();
                probe.read_to_string(&mut answer).await.map(|_| answer)
            };
            let answer = timeout(PROBE_TIMEOUT, probe).await;
            answered += u32::from(matches!(answer, Ok(Ok(answer)) if answer == "OK"));
        }
        is_over.store(true, Ordering::Relaxed);
        for (client, _) in floods {
            client.join().unwrap();
        }
        // The kubelet tries a probe three times.
        assert!(answered > 90, "{answered} of 100 probes were answered");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_nobody_reads_ends() {
        let (server, client) = duplex(16);
        let mut server = TimedStream::new(server);
        let error = server.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(client);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_slowly_gets_everything() {
        let (server, mut client) = duplex(16);
        let mut server = TimedStream::new(server);
        let write = tokio::spawn(async move { server.write_all(&[0; 64]).await });
        for _ in 0..4 {
            sleep(WRITE_TIMEOUT / 2).await;
            client.read_exact(&mut [0; 16]).await.unwrap();
        }
        write.await.unwrap().unwrap();
    }
}
