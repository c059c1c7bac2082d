//! The runtime's `--log` file: one JSON object a line.
//!
//! Each call has its own file, so that the last `error` line is from this call and not from an
//! older one. An incomplete line, whose writer was killed, must not hide its neighbours. The guard
//! writes its messages into the same file, below the level of an error; they are passed on to the
//! shim's log.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// The log's path if no file can be made in the bundle.
const NOWHERE: &str = "/dev/null";

/// The log file of one call; removed when dropped.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    /// None if no file can be made in the bundle.
    file: Option<File>,
}

#[derive(Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
struct RuntimeLogLine {
    level: String,
    msg: String,
}

impl LogFile {
    /// A file in the bundle that no other call has. If it cannot be made (the disk is full, or
    /// read-only) the runtime logs to `/dev/null`: it ends at once if it cannot open its log, and a
    /// container must still be killed and deleted.
    pub(crate) fn in_bundle(bundle: &Path, verb: &str) -> Self {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = bundle.join(format!("log-{verb}-{}-{number}.json", std::process::id()));
        match OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
        {
            Ok(file) => Self {
                path,
                file: Some(file),
            },
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "the runtime is called without a log");
                Self {
                    path: NOWHERE.into(),
                    file: None,
                }
            }
        }
    }

    /// For `--log`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Passes on lines below the level of an error, and returns the last error.
    pub(crate) fn read(&self) -> Option<String> {
        let mut bytes = Vec::new();
        let mut file = self.file.as_ref()?;
        file.rewind()
            .and_then(|()| file.read_to_end(&mut bytes))
            .ok()?;
        let lines = parse(&String::from_utf8_lossy(&bytes));
        for line in &lines {
            match line.level.as_str() {
                "warning" | "warn" => tracing::warn!(from = "runtime", "{}", line.msg),
                "info" => tracing::info!(from = "runtime", "{}", line.msg),
                "debug" | "trace" => tracing::debug!(from = "runtime", "{}", line.msg),
                _ => {}
            }
        }
        last_error(lines)
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn parse(text: &str) -> Vec<RuntimeLogLine> {
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

fn last_error(lines: Vec<RuntimeLogLine>) -> Option<String> {
    let is_error =
        |line: &RuntimeLogLine| matches!(line.level.as_str(), "error" | "fatal" | "panic");
    lines
        .into_iter()
        .rfind(is_error)
        .map(|line| line.msg.trim().to_owned())
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
        assert_ne!(log.path(), LogFile::in_bundle(dir.path(), "create").path());
        assert_eq!(log.read(), None);
        assert_eq!(
            LogFile::in_bundle(&dir.path().join("missing"), "create").path(),
            Path::new(NOWHERE)
        );
        fs::write(log.path(), "{\"level\":\"error\",\"msg\":\"x\"}").unwrap();
        assert_eq!(log.read().as_deref(), Some("x"));
        let path = log.path().to_owned();
        drop(log);
        assert!(!path.try_exists().unwrap());
    }
}
