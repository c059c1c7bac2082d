//! The runtime's `--log` file: JSON objects, each on a line or, from crun 1.28, on several lines.
//! youki writes `ERROR` and `message` in place of `error` and `msg`.
//!
//! Each call has a separate file, so that the last error is not from an older call. An incomplete
//! object, whose writer was killed, must not hide its neighbours. The guard writes its messages
//! into the same file, below the level of an error; they are passed on to the shim's log.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// The log's path if no file can be made in the bundle.
const NOWHERE: &str = "/dev/null";

/// The level of youki's errors.
const YOUKI_ERROR: &str = "ERROR";

/// The end of youki's message where its environment has `RUST_BACKTRACE`.
const YOUKI_BACKTRACE: &str = "\n\nStack backtrace:";

/// The log file of a call; removed when dropped.
#[derive(Debug)]
pub struct LogFile {
    pub path: PathBuf,
    /// None if no file can be made in the bundle.
    file: Option<File>,
}

#[derive(Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
struct RuntimeMessage {
    level: String,
    #[serde(alias = "message")]
    msg: String,
    /// youki's error value, beside some messages.
    err: Option<String>,
}

impl LogFile {
    /// A new file in the bundle. If the file cannot be made (the disk is full, or read-only) the
    /// runtime logs to `/dev/null`: a runtime without a log ends at once, and a container must
    /// still be killed and deleted.
    pub fn in_bundle(bundle: &Path, verb: &str) -> Self {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = bundle.join(format!("log-{verb}-{}-{number}.json", std::process::id()));
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path);
        let (path, file) = match opened {
            Ok(file) => (path, Some(file)),
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "the runtime is called without a log");
                (NOWHERE.into(), None)
            }
        };
        Self { path, file }
    }

    /// Passes on messages below the level of an error, and returns the last error.
    pub fn read(&self) -> Option<String> {
        let mut bytes = Vec::new();
        let mut file = self.file.as_ref()?;
        file.rewind()
            .and_then(|()| file.read_to_end(&mut bytes))
            .ok()?;
        let messages = parse(&String::from_utf8_lossy(&bytes));
        for RuntimeMessage { level, msg, .. } in &messages {
            match level.to_ascii_lowercase().as_str() {
                "warning" | "warn" => tracing::warn!(from = "runtime", "{msg}"),
                "info" => tracing::info!(from = "runtime", "{msg}"),
                "debug" | "trace" => tracing::debug!(from = "runtime", "{msg}"),
                _ => {}
            }
        }
        last_error(messages)
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// An object begins with its line. A line that begins no complete object is skipped.
fn parse(text: &str) -> Vec<RuntimeMessage> {
    let mut messages = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        rest = match first_message(rest) {
            Some((message, end)) => {
                messages.push(message);
                &rest[end..]
            }
            None => rest.split_once('\n').map_or("", |(_, next)| next),
        };
    }
    messages
}

/// The message at the start of a text, and its end.
fn first_message(text: &str) -> Option<(RuntimeMessage, usize)> {
    if !text.trim_start_matches([' ', '\t']).starts_with('{') {
        return None;
    }
    let mut objects = serde_json::Deserializer::from_str(text).into_iter();
    let message = objects.next()?.ok()?;
    Some((message, objects.byte_offset()))
}

