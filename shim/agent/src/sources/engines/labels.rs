//! The requests of containers: annotations in the spec, or labels of the container engine.
//!
//! No engine writes labels to the spec. Annotations need no engine to run, and are checked first.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bindguard_core::refresh_request::{
    NOTIFY_LABEL, REFRESH_BINDS_LABEL, REFRESH_LABEL, RefreshRequest,
};
use bindguard_core::spec::SpecView;
use bindguard_operator::engines::Engine;
use bindguard_operator::unix_http;
use serde::Deserialize;

/// `filters={"label":["bindguard.refresh"]}` in the form of a URL, and the same filter for
/// `bindguard.refresh-binds`. A filter with two labels lists only containers that have each of
/// them.
const LABELLED: [&str; 2] = [
    "/containers/json?filters=%7B%22label%22%3A%5B%22bindguard.refresh%22%5D%7D",
    "/containers/json?filters=%7B%22label%22%3A%5B%22bindguard.refresh-binds%22%5D%7D",
];

/// A running container with the label, as `GET /containers/json` lists it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct EngineContainer {
    id: String,
    #[serde(default)]
    names: Vec<String>,
    #[serde(default)]
    labels: OwnLabels,
}

/// The labels that bindguard reads. An image can have a hundred thousand others.
#[derive(Debug, Default, Deserialize)]
struct OwnLabels {
    #[serde(rename = "bindguard.refresh")]
    refresh: Option<String>,
    #[serde(rename = "bindguard.refresh-binds")]
    binds: Option<String>,
    #[serde(rename = "bindguard.refresh-notify")]
    notify: Option<String>,
}

#[derive(Debug)]
pub struct Labelled {
    pub name: Option<String>,
    pub request: RefreshRequest,
}

/// The containers with the label, by id. None if the engine has no socket: Podman has one only if
/// it was enabled.
pub fn labelled(root: &Path, engine: Engine) -> Result<HashMap<String, Labelled>> {
    let Some(socket) = socket(root, engine) else {
        return Ok(HashMap::new());
    };
    let mut labelled = HashMap::new();
    for path in LABELLED {
        let text = unix_http::get(&socket, path)?;
        let answer: Vec<EngineContainer> = serde_json::from_str(&text)
            .with_context(|| format!("parse the answer of {}", socket.display()))?;
        for EngineContainer { id, names, labels } in answer {
            let name = names.first();
            let name = name.map(|name| name.trim_start_matches('/').to_owned());
            let request = RefreshRequest::from_labels(|label| match label {
                REFRESH_LABEL => labels.refresh.as_deref(),
                REFRESH_BINDS_LABEL => labels.binds.as_deref(),
                NOTIFY_LABEL => labels.notify.as_deref(),
                _ => None,
            });
            labelled.insert(id, Labelled { name, request });
        }
    }
    Ok(labelled)
}

/// The request in the annotations of a spec, if there is one.
pub fn annotated(spec: &SpecView<'_>) -> Option<RefreshRequest> {
    let request = RefreshRequest::from_labels(|name| spec.annotation(name));
    (!request.is_none() || !request.problems.is_empty()).then_some(request)
}

fn socket(root: &Path, engine: Engine) -> Option<PathBuf> {
    let socket = root.join(match engine {
        Engine::Docker => "run/docker.sock",
        Engine::Podman => "run/podman/podman.sock",
    });
    socket.symlink_metadata().is_ok().then_some(socket)
}
