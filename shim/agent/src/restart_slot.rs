//! `bindguard-agent restart-slot`: the helper of an installer that may restart the node's runtime
//! only while the node has a slot. `bindguard install --restart-slot` runs it.
//!
//! A slot is a Lease of the API server, with the node's name as its holder. A process that ends
//! keeps the slot: only `done`, after the runtime is healthy, frees a slot. A failed restart adds the
//! node to a mark of the first slot, and the mark stays until an operator removes it.
//!
//! Thousands of nodes wait at the same time. So a node reads two slots, chosen by its name, and the
//! mark only if a slot is free. A stopped rollout is read every five minutes.
//!
//! | line on stdin | line on stdout |
//! |---|---|
//! | `take` | `granted`, or `wait` and the reason |
//! | `done`: frees what this node has | `ok`, or `wait` and the reason |
//! | `failed`: marks the slot, and keeps it | `ok`, or `wait` and the reason |

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::args::RestartSlotArgs;
use bindguard_kubernetes::{Access, ApiClient, ApiError, ServiceAccount, node_name};

/// The annotation of a slot whose holder failed.
const FAILED: &str = "bindguard.io/restart-failed";

const CONFLICT: u16 = 409;

/// Two, because a lost node keeps its slot until an operator frees it.
const SLOTS_OF_A_NODE: usize = 2;

/// The time for which a stopped rollout is not read again, with up to a half more.
const STOPPED: Duration = Duration::from_secs(300);

/// The tries to add a node to the mark, which other nodes change as well.
const MARK_TRIES: u32 = 5;

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

    /// The nodes in the mark.
    fn failed(&self) -> Vec<&str> {
        let mark = self.metadata.annotations.get(FAILED).map(String::as_str);
        let nodes = mark.unwrap_or_default().split(',');
        nodes.filter(|node| !node.is_empty()).collect()
    }
}

/// Chooses the slot that this node has, or else a free slot. A node with a slot goes on, also after
/// failures: the node's runtime may be half-way.
fn choose<'l>(leases: &'l [Lease], node: &str) -> Option<&'l Lease> {
    let own = leases.iter().find(|lease| lease.holder() == Some(node));
    own.or_else(|| leases.iter().find(|lease| lease.holder().is_none()))
}

/// The slots that a node may take, in a random order: also the node's next process looks for the
/// node's slot among them.
fn slots_of<'n>(node: &str, names: &'n [String]) -> Vec<&'n str> {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    let mut random = fastrand::Rng::with_seed(hasher.finish());
    let all = names.iter().map(String::as_str);
    let mut slots = random.choose_multiple(all, SLOTS_OF_A_NODE);
    fastrand::shuffle(&mut slots);
    slots
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
            stopped: None,
        };
        answer_lines(async |line| {
            let answer = match line {
                "take" => slots.take().await,
                "done" => slots.free().await,
                "failed" => slots.mark().await,
                other => bail!("read stdin: {other:?} is no request"),
            };
            // A rollout takes hours, and a connection several hundred KiB.
            slots.api.disconnect();
            answer
        })
    }
}

/// A client of the API server with the account of this pod.
///
/// # Errors
/// If there is no service account.
fn api_of_this_pod() -> Result<ApiClient> {
    let access = Access::choose(None, ServiceAccount::of_this_pod());
    Ok(ApiClient::new(Arc::new(
        access.context("reach the API server")?,
    )))
}

/// Answers lines until stdin ends: `wait` and the reason after an error.
///
/// # Errors
/// If a stream fails.
fn answer_lines(mut answer: impl AsyncFnMut(&str) -> Result<String>) -> Result<()> {
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
    /// Until when the rollout counts as stopped, and the answer.
    stopped: Option<(Instant, String)>,
}

