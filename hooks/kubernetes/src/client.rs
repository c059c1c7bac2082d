//! A client of the API server: single requests with JSON, no retries, a single connection.
//!
//! It connects for the first request, and anew after a failure. Credentials may lie below a kubelet
//! root that hangs: threads of tokio's pool read them, and the time limit of a request includes the
//! wait for them.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, USER_AGENT};
use hyper::http::request::Builder;
use hyper::{Method, Request, Uri};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::client::Resumption;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::timeout;

use crate::credentials::{Access, Credentials, Failure, Token};

/// An idle connection is closed after this time: its server may need the room.
const IDLE: Duration = Duration::from_secs(20);

const CONNECT: Duration = Duration::from_secs(5);

/// Time limit of one request, its connection and credentials included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The limit of an answer: the API server's own limit of an object.
const MAX_ANSWER: usize = 3 << 20;

const USER: &str = concat!("bindguard/", env!("CARGO_PKG_VERSION"));

/// Why a request had no result.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The API server answered with an error.
    #[error("{}", .0.message)]
    Status(Box<Status>),
    /// There was no answer.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// `Status` of `meta/v1`, as far as it is used.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    pub code: u16,
    pub message: String,
    pub details: StatusDetails,
}

/// `StatusDetails` of `meta/v1`, as far as it is used.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StatusDetails {
    /// The pause before the next request.
    pub retry_after_seconds: u32,
    pub causes: Vec<StatusCause>,
}

/// `StatusCause` of `meta/v1`, as far as it is used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StatusCause {
    pub reason: String,
}

/// A client that connects at its first request.
#[derive(Debug)]
pub struct ApiClient {
    access: Arc<Access>,
    credentials: FileRead<Result<Credentials, Failure>>,
    token: FileRead<Result<String, Failure>>,
    connected: Option<Connected>,
}

#[derive(Debug)]
struct Connected {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    server: Uri,
    token: Option<Arc<Token>>,
}

/// A read of files in a thread that a kubelet root may block. The next request waits for the same
/// read: further requests block no further threads.
#[derive(Debug)]
struct FileRead<T>(Option<JoinHandle<T>>);

impl<T: Send + 'static> FileRead<T> {
    async fn done(&mut self, read: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
        let done = self.0.get_or_insert_with(|| spawn_blocking(read)).await;
        self.0 = None;
        done
    }
}

impl ApiClient {
    /// A client that has not connected.
    pub fn new(access: Arc<Access>) -> Self {
        Self {
            access,
            credentials: FileRead(None),
            token: FileRead(None),
            connected: None,
        }
    }

    /// Gets the JSON of an object.
    ///
    /// # Errors
    /// If there is no answer, or it is an error.
    pub async fn get(&mut self, path: &str) -> Result<String, ApiError> {
        self.request(Method::GET, path, String::new()).await
    }

    /// Creates an object.
    ///
    /// # Errors
    /// If there is no answer, or it is an error.
    pub async fn create(
        &mut self,
        path: &str,
        object: &serde_json::Value,
    ) -> Result<String, ApiError> {
        self.request(Method::POST, path, object.to_string()).await
    }

    /// Changes an object by a merge patch (RFC 7386).
    ///
    /// # Errors
    /// If there is no answer, or it is an error.
    pub async fn patch(
        &mut self,
        path: &str,
        patch: &serde_json::Value,
    ) -> Result<String, ApiError> {
        self.request(Method::PATCH, path, patch.to_string()).await
    }

    /// Closes the connection. Its buffers, authorities and keys are several hundred KiB. The next
    /// request connects again, with the credentials of that time.
    pub fn disconnect(&mut self) {
        self.connected = None;
    }

