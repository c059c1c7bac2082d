//! The task events of `ctr events`, in short: a line per event, without pids and times.
//!
//! ```text
//!   create web, start web, exit web web 0, delete web 0
//! ```
//! The words are topic, container, process (of an exit) and status (where it is not nought, as
//! protobuf leaves that out).

use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::ctr::Runtime;
use crate::node::Node;
use crate::process::run;
use crate::waiting::until;

/// The container whose creation marks the end of the events.
const END: &str = "end-of-events";

/// Listens while `happens` does, and until its last event has arrived.
pub fn during(node: &Node, happens: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let file = node.disk().join("events");
    let output = fs::File::create(&file).with_context(|| format!("create {}", file.display()))?;
    let mut events = node.ctr().command(&["events"]);
    let mut listener = events
        .stdin(Stdio::null())
        .stdout(output)
        .spawn()
        .context("start ctr events")?;
    let seen = wait_until_it_listens(node, &file)
        .and_then(|()| happens())
        .and_then(|()| until_the_end(node, &file));
    let _ = (listener.kill(), listener.wait());
    seen
}

/// ctr does not report when it is connected, so this function labels the namespace until ctr prints
/// an event.
fn wait_until_it_listens(node: &Node, file: &Path) -> Result<()> {
    let mut number = 0;
    until("ctr events listens", || {
        number += 1;
        let label = format!("bindguard.test/received={number}");
        run(node
            .ctr()
            .command(&["namespaces", "label", node.name(), &label]))?
        .success()?;
        Ok(fs::metadata(file)
            .with_context(|| format!("look at {}", file.display()))?
            .len()
            > 0)
    })
}

fn until_the_end(node: &Node, file: &Path) -> Result<Vec<String>> {
    // a shim sends its last events in its own time, and ends when it has
    until("every shim has ended", || Ok(node.shims()?.is_empty()))?;
    node.ctr()
        .container(END)
        .runtime(Runtime::Stock)
        .start()?
        .success()?;
    let mut events = Vec::new();
    until("the events have an end", || {
        let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        events = text.lines().filter_map(in_short).collect::<Vec<String>>();
        let end = events.iter().position(|event| event.ends_with(END));
        end.inspect(|end| events.truncate(*end));
        Ok(end.is_some())
    })?;
    node.ctr().remove(END)?;
    Ok(events)
}

/// From `… NAMESPACE /tasks/exit {"container_id":…}`.
fn in_short(line: &str) -> Option<String> {
    let (_, event) = line.split_once(" /tasks/")?;
    let (topic, json) = event.split_once(' ')?;
    let fields: serde_json::Value = serde_json::from_str(json).ok()?;
    let text = |name: &str| {
        fields
            .get(name)
            .and_then(|value| value.as_str())
            .map(str::to_owned)
    };
    let status = fields.get("exit_status").map(ToString::to_string);
    let words = [
        Some(topic.to_owned()),
        text("container_id"),
        text("id"),
        status,
    ];
    Some(words.into_iter().flatten().collect::<Vec<_>>().join(" "))
}
