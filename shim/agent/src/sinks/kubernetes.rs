//! The agent's events, as objects of the API server.
//!
//! In a pod the credentials are those of its service account, else those of a kubeconfig. The agent
//! writes events and patches its own pod. It watches nothing, and reads a pod only for kubediag's
//! processors.

use std::sync::Arc;
use std::time::Duration;

use bindguard_config::{EventMode, KubernetesConfig};
use bindguard_core::error_chain;
use bindguard_kubernetes::{Access, AccessError, ApiClient, ApiError, node_name};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing::warn;

use crate::pods::PodLookup;
use crate::sinks::events::{Event, EventApi, EventWriteError, Events, Recorder};
use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;
use crate::threads::IdleMemory;

// Starts the task that writes events to the API server, if the settings want events and there are
// credentials.

/// Starts the recorder of events.
pub fn start(
    settings: &KubernetesConfig,
    access: &Result<Arc<Access>, AccessError>,
    pods: PodLookup,
    metrics: &Arc<Metrics>,
    journal: JournalWriter,
    memory: IdleMemory,
) -> Reporting {
    let off = Reporting {
        events: Events::off(Arc::clone(metrics)),
        journal,
        memory,
    };
    if settings.events == EventMode::Off {
        return off;
    }
    let access = match access {
        Ok(access) => access,
        Err(error) => {
            warn!("no events are written: {}", error_chain(error));
            return off;
        }
    };
    let node = node_name(settings.node.as_deref());
    let api = ApiEvents {
        client: ApiClient::new(Arc::clone(access)),
        node,
        memory: off.memory.clone(),
    };
    let (events, occurrences) = Events::on(settings.events, Arc::clone(metrics));
    let recorder = Recorder::new(api, pods, settings.event_requests, Arc::clone(metrics));
    tokio::spawn(recorder.run(occurrences));
    Reporting { events, ..off }
}

// Events as objects of the API: created once, then patched (`core/v1`, as the kubelet's recorder
// does).

const COMPONENT: &str = "bindguard-agent";

/// Writes events to the API server.
#[derive(Debug)]
struct ApiEvents {
    client: ApiClient,
    node: String,
    memory: IdleMemory,
}

impl EventApi for ApiEvents {
    async fn write(&mut self, event: &Event) -> Result<u32, EventWriteError> {
        let events = format!("/api/v1/namespaces/{}/events", event.key.namespace);
        let mut patch = json!({ "lastTimestamp": time(event.last), "message": event.message });
        if event.exists {
            patch["count"] = event.count.into();
        } else {
            let object = object(event, &self.node);
            match self.client.create(&events, &object).await {
                Ok(_) => return Ok(event.count),
                // An earlier start of the agent created the object.
                Err(ApiError::Status(status)) if status.code == 409 => {}
                Err(error) => return Err(failure(&error, false)),
            }
        }
        let place = format!("{events}/{}", event.name);
        let patched = self.client.patch(&place, &patch).await;
        let patched = patched.map_err(|error| failure(&error, true))?;
        let patched: Value = serde_json::from_str(&patched).unwrap_or_default();
        let count = patched["count"].as_u64().map(u32::try_from);
        Ok(count.and_then(Result::ok).unwrap_or(event.count))
    }

    fn disconnect(&mut self) {
        self.client.disconnect();
        self.memory.worked();
    }
}

fn object(event: &Event, node: &str) -> Value {
    let reason = event.key.reason;
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "name": event.name, "namespace": event.key.namespace },
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": event.key.namespace,
            "name": event.key.pod,
            "uid": event.key.pod_uid,
        },
        "type": reason.event_type(),
        "reason": reason,
        "message": event.message,
        "count": event.count,
        "firstTimestamp": time(event.first),
        "lastTimestamp": time(event.last),
        "source": { "component": COMPONENT, "host": node },
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    });
    if let Some(container) = &event.key.container {
        object["involvedObject"]["fieldPath"] = format!("spec.containers{{{container}}}").into();
    }
    object
}

/// The API's times have whole seconds.
fn time(since_epoch: Duration) -> Option<String> {
    let seconds = i64::try_from(since_epoch.as_secs()).ok()?;
    OffsetDateTime::from_unix_timestamp(seconds)
        .ok()?
        .format(&Rfc3339)
        .ok()
}

fn failure(error: &ApiError, was_patch: bool) -> EventWriteError {
    let why = error_chain(error);
    let ApiError::Status(status) = error else {
        return EventWriteError::Unavailable { why, pause: None };
    };
    let mut causes = status.details.causes.iter();
    let is_terminating = causes.any(|cause| cause.reason == "NamespaceTerminating");
    match status.code {
        404 if was_patch => EventWriteError::Gone,
        403 if is_terminating => EventWriteError::Refused(why),
        401 | 403 => EventWriteError::Forbidden(why),
        400..=428 | 430..=499 => EventWriteError::Refused(why),
        _ => {
            let seconds = status.details.retry_after_seconds;
            EventWriteError::Unavailable {
                why,
                pause: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
            }
        }
    }
}
