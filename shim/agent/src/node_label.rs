//! `bindguard-agent node-label`: the helper of an installer that labels its node.
//! `bindguard install --node-label` runs it.
//!
//! | line on stdin | line on stdout |
//! |---|---|
//! | `set`, `remove` | `ok`, or `wait` and the reason |

use anyhow::{Context, Result, bail};
use bindguard_kubernetes::node_name;
use serde_json::json;

use crate::restart_slot::{answer_lines, api_of_this_pod};

/// The label of a node on which pods of the handler start.
const LABEL: &str = "bindguard.io/active";

/// Answers lines until stdin ends.
///
/// # Errors
/// If there is no service account, or a stream fails.
pub fn run() -> Result<()> {
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
