//! What `ctr events` shows of tasks while something happens, in short: one line an event, without pids and times.
//!
//! ```text
//!   create web, start web, exit web web 0, delete web 0
//! ```
//! The words are topic, container, process (of an exit) and status (where it is not nought, as protobuf leaves that out).

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::ctr::Runtime;
use crate::node::Node;

const LIMIT: Duration = Duration::from_secs(10);
/// A container whose creation says that nothing more will come.
const END: &str = "end-of-events";

/// Listens while `happens` does, and until its last event has arrived.
pub fn during(node: &Node, happens: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let file = node.disk().join("events");
    let output = fs::File::create(&file).with_context(|| format!("create {}", file.display()))?;
    let mut events = node.ctr().command(&["events"]);
    let mut listener = events.stdin(Stdio::null()).stdout(output).spawn().context("start ctr events")?;
    // it says nothing when it has begun to listen
    thread::sleep(Duration::from_millis(300));
    let seen = happens().and_then(|()| until_the_end(node, &file));
    let _ = (listener.kill(), listener.wait());
    seen
}

fn until_the_end(node: &Node, file: &Path) -> Result<Vec<String>> {
    node.ctr().container(END).runtime(Runtime::Stock).start()?.success()?;
    let deadline = Instant::now() + LIMIT;
    let seen = loop {
        let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        let mut events: Vec<String> = text.lines().filter_map(in_short).collect();
        if let Some(end) = events.iter().position(|event| event.ends_with(END)) {
            events.truncate(end);
            break events;
        }
        if Instant::now() > deadline {
            bail!("no end of the events: {text}");
        }
        thread::sleep(Duration::from_millis(20));
    };
    node.ctr().remove(END)?;
    Ok(seen)
}

/// From `… NAMESPACE /tasks/exit {"container_id":…}`.
fn in_short(line: &str) -> Option<String> {
    let (_, event) = line.split_once(" /tasks/")?;
    let (topic, json) = event.split_once(' ')?;
    let fields: serde_json::Value = serde_json::from_str(json).ok()?;
    let text = |name: &str| fields.get(name).and_then(|value| value.as_str()).map(str::to_owned);
    let status = fields.get("exit_status").map(ToString::to_string);
    let words = [Some(topic.to_owned()), text("container_id"), text("id"), status];
    Some(words.into_iter().flatten().collect::<Vec<_>>().join(" "))
}
