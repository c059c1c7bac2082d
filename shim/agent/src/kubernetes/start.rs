//! Starts the tasks that write to the API server, as far as the settings want them and there are
//! credentials.

use std::path::Path;
use std::sync::Arc;

use bindguard_config::{EventMode, KubernetesConfig};
use bindguard_core::error_chain;
use tracing::warn;

use super::access::{Access, AccessError};
use super::client::ApiClient;
use super::event_object::ApiEvents;
use super::node_name;
use crate::events::{Events, Recorder};
use crate::idle_memory::IdleMemory;
use crate::journal::JournalWriter;
use crate::metrics::Metrics;
use crate::node_state::{OwnPod, Publisher, StateSink};
use crate::pods::Cri;
use crate::reporting::Reporting;

/// Starts the recorder of events and the publisher of the node's state.
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
        state: StateSink::off(),
        journal,
        memory,
    };
    if settings.events == EventMode::Off && !settings.node_state {
        return off;
    }
    let access = match access {
        Ok(access) => access,
        Err(error) => {
            warn!(
                "neither events nor the node's state are written: {}",
                error_chain(error)
            );
            return off;
        }
    };
    let memory = &off.memory;
    let events = start_events(settings, access, cri, metrics, memory);
    let state = if settings.node_state {
        start_state(access, cri, memory)
    } else {
        StateSink::off()
    };
    Reporting {
        events,
        state,
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
    if settings.events == EventMode::Off {
        return Events::off(Arc::clone(metrics));
    }
    let node = node_name(settings.node.as_deref());
    let api = ApiEvents::new(ApiClient::new(Arc::clone(access)), node, memory.clone());
    let (events, occurrences) = Events::on(settings.events, Arc::clone(metrics));
    let recorder = Recorder::new(
        api,
        Cri::of(cri),
        settings.event_requests,
        Arc::clone(metrics),
    );
    tokio::spawn(recorder.run(occurrences));
    events
}

fn start_state(access: &Arc<Access>, cri: &Path, memory: &IdleMemory) -> StateSink {
    let Some(pod) = OwnPod::of_environment(ApiClient::new(Arc::clone(access))) else {
        warn!(
            "the node's state is not written: POD_NAMESPACE and POD_NAME do not name the agent's pod"
        );
        return StateSink::off();
    };
    let (sink, states) = StateSink::on();
    tokio::spawn(Publisher::new(pod).run(states, Cri::of(cri), memory.clone()));
    sink
}