impl Slots<'_> {
    fn path(&self, name: &str) -> String {
        let namespace = &self.arguments.namespace;
        format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
    }

    async fn lease(&mut self, name: &str) -> Result<Lease> {
        let text = self.api.get(&self.path(name)).await;
        let text = text.with_context(|| format!("get the lease {name}"))?;
        serde_json::from_str(&text).with_context(|| format!("read the lease {name}"))
    }

    /// Patches a lease. False if another node changed it meanwhile: the API server refuses a patch
    /// of another version.
    async fn patch(&mut self, act: &str, name: &str, patch: &Value) -> Result<bool> {
        let has_version = patch.pointer("/metadata/resourceVersion").is_some();
        match self.api.patch(&self.path(name), patch).await {
            Ok(_) => Ok(true),
            Err(ApiError::Status(status)) if has_version && status.code == CONFLICT => Ok(false),
            Err(error) => Err(error).with_context(|| format!("{act} the lease {name}")),
        }
    }

    async fn leases(&mut self) -> Result<Vec<Lease>> {
        let mut leases = Vec::new();
        for name in slots_of(&self.node, &self.arguments.leases) {
            leases.push(self.lease(name).await?);
        }
        Ok(leases)
    }

    /// The answer to `take` while the rollout has stopped.
    async fn stopped(&mut self) -> Result<Option<String>> {
        self.stopped = None;
        let marked = self.lease(&self.arguments.leases[0]).await?;
        let failed = marked.failed();
        if failed.len() < self.arguments.max_failures {
            return Ok(None);
        }
        let answer = format!(
            "wait the rollout has stopped, the restart failed on {}; remove the annotation {FAILED} of the lease {} to go on",
            failed.join(", "),
            marked.metadata.name
        );
        let pause = STOPPED + STOPPED.mul_f64(fastrand::f64() / 2.0);
        self.stopped = Some((Instant::now() + pause, answer.clone()));
        Ok(Some(answer))
    }

    async fn take(&mut self) -> Result<String> {
        if let Some((until, answer)) = &self.stopped {
            if Instant::now() < *until {
                return Ok(answer.clone());
            }
            if let Some(answer) = self.stopped().await? {
                return Ok(answer);
            }
        }
        let leases = self.leases().await?;
        let Some(lease) = choose(&leases, &self.node) else {
            return Ok("wait other nodes have the slots of this node".to_owned());
        };
        if lease.holder().is_some() {
            return Ok("granted".to_owned());
        }
        if let Some(answer) = self.stopped().await? {
            return Ok(answer);
        }
        let patch = json!({
            "metadata": { "resourceVersion": lease.metadata.resource_version },
            "spec": { "holderIdentity": self.node },
        });
        let is_taken = self.patch("take", &lease.metadata.name, &patch).await?;
        Ok(match is_taken {
            true => "granted".to_owned(),
            false => "wait another node was faster".to_owned(),
        })
    }

    /// Frees this node's lease; does nothing without a lease.
    async fn free(&mut self) -> Result<String> {
        for lease in self.leases().await? {
            if lease.holder() == Some(&self.node) {
                let patch = json!({ "spec": { "holderIdentity": null } });
                self.patch("free", &lease.metadata.name, &patch).await?;
            }
        }
        Ok("ok".to_owned())
    }

    /// Adds this node to the mark.
    async fn mark(&mut self) -> Result<String> {
        let name = self.arguments.leases[0].clone();
        for _ in 0..MARK_TRIES {
            let lease = self.lease(&name).await?;
            let mut failed = lease.failed();
            if failed.contains(&&*self.node) {
                return Ok("ok".to_owned());
            }
            failed.push(&self.node);
            let version = &lease.metadata.resource_version;
            let annotations = json!({ FAILED: failed.join(",") });
            let patch = json!({
                "metadata": { "resourceVersion": version, "annotations": annotations },
            });
            if self.patch("mark", &name, &patch).await? {
                return Ok("ok".to_owned());
            }
        }
        Ok(format!("wait other nodes change the lease {name}"))
    }
}

// `bindguard-agent node-label`: the helper of an installer that labels its node.
// `bindguard install --node-label` runs it.
//
// | line on stdin | line on stdout |
// |---|---|
// | `set`, `remove` | `ok`, or `wait` and the reason |

/// The label of a node on which pods of the handler start.
const LABEL: &str = "bindguard.io/active";

/// Answers lines until stdin ends.
///
/// # Errors
/// If there is no service account, or a stream fails.
pub fn label_node() -> Result<()> {
    let mut api = api_of_this_pod()?;
    let node = node_name(None);
    let path = format!("/api/v1/nodes/{node}");
    answer_lines(async |line| {
        let value = match line {
            "set" => json!("true"),
            "remove" => json!(null),
            other => bail!("read stdin: {other:?} is no request"),
        };
        let patch = json!({ "metadata": { "labels": { LABEL: value } } });
        let patched = api.patch(&path, &patch).await;
        // the next request comes in days
        api.disconnect();
        patched.with_context(|| format!("patch the node {node}"))?;
        Ok("ok".to_owned())
    })
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
        let chosen = |leases, node| choose(leases, node).map(|lease| lease.metadata.name.as_str());
        assert_eq!(chosen(&leases, "n1"), Some("a"));
        assert_eq!(chosen(&leases, "n2"), Some("b"));
        assert_eq!(chosen(&leases[..1], "n2"), None);
    }

    #[test]
    fn the_mark_has_nodes() {
        assert!(lease("a", None, None).failed().is_empty());
        assert_eq!(lease("a", None, Some("n1,n2")).failed(), ["n1", "n2"]);
    }

    /// Each process of a node looks for the node's slot in the same place, and no slot has a crowd.
    #[test]
    fn a_node_has_few_slots_and_always_the_same() {
        let names: Vec<String> = (0..100).map(|slot| format!("slot-{slot}")).collect();
        let mut nodes = std::collections::BTreeMap::<&str, u32>::new();
        for node in 0..3000 {
            let of = || {
                let mut slots = slots_of(&format!("node-{node}"), &names);
                slots.sort_unstable();
                slots
            };
            assert_eq!(of(), of());
            assert_eq!(of().len(), SLOTS_OF_A_NODE);
            of().into_iter()
                .for_each(|slot| *nodes.entry(slot).or_default() += 1);
        }
        assert_eq!(nodes.len(), 100, "a slot that no node uses");
        assert!(*nodes.values().max().unwrap() < 120, "{nodes:?}");
        assert_eq!(slots_of("n", &names[..1]), ["slot-0"]);
    }
}
