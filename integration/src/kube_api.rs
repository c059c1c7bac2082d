//! As much of a Kubernetes API as `kubectl apply` needs: the kinds, whether an object is there, and taking one.
//!
//! It is not the real one: `config/tests/manifests.rs` checks the fields of an object. What is
//! shown here is that kubectl itself takes the files, and that a command with them ends well.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Group and version, kind, and the plural name of what is namespaced or not.
const KINDS: [(&str, &str, &str, bool); 4] = [
    ("v1", "ConfigMap", "configmaps", true),
    ("v1", "Pod", "pods", true),
    ("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", false),
    ("apps/v1", "DaemonSet", "daemonsets", true),
];

/// The server, which lives as long as the process.
#[derive(Debug)]
pub struct KubeApi {
    address: SocketAddr,
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
}

impl KubeApi {
    /// Starts to listen on this machine alone.
    pub fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listen for kubectl")?;
        let api = Self { address: listener.local_addr()?, objects: Arc::default() };
        let objects = Arc::clone(&api.objects);
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let objects = Arc::clone(&objects);
                // a client that goes away in the middle has its own complaint
                thread::spawn(move || answer_all(connection, &objects));
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

    /// The kinds and names of what was taken.
    pub fn taken(&self) -> Vec<String> {
        let objects = self.objects.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let name = |object: &Value| {
            let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            format!("{} {}", word(&object["kind"]), word(&object["metadata"]["name"]))
        };
        objects.values().map(name).collect()
    }
}

/// A connection's requests, one after the other.
fn answer_all(connection: TcpStream, objects: &Mutex<BTreeMap<String, Value>>) -> Option<()> {
    let mut reader = BufReader::new(connection.try_clone().ok()?);
    let mut writer = connection;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let Some((name, value)) = header.split_once(':') else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let path = target.split('?').next()?;
        let (status, answer) = answer(&method, path, &body, &mut *objects.lock().ok()?);
        let text = answer.to_string();
        write!(
            writer,
            "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{text}",
            text.len()
        )
        .ok()?;
    }
}

fn answer(method: &str, path: &str, body: &[u8], objects: &mut BTreeMap<String, Value>) -> (u16, Value) {
    let group_versions = || KINDS.iter().map(|(version, ..)| *version).filter(|version| version.contains('/'));
    match (method, path) {
        ("GET", "/version") => (200, json!({"major": "1", "minor": "32", "gitVersion": "v1.32.0"})),
        ("GET", "/api") => (200, json!({"kind": "APIVersions", "versions": ["v1"]})),
        ("GET", "/apis") => {
            let groups: Vec<Value> = group_versions().map(group).collect();
            (200, json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ("GET", "/openapi/v3") => {
            let path = |(version, ..): &(&str, &str, &str, bool)| {
                let root = root(version);
                (root[1..].to_owned(), json!({"serverRelativeURL": format!("/openapi/v3{root}")}))
            };
            let paths: serde_json::Map<String, Value> = KINDS.iter().map(path).collect();
            (200, json!({ "paths": paths }))
        }
        ("GET", path) if path.starts_with("/openapi/v3/") => (200, schema(&path["/openapi/v3".len()..])),
        ("GET", path) if KINDS.iter().any(|(version, ..)| path == root(version)) => (200, resources(path)),
        ("GET", path) => match objects.get(path) {
            Some(object) => (200, object.clone()),
            None => (
                404,
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}),
            ),
        },
        ("POST", path) => {
            let object: Value = serde_json::from_slice(body).unwrap_or_default();
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            objects.insert(format!("{path}/{name}"), object.clone());
            (201, object)
        }
        // an object that is there is applied as it is
        ("PATCH", path) => (200, objects.get(path).cloned().unwrap_or_default()),
        _ => (405, json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 405})),
    }
}

fn root(version: &str) -> String {
    format!("/{}/{version}", if version.contains('/') { "apis" } else { "api" })
}

fn group(group_version: &str) -> Value {
    let version = json!({"groupVersion": group_version, "version": "v1"});
    json!({"name": group_version.trim_end_matches("/v1"), "versions": [version], "preferredVersion": version})
}

fn resources(path: &str) -> Value {
    let of = KINDS.iter().filter(|(version, ..)| path == root(version));
    let resource = |(_, kind, plural, namespaced): &(&str, &str, &str, bool)| json!({"name": plural, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": ["get", "create", "patch"]});
    let group_version = path.trim_start_matches("/apis/").trim_start_matches("/api/");
    json!({"kind": "APIResourceList", "groupVersion": group_version, "resources": of.map(resource).collect::<Vec<_>>()})
}

/// The claim that the server validates fields itself: then kubectl leaves it to the server.
fn schema(path: &str) -> Value {
    let of = KINDS.iter().filter(|(version, ..)| path == root(version));
    let paths = of.map(|(version, kind, plural, _)| {
        let kind = json!({"group": version.trim_end_matches("v1").trim_end_matches('/'), "version": "v1", "kind": kind});
        let patch = json!({"parameters": [{"name": "fieldValidation", "in": "query"}], "x-kubernetes-group-version-kind": kind});
        (format!("{}/{plural}/{{name}}", root(version)), json!({ "patch": patch }))
    });
    json!({"openapi": "3.0.0", "info": {"title": "here", "version": "1"}, "paths": paths.collect::<serde_json::Map<_, _>>()})
}
