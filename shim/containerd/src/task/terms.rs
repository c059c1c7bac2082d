//! On which terms the guard stands before the runtime, as the node's config says it and the pod's annotations.

use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bindguard_config::{Config, Loaded};
use bindguard_core::annotations::policy_of_pod;
use tokio::time::timeout;

use crate::{aside::aside, bundle::SpecView, causes::with_causes, runtime::GuardTerms};

/// How long the config may take to be read: it can lie on a server that hangs, and the event loop serves the whole pod.
const PATIENCE: Duration = Duration::from_millis(700);

/// A reading that hangs keeps its thread until the server comes back: with so many there is no other.
const MOST_READINGS: usize = 64;

static READINGS: AtomicUsize = AtomicUsize::new(0);

/// Read for each create and restore, so that a pod that runs for months sees a change of the config.
pub(super) async fn guard_terms(spec: &SpecView) -> GuardTerms {
    let config = config_in_force().await;
    // What is not followed the guard itself says.
    let (policy, _) = policy_of_pod(config.policy(), |name| spec.annotations.get(name).map(String::as_str));
    GuardTerms { deadline: config.deadline(), policy: policy.into_owned() }
}

async fn config_in_force() -> Config {
    match timeout(PATIENCE, read()).await {
        Ok(Ok(Loaded { config, problem: None })) => config,
        Ok(Ok(Loaded { config, problem: Some(problem) })) => {
            tracing::warn!("the config is not in force, defaults are: {}", with_causes(&problem));
            config
        }
        Ok(Err(error)) => {
            tracing::warn!("the config is not in force, defaults are: {}", with_causes(&error));
            Config::default()
        }
        Err(_) => {
            tracing::warn!("the config is not in force, defaults are: it did not answer within {PATIENCE:?}");
            Config::default()
        }
    }
}

async fn read() -> io::Result<Loaded> {
    if READINGS.load(Ordering::Relaxed) >= MOST_READINGS {
        return Err(io::Error::other("so far it has not answered"));
    }
    READINGS.fetch_add(1, Ordering::Relaxed);
    aside(|| {
        let loaded = bindguard_config::load();
        READINGS.fetch_sub(1, Ordering::Relaxed);
        loaded
    })
    .await
}
