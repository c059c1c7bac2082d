//! Starts the task that writes events to the API server, if the settings want events and there are
//! credentials.

use std::path::Path;
use std::sync::Arc;

use bindguard_config::{EventMode, KubernetesConfig};
use bindguard_core::error_chain;
use bindguard_kubernetes::{Access, AccessError, ApiClient, node_name};
use tracing::warn;

use super::event_object::ApiEvents;

use crate::idle_memory::IdleMemory;
use crate::pods;
use crate::sinks::events::{Events, Recorder};
use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;

/// Starts the recorder of events.
pub fn start(
    settings: &KubernetesConfig,
    access: &Result<Arc<Access>, AccessError>,
    cri: &Path,
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
    Reporting {
        events: start_events(settings, access, cri, metrics, &off.memory),
        ..off
    }
}

fn start_events(
    settings: &KubernetesConfig,
    access: &Arc<Access>,
    cri: &Path,
    metrics: &Arc<Metrics>,
    memory: &IdleMemory,
) -> Events {
    let node = node_name(settings.node.as_deref());
    let api = ApiEvents::new(ApiClient::new(Arc::clone(access)), node, memory.clone());
    let (events, occurrences) = Events::on(settings.events, Arc::clone(metrics));
    let recorder = Recorder::new(
        api,
        pods::client(cri),
        settings.event_requests,
        Arc::clone(metrics),
    );
    tokio::spawn(recorder.run(occurrences));
    events
}
