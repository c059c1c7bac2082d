//! The shim's log: logfmt lines in the fifo `log` in the bundle, which containerd reads.
//!
//! containerd copies the lines into its log, so the lines have the format of containerd's log. The
//! fifo is opened for reading and writing and never blocks. Without a reader (containerd is being
//! restarted) lines wait in the fifo. A full fifo loses lines. A log must never stop a container.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use log::kv::{self, Key, Value, VisitSource};
use log::{Level, LevelFilter, Log, Metadata, Record};
use rustix::fs::OFlags;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The fifo's name in the bundle, which is a shim's current directory.
pub const FIFO: &str = "log";

/// Writes a line for each record.
struct Logfmt(File);

/// Logs into the fifo, with stderr or without. Not for the stderr of `start`: containerd takes all
/// its output for the address.
pub fn to_fifo(path: &Path, debug: bool, with_stderr: bool) -> io::Result<()> {
    let nonblock = OFlags::NONBLOCK.bits().cast_signed();
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(nonblock);
    let fifo = options.open(path)?;
    if with_stderr {
        rustix::stdio::dup2_stderr(&fifo)?;
    }
    install(fifo, debug)
}

/// Logs to stderr. For `delete`, whose stderr containerd puts into its own log.
pub fn to_stderr(debug: bool) -> io::Result<()> {
    let stderr = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3)?;
    install(File::from(stderr), debug)
}

fn install(file: File, debug: bool) -> io::Result<()> {
    log::set_boxed_logger(Box::new(Logfmt(file))).map_err(io::Error::other)?;
    log::set_max_level(if debug {
        LevelFilter::Debug
    } else {
        LevelFilter::Info
    });
    // A panic is caught where it happens, see `service::run_to_end`; its message must be in the log.
    std::panic::set_hook(Box::new(|panic| log::error!("{panic}")));
    Ok(())
}

impl Log for Logfmt {
    /// The records of this crate: those of ttrpc are for its own developers.
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with(env!("CARGO_CRATE_NAME"))
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let now = OffsetDateTime::now_utc()
            .format(&Rfc3339)
            .unwrap_or_default();
        let level = match record.level() {
            Level::Warn => "warning".to_owned(),
            level => level.as_str().to_ascii_lowercase(),
        };
        let message = record.args().to_string();
        let mut fields = Fields(String::new());
        let _ = record.key_values().visit(&mut fields);
        let text = format!("time=\"{now}\" level={level} msg={message:?}{}\n", fields.0);
        // A single write, usually shorter than PIPE_BUF, so lines of two shims do not mix; a full
        // fifo drops the line.
        let _ = (&self.0).write_all(text.as_bytes());
    }

    fn flush(&self) {}
}

struct Fields(String);

impl VisitSource<'_> for Fields {
    fn visit_pair(&mut self, key: Key<'_>, value: Value<'_>) -> Result<(), kv::Error> {
        let text = value.to_string();
        let bare = !text.is_empty()
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-._/@^+:".contains(&b));
        let _ = match bare {
            true => write!(self.0, " {key}={text}"),
            false => write!(self.0, " {key}={text:?}"),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_logfmt() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = Logfmt(file.reopen().unwrap());
        log::set_max_level(LevelFilter::Info);
        log::warn!(logger: log, id:% = "abc", why:% = "two words", pid:% = 7; "it \"happened\"");
        log::debug!(logger: log, "not this");
        log::warn!(logger: log, target: "ttrpc", "nor this");
        let text = std::fs::read_to_string(file.path()).unwrap();
        let (_time, rest) = text.split_once(" level=").unwrap();
        assert_eq!(
            rest,
            "warning msg=\"it \\\"happened\\\"\" id=abc why=\"two words\" pid=7\n"
        );
    }
}
