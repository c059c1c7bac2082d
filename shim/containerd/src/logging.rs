//! The shim's log: logfmt lines in the fifo `log` in the bundle, which containerd reads.
//!
//! containerd copies the lines into its log, so the lines have the format of containerd's log. The
//! fifo is opened for reading and writing and never blocks. Without a reader (containerd is being
//! restarted) lines wait in the fifo. A full fifo loses lines. A log must never stop a container.

use std::fmt::{self, Write as _};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber, span};

/// The fifo's name in the bundle, which is a shim's current directory.
pub const FIFO: &str = "log";

/// Writes a line for each event. The shim uses no spans.
struct Logfmt {
    file: File,
    level: LevelFilter,
}

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
    let level = if debug {
        LevelFilter::DEBUG
    } else {
        LevelFilter::INFO
    };
    tracing::subscriber::set_global_default(Logfmt { file, level }).map_err(io::Error::other)?;
    // A panic is caught where it happens, see `service::run_to_end`; its message must be in the log.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    Ok(())
}

impl Subscriber for Logfmt {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn event(&self, event: &Event<'_>) {
        let now = OffsetDateTime::now_utc()
            .format(&Rfc3339)
            .unwrap_or_default();
        let mut line = LogfmtLine::default();
        event.record(&mut line);
        let level = match *event.metadata().level() {
            Level::WARN => "warning".to_owned(),
            level => level.as_str().to_ascii_lowercase(),
        };
        let LogfmtLine { message, fields } = line;
        let text = format!("time=\"{now}\" level={level} msg={message:?}{fields}\n");
        // A single write, usually shorter than PIPE_BUF, so lines of two shims do not mix; a full
        // fifo drops the line.
        let _ = (&self.file).write_all(text.as_bytes());
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct LogfmtLine {
    message: String,
    fields: String,
}

impl Visit for LogfmtLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
            return;
        }
        let bare = !text.is_empty()
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-._/@^+:".contains(&b));
        let _ = match bare {
            true => write!(self.fields, " {}={text}", field.name()),
            false => write!(self.fields, " {}={text:?}", field.name()),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_logfmt() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = Logfmt {
            file: file.reopen().unwrap(),
            level: LevelFilter::INFO,
        };
        tracing::subscriber::with_default(log, || {
            tracing::warn!(id = "abc", why = "two words", pid = 7, "it \"happened\"");
            tracing::debug!("not this");
        });
        let text = std::fs::read_to_string(file.path()).unwrap();
        let (_time, rest) = text.split_once(" level=").unwrap();
        assert_eq!(
            rest,
            "warning msg=\"it \\\"happened\\\"\" id=abc why=\"two words\" pid=7\n"
        );
    }
}
