//! `bindguard-agent restart-slot`: the helper of an installer that may restart the node's runtime
//! only while the node has a slot. `bindguard install --restart-slot` runs it.
//!
//! A slot is a Lease of the API server, with the node's name as its holder. A process that ends
//! keeps the slot: only `done`, after the runtime is healthy, frees a slot. A failed restart marks
//! the slot, and the mark stays until an operator removes it.
//!
//! | line on stdin | line on stdout |
//! |---|---|
//! | `take` | `granted`, or `wait` and the reason |
//! | `done`: frees what this node has | `ok`, or `wait` and the reason |
//! | `failed`: marks the slot, and keeps it | `ok`, or `wait` and the reason |

use std::io::{self, BufRead, Write};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::args::RestartSlotArgs;
use bindguard_kubernetes::{Access, ApiClient, ApiError, ServiceAccount, node_name};

/// The annotation of a slot whose holder failed.
const FAILED: &str = "bindguard.io/restart-failed";

const CONFLICT: u16 = 409;

/// `Lease` of `coordination.k8s.io/v1`, as far as it is used.
#[derive(Debug, Deserialize)]
struct Lease {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    resource_version: String,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    holder_identity: Option<String>,
}

impl Lease {
    fn holder(&self) -> Option<&str> {
        let holder = self.spec.holder_identity.as_deref();
        holder.filter(|name| !name.is_empty())
    }

    fn failed(&self) -> Option<&str> {
        self.metadata.annotations.get(FAILED).map(String::as_str)
    }
}

/// The answer to `take`.
#[derive(Debug)]
enum Choice<'l> {
    /// This node has the slot already.
    Own,
    /// The slot is free.
    Free(&'l Lease),
    /// No restart now.
    Wait(String),
}

/// Chooses a slot. A node with a slot goes on, also after failures: the node's runtime may be
/// half-way.
fn choose<'l>(leases: &'l [Lease], node: &str, max_failures: usize) -> Choice<'l> {
    if leases.iter().any(|lease| lease.holder() == Some(node)) {
        return Choice::Own;
    }
    let failed: Vec<&str> = leases.iter().filter_map(Lease::failed).collect();
    if failed.len() >= max_failures {
        return Choice::Wait(format!(
            "the rollout has stopped, the restart failed on {}; remove the annotation {FAILED} of the lease to go on",
            failed.join(", ")
        ));
    }
    let free = leases.iter().find(|lease| lease.holder().is_none());
    free.map_or_else(
        || Choice::Wait("other nodes have every slot".to_owned()),
        Choice::Free,
    )
}

impl RestartSlotArgs {
    /// Answers lines until stdin ends.
    ///
    /// # Errors
    /// If there is no service account, or a stream fails.
    pub fn run(&self) -> Result<()> {
        let mut slots = Slots {
            api: api_of_this_pod()?,
            node: node_name(None),
            arguments: self,
        };
        answer_lines(async |line| slots.answer(line).await)
    }
}

/// A client of the API server with the account of this pod.
///
/// # Errors
/// If there is no service account.
pub fn api_of_this_pod() -> Result<ApiClient> {
    let access = Access::choose(None, ServiceAccount::of_this_pod());
    Ok(ApiClient::new(Arc::new(
        access.context("reach the API server")?,
    )))
}

/// Answers lines until stdin ends: `wait` and the reason after an error.
///
/// # Errors
/// If a stream fails.
pub fn answer_lines(mut answer: impl AsyncFnMut(&str) -> Result<String>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start tokio")?;
    for line in io::stdin().lock().lines() {
        let line = line.context("read stdin")?;
        let answer = runtime
            .block_on(answer(&line))
            .unwrap_or_else(|error| format!("wait {error:#}"));
        let mut out = io::stdout().lock();
        writeln!(out, "{}", answer.replace('\n', " "))
            .and_then(|()| out.flush())
            .context("write stdout")?;
    }
    Ok(())
}

struct Slots<'a> {
    api: ApiClient,
    node: String,
    arguments: &'a RestartSlotArgs,
}

