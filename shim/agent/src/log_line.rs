//! The form of the agent's log: each event is one line.
//!
//! Pods choose many of the names and paths in the log. tracing-subscriber escapes what controls a
//! terminal's colours and cursor. It leaves newlines and the characters that reorder text.

use std::fmt;

use bindguard_core::text::one_line;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// The log of the agent, without times: journald and the kubelet add them.
pub fn log_to<W>(writer: W) -> impl Subscriber + Send + Sync
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .with_writer(writer)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .map_event_format(OneLine)
        .finish()
}

/// Formats events as another format does, and escapes the result.
#[derive(Debug)]
struct OneLine<F>(F);

impl<S, N, F> FormatEvent<S, N> for OneLine<F>
where
    S: Subscriber + for<'s> LookupSpan<'s>,
    N: for<'w> FormatFields<'w> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut log: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.0
            .format_event(context, Writer::new(&mut line), event)?;
        let line = line.strip_suffix('\n').unwrap_or(&line);
        writeln!(log, "{}", one_line(line))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use tracing::subscriber::with_default;
    use tracing::warn;

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_name_neither_begins_a_line_of_the_log_nor_reorders_it() {
        let written = Log::default();
        let log = written.clone();
        let subscriber = log_to(move || log.clone());
        let name = "app\n WARN refused\r\u{202e}fnoc\u{2066}\u{85}";
        with_default(subscriber, || warn!(name, "pod {name}"));
        let escaped = r"app\n WARN refused\r\u{202e}fnoc\u{2066}";
        let written = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert!(written.contains(escaped), "{written}");
        assert_eq!(written.lines().count(), 1, "{written}");
        assert!(
            !written.contains(['\r', '\u{202e}', '\u{2066}', '\u{85}']),
            "{written}"
        );
    }
}
