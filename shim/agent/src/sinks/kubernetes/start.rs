//! Starts the task that writes events to the API server, if the settings want events and there are
//! credentials.

use std::sync::Arc;

use bindguard_config::{EventMode, KubernetesConfig};
use bindguard_core::error_chain;
use bindguard_kubernetes::{Access, AccessError, ApiClient, node_name};
use tracing::warn;

use super::event_object::ApiEvents;

use crate::idle_memory::IdleMemory;
use crate::pods::PodLookup;
use crate::sinks::events::{Events, Recorder};
use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;

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
    let api = ApiEvents::new(ApiClient::new(Arc::clone(access)), node, off.memory.clone());
    let (events, occurrences) = Events::on(settings.events, Arc::clone(metrics));
    let recorder = Recorder::new(api, pods, settings.event_requests, Arc::clone(metrics));
    tokio::spawn(recorder.run(occurrences));
    Reporting { events, ..off }
}