impl Slots<'_> {
    async fn answer(&mut self, line: &str) -> Result<String> {
        let answer = match line {
            "take" => self.take().await,
            "done" => {
                self.end(json!({ "spec": { "holderIdentity": null } }))
                    .await
            }
            "failed" => {
                let node = self.node.clone();
                self.end(json!({ "metadata": { "annotations": { FAILED: node } } }))
                    .await
            }
            other => bail!("read stdin: {other:?} is no request"),
        };
        // A rollout takes hours, and a connection several hundred KiB.
        self.api.disconnect();
        answer
    }

    async fn leases(&mut self) -> Result<Vec<Lease>> {
        let mut leases = Vec::new();
        for name in &self.arguments.leases {
            let path = self.path(name);
            let text = self
                .api
                .get(&path)
                .await
                .with_context(|| format!("get the lease {name}"))?;
            let lease: Lease =
                serde_json::from_str(&text).with_context(|| format!("read the lease {name}"))?;
            leases.push(lease);
        }
        Ok(leases)
    }

    async fn take(&mut self) -> Result<String> {
        let leases = self.leases().await?;
        let lease = match choose(&leases, &self.node, self.arguments.max_failures) {
            Choice::Wait(reason) => return Ok(format!("wait {reason}")),
            Choice::Own => return Ok("granted".to_owned()),
            Choice::Free(lease) => lease,
        };
        let name = &lease.metadata.name;
        // If two nodes patch at once, the API server refuses the second patch because of the
        // version.
        let patch = json!({
            "metadata": { "resourceVersion": lease.metadata.resource_version },
            "spec": { "holderIdentity": self.node },
        });
        match self.patch(name, &patch).await {
            Err(ApiError::Status(status)) if status.code == CONFLICT => {
                Ok("wait another node was faster".to_owned())
            }
            patched => patched
                .with_context(|| format!("take the lease {name}"))
                .map(|()| "granted".to_owned()),
        }
    }

    /// Changes this node's lease; does nothing without a lease.
    async fn end(&mut self, patch: Value) -> Result<String> {
        let leases = self.leases().await?;
        let node = self.node.clone();
        for lease in leases.iter().filter(|lease| lease.holder() == Some(&node)) {
            let name = &lease.metadata.name;
            self.patch(name, &patch)
                .await
                .with_context(|| format!("change the lease {name}"))?;
        }
        Ok("ok".to_owned())
    }

    async fn patch(&mut self, name: &str, patch: &Value) -> Result<(), ApiError> {
        let path = self.path(name);
        self.api.patch(&path, patch).await.map(drop)
    }

    fn path(&self, name: &str) -> String {
        let namespace = &self.arguments.namespace;
        format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(name: &str, holder: Option<&str>, failed: Option<&str>) -> Lease {
        let annotations = failed.map(|node| (FAILED.to_owned(), node.to_owned()));
        Lease {
            metadata: Metadata {
                name: name.to_owned(),
                resource_version: "1".to_owned(),
                annotations: annotations.into_iter().collect(),
            },
            spec: Spec {
                holder_identity: holder.map(str::to_owned),
            },
        }
    }

    #[test]
    fn a_node_gets_a_free_slot_or_its_own() {
        let leases = [lease("a", Some("n1"), None), lease("b", Some(""), None)];
        assert!(matches!(choose(&leases, "n1", 1), Choice::Own));
        assert!(
            matches!(choose(&leases, "n2", 1), Choice::Free(lease) if lease.metadata.name == "b")
        );
        assert!(matches!(choose(&leases[..1], "n2", 1), Choice::Wait(_)));
    }

    #[test]
    fn after_a_failure_only_its_own_node_goes_on() {
        let leases = [lease("a", Some("n1"), Some("n1")), lease("b", None, None)];
        assert!(matches!(choose(&leases, "n1", 1), Choice::Own));
        assert!(matches!(choose(&leases, "n2", 1), Choice::Wait(why) if why.contains("n1")));
        assert!(matches!(choose(&leases, "n2", 2), Choice::Free(_)));
        // a node that recovered frees its slot, and the mark stays for the operator
        let recovered = [lease("a", None, Some("n1")), lease("b", None, None)];
        assert!(matches!(choose(&recovered, "n2", 1), Choice::Wait(_)));
    }
}
