//! The server's self-signed certificate.

use std::net::TcpStream;
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// The server's side of TLS.
#[derive(Debug)]
pub(super) struct Tls {
    config: Arc<ServerConfig>,
    certificate: String,
}

impl Tls {
    /// With a new certificate for this machine's loopback address.
    pub(super) fn new() -> Result<Self> {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])
            .context("make a certificate")?;
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .context("choose versions of TLS")?
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .context("use the certificate")?;
        Ok(Self {
            config: Arc::new(config),
            certificate: made.cert.pem(),
        })
    }

    pub(super) fn certificate(&self) -> &str {
        &self.certificate
    }

    pub(super) fn accept(
        &self,
        stream: TcpStream,
    ) -> Option<StreamOwned<ServerConnection, TcpStream>> {
        Some(StreamOwned::new(
            ServerConnection::new(Arc::clone(&self.config)).ok()?,
            stream,
        ))
    }
}
