//! `bindguard-agent annotate-pod`: annotates the pod of this process with the state that a command
//! prints.
//!
//! The installer's pod runs it beside `bindguard install --stay`, with `bindguard status --json`.
//! So the command line of bindguard needs no client of the API server.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use crate::args::AnnotatePod;
use crate::kubernetes::{Access, ApiClient, ServiceAccount};
use crate::node_state::{Annotations, OwnPod, Publisher, from_status};

impl AnnotatePod {
    /// Runs until a signal ends it.
    ///
    /// # Errors
    /// If there is no service account, or the environment does not name the pod.
    pub fn run(&self) -> Result<()> {
        let access =
            Access::choose(None, ServiceAccount::of_this_pod()).context("reach the API server")?;
        let pod = OwnPod::of_environment(ApiClient::new(Arc::new(access)));
        let pod =
            pod.context("find the own pod: POD_NAMESPACE and POD_NAME are not set; set them by the downward API")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start tokio")?;
        runtime.block_on(self.publish(Publisher::new(pod)))
    }

    async fn publish(&self, mut publisher: Publisher<OwnPod>) -> Result<()> {
        let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
        loop {
            tokio::select! {
                () = self.publish_once(&mut publisher) => {}
                _ = terminate.recv() => return Ok(()),
            }
        }
    }

    /// Runs the command, publishes its state, and waits for the next time.
    async fn publish_once(&self, publisher: &mut Publisher<OwnPod>) {
        let next = Instant::now() + Duration::from_secs(self.every);
        let words = self.command.clone();
        let state = tokio::task::spawn_blocking(move || state_of(&words)).await;
        match state.context("run the command").and_then(|state| state) {
            Ok(state) => {
                sleep_until(publisher.earliest()).await;
                publisher.publish(state).await;
            }
            Err(error) => warn!("{error:#}"),
        }
        sleep_until(next).await;
    }
}

/// The state that the command prints. Its exit status only reports problems of the node.
fn state_of(words: &[String]) -> Result<Annotations> {
    let (program, arguments) = words.split_first().context("no command")?;
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output();
    let output = output.with_context(|| format!("run {program}"))?;
    let status: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("read the output of {program}"))?;
    from_status(&status).with_context(|| format!("the output of {program} is no status"))
}
