//! The answers of the server.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Objects;
use super::connection::Request;
use super::kinds::discovered;

/// The behaviour of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conduct {
    /// Answers like a healthy server.
    #[default]
    Serve,
    /// Answers every request with this status.
    Answer(u16),
    /// It reads a request and closes the connection after a minute.
    Hang,
    /// It closes every connection.
    Down,
}

#[derive(Clone, Debug)]
pub struct SeenRequest {
    pub at: Instant,
    pub method: String,
    /// The path, without the query.
    pub path: String,
    /// The header `authorization`.
    pub authorization: String,
}

/// Everything that the server remembers.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) conduct: Conduct,
    pub(super) objects: Objects,
    pub(super) requests: Vec<SeenRequest>,
}

/// Status and body; `None` closes the connection.
pub(super) fn answer(request: &Request, state: &Mutex<State>) -> Option<(u16, Value)> {
    let conduct = {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.requests.push(SeenRequest {
            at: Instant::now(),
            method: request.method.clone(),
            path: request.path.clone(),
            authorization: request.authorization.clone(),
        });
        state.conduct
    };
    match conduct {
        Conduct::Serve => {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            Some(served(request, &mut state.objects))
        }
        Conduct::Answer(code) => Some((code, failure(code, "the story wants it"))),
        Conduct::Hang => {
            thread::sleep(Duration::from_secs(60));
            None
        }
        Conduct::Down => None,
    }
}

fn served(request: &Request, objects: &mut Objects) -> (u16, Value) {
    let path = request.path.as_str();
    match request.method.as_str() {
        "GET" => match discovered(path).or_else(|| objects.get(path).cloned()) {
            Some(found) => (200, found),
            None => (404, failure(404, "NotFound")),
        },
        "POST" => {
            let object: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            let path = format!(
                "{path}/{}",
                object["metadata"]["name"].as_str().unwrap_or_default()
            );
            match objects.contains_key(&path) {
                true => (409, failure(409, "AlreadyExists")),
                false => {
                    objects.insert(path, object.clone());
                    (201, object)
                }
            }
        }
        "PATCH" => match objects.get_mut(path) {
            Some(object) => {
                let patch: Value = serde_json::from_slice(&request.body).unwrap_or_default();
                let version = &patch["metadata"]["resourceVersion"];
                if !version.is_null() && *version != object["metadata"]["resourceVersion"] {
                    return (409, failure(409, "Conflict"));
                }
                // an object that kubectl applies again stays as it is
                if request
                    .content_type
                    .starts_with("application/merge-patch+json")
                {
                    merge(object, patch);
                    bump_version(object);
                }
                (200, object.clone())
            }
            None => (404, failure(404, "NotFound")),
        },
        "DELETE" => match objects.remove(path) {
            Some(object) => (200, object),
            None => (404, failure(404, "NotFound")),
        },
        _ => (405, failure(405, "MethodNotAllowed")),
    }
}

/// Of an object that has a version. A patch with an older version is refused.
fn bump_version(object: &mut Value) {
    if let Some(version) = object["metadata"]["resourceVersion"].as_str() {
        let next = version.parse::<u64>().unwrap_or_default() + 1;
        object["metadata"]["resourceVersion"] = json!(next.to_string());
    }
}

fn failure(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": reason, "reason": reason, "code": code})
}

/// RFC 7386
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(members) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in members {
        match value {
            Value::Null => drop(target.as_object_mut().map(|object| object.remove(&name))),
            value => merge(&mut target[name], value),
        }
    }
}
