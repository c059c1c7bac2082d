//! As much of a Kubernetes API as `kubectl apply` and the node agent need: list the kinds, get,
//! create, change and delete an object. The server can also be slow, refuse, fail, or be down.
//!
//! A real API server also checks the fields of an object: see `config/tests/it/manifests.rs`. This
//! server shows that the clients accept the answers.

mod conduct;
mod connection;
mod kinds;
mod tls;

use std::collections::BTreeMap;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

use self::conduct::{State, answer};
use self::connection::serve;
use self::tls::Tls;

pub use self::conduct::{Conduct, SeenRequest};

/// The server, which lives as long as the process.
#[derive(Debug)]
pub struct KubeApi {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    tls: Option<Arc<Tls>>,
}

impl KubeApi {
    /// Starts to listen on this machine alone.
    pub fn start() -> Result<Self> {
        Self::listen(None)
    }

    /// The same with TLS, as a pod reaches the API server.
    pub fn start_with_tls() -> Result<Self> {
        Self::listen(Some(Arc::new(Tls::new()?)))
    }

    fn listen(tls: Option<Arc<Tls>>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listen for clients of the API")?;
        let api = Self {
            address: listener.local_addr()?,
            state: Arc::default(),
            tls,
        };
        let (state, tls) = (Arc::clone(&api.state), api.tls.clone());
        thread::spawn(move || {
            // a thread that shares the story's file system context would keep the story in its
            // mount namespace
            let _ = unshare(CloneFlags::CLONE_FS);
            for connection in listener.incoming().flatten() {
                let (state, tls) = (Arc::clone(&state), tls.clone());
                // a client that goes away in the middle has its own complaint
                thread::spawn(move || talk(connection, tls.as_deref(), &state));
            }
        });
        Ok(api)
    }

    /// Writes a kubeconfig that leads here.
    pub fn write_config(&self, path: &Path) -> Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": format!("http://{}", self.address)}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "tester"}}],
            "users": [{"name": "tester", "user": {}}],
        });
        fs::write(path, config.to_string()).with_context(|| format!("write {}", path.display()))
    }

    /// The address, for the environment of a pod.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The certificate that a pod has as `ca.crt`.
    pub fn certificate(&self) -> &str {
        self.tls.as_ref().map_or("", |tls| tls.certificate())
    }

    /// Sets the server's conduct for the next requests.
    pub fn behave(&self, conduct: Conduct) {
        self.state().conduct = conduct;
    }

    /// Puts an object at a path.
    pub fn insert(&self, path: &str, object: Value) {
        self.state().objects.insert(path.to_owned(), object);
    }

    /// The object at a path.
    pub fn object(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    /// The events that it has.
    pub fn events(&self) -> Vec<Value> {
        let state = self.state();
        let events = state
            .objects
            .iter()
            .filter(|(path, _)| path.contains("/events/"));
        events.map(|(_, object)| object.clone()).collect()
    }

    pub fn requests(&self) -> Vec<SeenRequest> {
        self.state().requests.clone()
    }

    /// The kinds and names of what was taken.
    pub fn taken(&self) -> Vec<String> {
        let name = |object: &Value| {
            let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            format!(
                "{} {}",
                word(&object["kind"]),
                word(&object["metadata"]["name"])
            )
        };
        self.state().objects.values().map(name).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn talk(connection: TcpStream, tls: Option<&Tls>, state: &Mutex<State>) -> Option<()> {
    let answer = |request: &connection::Request| answer(request, state);
    match tls {
        Some(tls) => serve(tls.accept(connection)?, answer),
        None => serve(connection, answer),
    }
}

/// The objects that a server has, by their paths.
type Objects = BTreeMap<String, Value>;
