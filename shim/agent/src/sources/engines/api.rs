//! A GET of an engine's API over its unix socket. Docker and Podman have the same API.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

/// Time limit of a query.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit of an answer: a list of a thousand containers has about 2 MiB.
const MAX_ANSWER: usize = 16 << 20;

/// Why an engine gave no answer.
#[derive(Debug, thiserror::Error)]
#[error("query {}", socket.display())]
pub struct EngineError {
    /// Its socket.
    pub socket: PathBuf,
    /// The reason.
    #[source]
    pub source: QueryError,
}

/// The part of a query that failed.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// There is no connection.
    #[error("connect")]
    Connect(#[source] io::Error),
    /// HTTP failed.
    #[error("send the request")]
    Http(#[from] hyper::Error),
    /// The request is invalid.
    #[error("make the request")]
    Request(#[from] hyper::http::Error),
    /// The status of the answer is not 200.
    #[error("the answer has status {0}")]
    Status(StatusCode),
    /// The body ended early, or is too large.
    #[error("read the answer")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// It is no such JSON.
    #[error("read the answer as JSON")]
    Json(#[from] serde_json::Error),
    /// It took too long.
    #[error("no answer within {} s", REQUEST_TIMEOUT.as_secs())]
    Silent,
}

/// The answer to a query. It blocks, for at most [`REQUEST_TIMEOUT`].
pub fn get<A: serde::de::DeserializeOwned>(socket: &Path, path: &str) -> Result<A, EngineError> {
    let failed = |source| EngineError {
        socket: socket.to_owned(),
        source,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| failed(QueryError::Connect(error)))?;
    // The timer needs the runtime when it is made.
    let answer = runtime
        .block_on(async { tokio::time::timeout(REQUEST_TIMEOUT, query(socket, path)).await });
    let bytes = answer.unwrap_or(Err(QueryError::Silent)).map_err(failed)?;
    serde_json::from_slice(&bytes).map_err(|error| failed(error.into()))
}

async fn query(socket: &Path, path: &str) -> Result<Bytes, QueryError> {
    let stream = UnixStream::connect(socket)
        .await
        .map_err(QueryError::Connect)?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    // This task drives the connection; the task ends with the tokio runtime.
    tokio::spawn(connection);
    let request = Request::get(path)
        .header(header::HOST, "localhost")
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    match response.status() {
        StatusCode::OK => {
            let body = Limited::new(response.into_body(), MAX_ANSWER)
                .collect()
                .await
                .map_err(QueryError::Body)?;
            Ok(body.to_bytes())
        }
        status => Err(QueryError::Status(status)),
    }
}
