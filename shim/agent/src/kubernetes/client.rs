//! A connection to the API server, made for the first request and again after a failure.
//!
//! The stack is smaller than kube's own: no retries, no traces of requests, one connection.

use std::sync::Arc;
use std::time::Duration;

use bindguard_core::error_chain;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::{Body, ConfigExt};
use kube::core::Status;
use tower::{BoxError, ServiceBuilder};

use super::access::{Access, AccessError};

/// An idle connection is closed after this time: its server may need the room, and no timer of the agent shall wait longer.
const IDLE: Duration = Duration::from_secs(20);

const CONNECT: Duration = Duration::from_secs(5);

/// Why a request had no result.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// There are no credentials.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The API server answered with an error.
    #[error("{}", .0.message)]
    Status(Box<Status>),
    /// It did not answer.
    #[error(transparent)]
    Request(kube::Error),
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Status(status),
            error => Self::Request(error),
        }
    }
}

impl ApiError {
    /// The reason in one line.
    pub fn for_people(&self) -> String {
        error_chain(self)
    }
}

/// A client that connects when it is used.
pub struct ApiClient {
    access: Arc<Access>,
    client: Option<Client>,
}

impl ApiClient {
    /// A client that has not connected.
    pub fn new(access: Arc<Access>) -> Self {
        Self { access, client: None }
    }

    /// The client for the next request.
    ///
    /// # Errors
    /// If there are no credentials.
    pub async fn get(&mut self) -> Result<Client, ApiError> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        let client = connect(&self.access).await?;
        self.client = Some(client.clone());
        Ok(client)
    }

    /// Forgets the client after a failure: its credentials may have been replaced.
    pub fn forget(&mut self) {
        self.client = None;
    }
}

async fn connect(access: &Access) -> Result<Client, ApiError> {
    let config = access.config().await?;
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_connect_timeout(Some(CONNECT));
    let https = config.rustls_https_connector_with_connector(http)?;
    let mut builder = HttpClient::builder(TokioExecutor::new());
    builder.pool_idle_timeout(IDLE).pool_timer(hyper_util::rt::TokioTimer::new()).pool_max_idle_per_host(1);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(builder.build::<_, Body>(https));
    Ok(Client::new(service, config.default_namespace))
}
