//! Events as objects of the API: created once, then patched (`core/v1`, as the kubelet's recorder does).

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event as EventObject, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::Status;
use serde_json::json;

use super::client::{ApiClient, ApiError};
use crate::events::{Event, EventApi, WriteError};

const COMPONENT: &str = "bindguard-agent";

/// Writes events to the API server.
pub struct ApiEvents {
    client: ApiClient,
    node: String,
}

impl ApiEvents {
    /// A writer of this node's events.
    pub fn new(client: ApiClient, node: String) -> Self {
        Self { client, node }
    }

    async fn request(&mut self, event: &Event) -> Result<(), ApiError> {
        let api: Api<EventObject> = Api::namespaced(self.client.get().await?, &event.pod.namespace);
        if event.exists {
            let patch = json!({ "count": event.count, "lastTimestamp": time(event.last), "message": event.message });
            api.patch(&event.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        } else {
            api.create(&PostParams::default(), &object(event, &self.node)).await?;
        }
        Ok(())
    }
}

impl EventApi for ApiEvents {
    async fn write(&mut self, event: &Event) -> Result<(), WriteError> {
        let written = self.request(event).await.map_err(|error| failure(&error, event.exists));
        if matches!(written, Err(WriteError::Unavailable { .. } | WriteError::Forbidden(_))) {
            self.client.forget();
        }
        written
    }
}

fn object(event: &Event, node: &str) -> EventObject {
    let reason = event.key.reason;
    let container = event.key.container.as_ref();
    EventObject {
        metadata: ObjectMeta {
            name: Some(event.name.clone()),
            namespace: Some(event.pod.namespace.clone()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(event.pod.namespace.clone()),
            name: Some(event.pod.name.clone()),
            uid: Some(event.pod.uid.clone()),
            field_path: container.map(|container| format!("spec.containers{{{container}}}")),
            ..ObjectReference::default()
        },
        type_: Some(reason.event_type().as_str().to_owned()),
        reason: Some(reason.as_str().to_owned()),
        message: Some(event.message.clone()),
        count: i32::try_from(event.count).ok(),
        first_timestamp: Some(time(event.first)),
        last_timestamp: Some(time(event.last)),
        source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: Some(node.to_owned()) }),
        reporting_component: Some(COMPONENT.to_owned()),
        reporting_instance: Some(node.to_owned()),
        ..EventObject::default()
    }
}

/// The API's times have whole seconds.
fn time(since_epoch: Duration) -> Time {
    let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
    Time(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX))
}

fn failure(error: &ApiError, was_patch: bool) -> WriteError {
    let why = error.for_people();
    let ApiError::Status(status) = error else { return WriteError::Unavailable { why, pause: None } };
    match status.code {
        404 if was_patch => WriteError::Gone,
        409 if !was_patch => WriteError::Exists,
        403 if has_cause(status, "NamespaceTerminating") => WriteError::Refused(why),
        401 | 403 => WriteError::Forbidden(why),
        400..=428 | 430..=499 => WriteError::Refused(why),
        _ => {
            let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
            WriteError::Unavailable { why, pause: (seconds > 0).then(|| Duration::from_secs(seconds.into())) }
        }
    }
}

fn has_cause(status: &Status, reason: &str) -> bool {
    status.details.as_ref().is_some_and(|details| details.causes.iter().any(|cause| cause.reason == reason))
}