/// runc and crun write a single error. youki writes an error for each step: the last says what
/// failed, and the first why.
fn last_error(messages: Vec<RuntimeMessage>) -> Option<String> {
    let mut errors = messages;
    errors.retain(|message| {
        let level = message.level.to_ascii_lowercase();
        matches!(level.as_str(), "error" | "fatal" | "panic")
    });
    let (last, before) = errors.split_last()?;
    let first = before.first();
    if first.unwrap_or(last).level != YOUKI_ERROR {
        return Some(last.msg.trim().to_owned());
    }
    let what = last.msg.split(YOUKI_BACKTRACE).next().unwrap_or_default();
    let mut text = what.trim().to_owned();
    let why = first.map(|error| error.msg.as_str());
    let value = errors.iter().find_map(|error| error.err.as_deref());
    for part in [why, value].into_iter().flatten() {
        text.push_str(": ");
        text.push_str(part.trim());
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_counts_and_remarks_do_not() {
        let text = r#"
            {"level":"error","msg":"first","time":"2026-11-21T05:10:00Z"}
            {"level":"error","msg":"runc create failed: no such file or directory\n","time":"2026-11-21T05:10:00Z"}
            {"level":"warning","msg":"re-bound /var/lib/kubelet/x"}"#;
        assert_eq!(
            last_error(parse(text)).as_deref(),
            Some("runc create failed: no such file or directory")
        );
    }

    /// As crun 1.28 writes an error.
    #[test]
    fn an_object_may_take_several_lines() {
        let crun = "{\n  \"msg\": \"cannot stat `\\/data`\",\n  \"level\": \"error\",\n  \"time\": \"2026-11-21T05:10:00.0Z\"\n}\n";
        let expected = Some("cannot stat `/data`");
        assert_eq!(last_error(parse(crun)).as_deref(), expected);
        let guard = "{\"level\":\"warning\",\"msg\":\"re-bound /var/lib/kubelet/x\"}\n";
        let around = format!("{guard}{crun}{guard}");
        assert_eq!(parse(&around).len(), 3);
        assert_eq!(last_error(parse(&around)).as_deref(), expected);
        let half = &crun[..crun.len() - 10];
        assert_eq!(parse(&format!("{half}\n{guard}")).len(), 1);
        assert_eq!(
            last_error(parse(&format!("{crun}{half}"))).as_deref(),
            expected
        );
    }

    /// As youki 0.7 writes errors, with `RUST_BACKTRACE`.
    #[test]
    fn the_cause_follows_the_last_error() {
        let youki = r#"
            {"timestamp":"2026-11-25T23:45:10.3Z","level":"ERROR","message":"failed to mount /data: syscall","target":"libcontainer::rootfs::mount"}
            {"timestamp":"2026-11-25T23:45:10.3Z","level":"ERROR","message":"failed to prepare rootfs","err":"Mount(Syscall(Nix(ENOENT)))","target":"libcontainer::process::init::process"}
            {"timestamp":"2026-11-25T23:45:10.4Z","level":"ERROR","message":"failed to create container\n\nStack backtrace:\n   0: <unknown>","target":"youki"}
            {"timestamp":"2026-11-25T23:45:10.4Z","level":"DEBUG","message":"ended","target":"youki"}"#;
        let expected = "failed to create container: failed to mount /data: syscall: Mount(Syscall(Nix(ENOENT)))";
        assert_eq!(last_error(parse(youki)).as_deref(), Some(expected));
        let last_alone = parse(youki).split_off(2);
        assert_eq!(
            last_error(last_alone).as_deref(),
            Some("failed to create container")
        );
    }

    #[test]
    fn a_half_written_line_hides_nothing() {
        let text = "{\"level\":\"error\",\"msg\":\"the one\"}\n{\"level\":\"err";
        assert_eq!(last_error(parse(text)).as_deref(), Some("the one"));
        let text = "{\"level\":\"err\n{\"level\":\"error\",\"msg\":\"the one\"}\nnot json\n";
        assert_eq!(last_error(parse(text)).as_deref(), Some("the one"));
        assert_eq!(last_error(parse("")), None);
    }

    #[test]
    fn the_log_file_is_removed_with_its_call() {
        let dir = tempfile::tempdir().unwrap();
        let log = LogFile::in_bundle(dir.path(), "create");
        assert_ne!(log.path, LogFile::in_bundle(dir.path(), "create").path);
        assert_eq!(log.read(), None);
        assert_eq!(
            LogFile::in_bundle(&dir.path().join("missing"), "create").path,
            Path::new(NOWHERE)
        );
        fs::write(&log.path, "{\"level\":\"error\",\"msg\":\"x\"}").unwrap();
        assert_eq!(log.read().as_deref(), Some("x"));
        let path = log.path.clone();
        drop(log);
        assert!(!path.try_exists().unwrap());
    }
}
