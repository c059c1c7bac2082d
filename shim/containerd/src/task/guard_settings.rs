//! The settings of the guard before the runtime: from the node's config, with the changes of the
//! pod's annotations.

use std::io;
use std::path::Path;
use std::time::Duration;

use bindguard_config::{Config, Loaded, load_without_file};
use bindguard_core::annotations::policy_of_pod;
use bindguard_core::error_chain;
use bindguard_core::identity::CONTAINER_TYPE;
use bindguard_core::policy::BelowEmptyDirs;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::blocking::run_blocking;
use crate::bundle::ShimSpec;
use crate::runtime::{GuardSettings, Runtime};

/// The time limit for reading the config: it may be on a server that hangs, and the event loop
/// serves the whole pod.
const READ_LIMIT: Duration = Duration::from_millis(700);

/// A hanging read keeps its thread until the server answers again: the semaphore limits the
/// threads.
static READ_SLOTS: Semaphore = Semaphore::const_new(64);

/// Read for each create and restore, so that a change of the config also affects a pod that runs
/// for months.
pub(super) async fn guard_settings(spec: &ShimSpec) -> GuardSettings {
    let config = active_config().await;
    // The guard itself reports the annotations that are ignored.
    let (policy, _) = policy_of_pod(config.policy(), |name| {
        spec.annotations.get(name).map(String::as_str)
    });
    GuardSettings {
        deadline: config.deadline(),
        policy: policy.into_owned(),
        journal: config.journal().map(Path::to_owned),
    }
}

/// Detaches the mounts below a pod's emptyDirs, if policy wants that and this was the pod's sandbox.
pub(crate) async fn end_pod(runtime: &Runtime, id: &str, spec: &ShimSpec) {
    let kind = spec.annotations.get(CONTAINER_TYPE);
    if kind.is_some_and(|kind| kind == "sandbox")
        && guard_settings(spec).await.policy.below_emptydirs == BelowEmptyDirs::Detach
    {
        runtime.detach_below_emptydirs(id).await;
    }
}

async fn active_config() -> Config {
    let loaded = match timeout(READ_LIMIT, read()).await {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(error)) => load_without_file(error),
        Err(_) => load_without_file(io::Error::other(format!(
            "it did not answer within {READ_LIMIT:?}"
        ))),
    };
    // The guard records the mistakes of a file that is used.
    if let Some(problem) = &loaded.problem {
        tracing::warn!("{}", error_chain(problem));
    }
    loaded.config
}

async fn read() -> io::Result<Loaded> {
    run_blocking(with_slot(&READ_SLOTS, bindguard_config::load)?).await
}

/// The slot belongs to the reading, so that it is free again when the reading ends, panics, or gets
/// no thread.
fn with_slot<T>(
    slots: &'static Semaphore,
    load: fn() -> T,
) -> io::Result<impl FnOnce() -> T + Send + 'static>
where
    T: Send + 'static,
{
    let slot = slots
        .try_acquire()
        .map_err(|_| io::Error::other("so far it has not answered"))?;
    Ok(move || {
        let loaded = load();
        drop(slot);
        loaded
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_config_read_frees_its_slot_however_it_ends() {
        static SLOTS: Semaphore = Semaphore::const_new(1);
        let without_a_thread = with_slot(&SLOTS, || ()).unwrap();
        assert!(
            with_slot(&SLOTS, || ()).is_err(),
            "two readings in one slot"
        );
        drop(without_a_thread);
        assert!(
            run_blocking(with_slot(&SLOTS, || panic!("no config")).unwrap())
                .await
                .is_err()
        );
        run_blocking(with_slot(&SLOTS, || ()).unwrap())
            .await
            .unwrap();
        assert_eq!(SLOTS.available_permits(), 1);
    }
}