    async fn request(
        &mut self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<String, ApiError> {
        let kind = match method {
            Method::PATCH => "application/merge-patch+json",
            _ => "application/json",
        };
        let request = Request::builder()
            .method(method)
            .header(USER_AGENT, USER)
            .header(CONTENT_TYPE, kind);
        let answer = timeout(REQUEST_TIMEOUT, self.answer(request, path, body)).await;
        let answered = answer
            .unwrap_or_else(|_| Err(Failure::new("the API server does not answer in time").into()));
        match &answered {
            Ok(_) => {}
            Err(ApiError::Status(status)) if status.code != 401 => {}
            // The credentials may have been replaced.
            Err(_) => self.disconnect(),
        }
        answered
    }

    async fn answer(
        &mut self,
        mut request: Builder,
        path: &str,
        body: String,
    ) -> Result<String, ApiError> {
        let connected = match self.connected.take() {
            Some(connected) => connected,
            None => {
                let access = Arc::clone(&self.access);
                let credentials = self.credentials.done(move || access.credentials());
                let credentials = credentials.await;
                Connected::new(credentials.map_err(Failure::of("read the credentials"))??)?
            }
        };
        let connected = self.connected.insert(connected);
        if let Some(token) = connected.token.clone() {
            let token = self.token.done(move || token.read()).await;
            let token = token.map_err(Failure::of("read the credentials"))?;
            let token = token.map_err(Failure::of("read the token"))?;
            let mut value = HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(Failure::of("build a request"))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let server = &connected.server;
        let prefix = server.path().trim_end_matches('/');
        let scheme = server.scheme_str().unwrap_or("https");
        let authority = server
            .authority()
            .map_or("", |authority| authority.as_str());
        let request = request
            .uri(format!("{scheme}://{authority}{prefix}{path}"))
            .body(Full::from(body))
            .map_err(Failure::of("build a request"))?;
        let answer = connected.client.request(request).await;
        let answer = answer.map_err(Failure::of("send a request"))?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await;
        let body = body.map_err(Failure::of("read the answer"))?;
        let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
        if head.status.is_success() {
            return Ok(text);
        }
        let mut status = serde_json::from_str::<Status>(&text).unwrap_or_default();
        status.code = head.status.as_u16();
        if status.message.is_empty() {
            status.message = head.status.to_string();
        }
        Err(ApiError::Status(Box::new(status)))
    }
}

impl Connected {
    fn new(credentials: Credentials) -> Result<Self, Failure> {
        if credentials.token.is_some() && is_readable_on_the_way(&credentials.server) {
            // Everyone on the way could read the token.
            return Err(Failure::new(format!(
                "{} has no TLS, and would get a token; set an https server",
                credentials.server
            )));
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(credentials.authorities);
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(Failure::of("prepare TLS"))?
            .with_root_certificates(roots);
        let mut config = match credentials.identity {
            Some((chain, key)) => config
                .with_client_auth_cert(chain, key)
                .map_err(Failure::of("prepare TLS"))?,
            None => config.with_no_client_auth(),
        };
        // Its room for 256 sessions would go with the connection, before any session is resumed.
        config.resumption = Resumption::disabled();
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(CONNECT));
        let mut https = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_or_http();
        if let Some(name) = credentials.server_name {
            let name = ServerName::try_from(name).map_err(Failure::of("read tls-server-name"))?;
            https = https.with_server_name_resolver(FixedServerNameResolver::new(name));
        }
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .pool_idle_timeout(IDLE)
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(1);
        let client = builder.build(https.enable_http1().wrap_connector(http));
        Ok(Self {
            client,
            server: credentials.server,
            token: credentials.token.map(Arc::new),
        })
    }
}

/// True for plain HTTP to another machine.
fn is_readable_on_the_way(server: &Uri) -> bool {
    let host = server.host().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let address = host.parse::<IpAddr>();
    let is_loopback = host == "localhost" || address.is_ok_and(|address| address.is_loopback());
    server.scheme_str() == Some("http") && !is_loopback
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use tokio::net::TcpListener;

    use super::*;

    fn client(folder: &Path, server: &str, user: &str) -> ApiClient {
        let path = folder.join("kubelet.conf");
        let text = format!(
            "current-context: c\n\
             contexts:\n- name: c\n  context: {{ cluster: k, user: u }}\n\
             clusters:\n- name: k\n  cluster: {{ server: '{server}' }}\n\
             users:\n- name: u\n  user: {user}\n"
        );
        fs::write(&path, text).unwrap();
        ApiClient::new(Arc::new(Access::Kubeconfig(path)))
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_hangs_ends_a_request() {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let mut client = client(folder.path(), &server, "{}");
        let (answer, _stream) = tokio::join!(client.get("/"), listener.accept());
        let error = answer.unwrap_err().to_string();
        assert_eq!(error, "the API server does not answer in time");
    }

    /// The client certificate of a kubelet lies below its root, and the root may hang.
    #[tokio::test]
    async fn a_read_of_credentials_that_hangs_does_not_block_other_tasks() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("token");
        assert!(
            Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        let mut client = client(folder.path(), "http://127.0.0.1:1", "{ tokenFile: token }");
        let limit = Duration::from_millis(50);
        assert!(timeout(limit, client.get("/")).await.is_err());
        assert!(timeout(limit, client.get("/")).await.is_err());
        // The one reader gets the token.
        fs::write(&pipe, "text").unwrap();
        let answer = client.get("/").await;
        assert_eq!(answer.unwrap_err().to_string(), "send a request");
    }

    #[tokio::test]
    async fn no_token_is_sent_without_tls() {
        let folder = tempfile::tempdir().unwrap();
        for server in [
            "http://192.0.2.1:80",
            "http://api:80",
            "http://[2001:db8::1]:80",
        ] {
            let mut client = client(folder.path(), server, "{ token: text }");
            let answer = client.get("/").await;
            let error = answer.unwrap_err().to_string();
            assert!(error.ends_with(" has no TLS, and would get a token; set an https server"));
        }
        for server in [
            "https://192.0.2.1",
            "192.0.2.1:443",
            "http://127.0.0.1:80",
            "http://[::1]:80",
            "http://localhost",
        ] {
            assert!(
                !is_readable_on_the_way(&server.parse().unwrap()),
                "{server}"
            );
        }
    }
}
