//! How long the guard may take, as the node's config says it.

use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bindguard_config::{Config, Loaded};
use tokio::time::timeout;

use crate::{aside::aside, causes::with_causes};

/// How long the config may take to be read: it can lie on a server that hangs, and the event loop serves the whole pod.
const PATIENCE: Duration = Duration::from_millis(700);

/// A reading that hangs keeps its thread until the server comes back: with so many there is no other.
const MOST_READINGS: usize = 64;

static READINGS: AtomicUsize = AtomicUsize::new(0);

/// The deadline, read for each create and restore, so that a pod that runs for months sees a change of the config.
pub(super) async fn guard_deadline() -> Duration {
    let config = match timeout(PATIENCE, read()).await {
        Ok(Ok(Loaded { config, problem: None })) => return config.deadline(),
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
    };
    config.deadline()
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
