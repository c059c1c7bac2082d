//! The parts of a connection to the API server: address, authorities, client certificate, token.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hyper::Uri;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Everything for a connection.
#[derive(Debug)]
pub(super) struct Credentials {
    pub(super) server: Uri,
    /// The name in the server's certificate, if it is not that of its address.
    pub(super) server_name: Option<String>,
    pub(super) authorities: Vec<CertificateDer<'static>>,
    pub(super) identity: Option<ClientIdentity>,
    pub(super) token: Option<Token>,
}

#[derive(Debug)]
pub(super) struct ClientIdentity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
}

pub(super) enum Token {
    /// As the kubeconfig has it.
    Text(String),
    /// In a file that is read for each request: its owner replaces it.
    File(PathBuf),
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(_) => f.write_str("Text(..)"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

impl Token {
    pub(super) fn read(&self) -> Result<String, ReadError> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::File(path) => Ok(text(path)?.trim().to_owned()),
        }
    }
}

/// Why a part of the credentials is not readable.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("read {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("read the {what} as PEM")]
    Pem {
        what: &'static str,
        /// The parser's error, which never contains the key.
        #[source]
        source: PemError,
    },
}

pub(super) fn bytes(path: &Path) -> Result<Vec<u8>, ReadError> {
    fs::read(path).map_err(|source| ReadError::File {
        path: path.to_owned(),
        source,
    })
}

fn text(path: &Path) -> Result<String, ReadError> {
    fs::read_to_string(path).map_err(|source| ReadError::File {
        path: path.to_owned(),
        source,
    })
}

pub(super) fn certificates(
    pem: &[u8],
    what: &'static str,
) -> Result<Vec<CertificateDer<'static>>, ReadError> {
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|source| ReadError::Pem { what, source })
}

pub(super) fn key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, ReadError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|source| ReadError::Pem {
        what: "client's key",
        source,
    })
}
