//! The notification of an application whose files are new.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The longest file name: NAME_MAX of limits.h.
const MAX_FILE_NAME: usize = 255;

/// The notification of a container whose files are new.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Notify {
    /// None: applications that watch the file notice by themselves.
    #[default]
    None,
    /// The refresh changes the times of the file beneath the mount: programs that watch the file's
    /// folder notice.
    Touch,
    /// A signal to the container's init.
    Signal(NotifySignal),
    /// A signal to the process of the container that runs this program.
    SignalProgram(NotifySignal, ProgramName),
}

/// The file name of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramName(String);

impl ProgramName {
    /// `None` if no file can have the name, or for a name with control characters.
    pub fn from_text(text: &str) -> Option<Self> {
        let is_invalid = |letter: char| letter == '/' || letter.is_control();
        let is_name = !text.is_empty() && text.len() <= MAX_FILE_NAME && !text.contains(is_invalid);
        is_name.then(|| Self(text.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True for the file name in a link `/proc/PID/exe`. The kernel appends ` (deleted)` once the
    /// file was removed, as an upgrade of a running program does.
    pub fn is_program(&self, file_name: &[u8]) -> bool {
        let name = file_name.strip_suffix(b" (deleted)");
        file_name == self.0.as_bytes() || name == Some(self.0.as_bytes())
    }
}

/// The signals that a pod may request. A program that handles the requested signal goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotifySignal {
    /// SIGHUP
    Hup,
    /// SIGUSR1
    Usr1,
    /// SIGUSR2
    Usr2,
    /// SIGWINCH
    Winch,
}

/// A text that names no notification.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} names no notification, expected \"none\", \"touch\", \"signal:NAME\" or \"signal:NAME@PROGRAM\""
)]
pub struct UnknownNotification(String);

impl Notify {
    /// Reads `none`, `touch`, `signal:NAME` or `signal:NAME@PROGRAM`.
    pub fn from_text(text: &str) -> Option<Self> {
        match text.trim() {
            "none" => Some(Self::None),
            "touch" => Some(Self::Touch),
            other => {
                let signal = other.strip_prefix("signal:")?;
                match signal.split_once('@') {
                    None => NotifySignal::from_name(signal).map(Self::Signal),
                    Some((signal, program)) => Some(Self::SignalProgram(
                        NotifySignal::from_name(signal)?,
                        ProgramName::from_text(program)?,
                    )),
                }
            }
        }
    }
}

impl NotifySignal {
    fn from_name(name: &str) -> Option<Self> {
        match name.strip_prefix("SIG").unwrap_or(name) {
            "HUP" => Some(Self::Hup),
            "USR1" => Some(Self::Usr1),
            "USR2" => Some(Self::Usr2),
            "WINCH" => Some(Self::Winch),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Hup => "SIGHUP",
            Self::Usr1 => "SIGUSR1",
            Self::Usr2 => "SIGUSR2",
            Self::Winch => "SIGWINCH",
        }
    }
}

impl fmt::Display for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Touch => f.write_str("touch"),
            Self::Signal(signal) => write!(f, "signal:{}", signal.name()),
            Self::SignalProgram(signal, program) => {
                write!(f, "signal:{}@{}", signal.name(), program.as_str())
            }
        }
    }
}

impl From<Notify> for String {
    fn from(notify: Notify) -> Self {
        notify.to_string()
    }
}

impl TryFrom<String> for Notify {
    type Error = UnknownNotification;

    fn try_from(text: String) -> Result<Self, UnknownNotification> {
        Self::from_text(&text).ok_or(UnknownNotification(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_signals_are_sent() {
        for (value, notify) in [
            ("none", Some(Notify::None)),
            ("touch", Some(Notify::Touch)),
            ("signal:SIGHUP", Some(Notify::Signal(NotifySignal::Hup))),
            ("signal:USR1", Some(Notify::Signal(NotifySignal::Usr1))),
            ("signal:SIGKILL", None),
            ("signal:KILL@nginx", None),
            ("signal:HUP@", None),
            ("signal:HUP@/usr/sbin/nginx", None),
            ("signal:HUP@a\nb", None),
            (
                " signal:HUP@nginx ",
                Some(Notify::SignalProgram(NotifySignal::Hup, nginx())),
            ),
            ("signal:9", None),
            ("SIGHUP", None),
        ] {
            assert_eq!(Notify::from_text(value), notify, "{value}");
            if let Some(notify) = notify {
                assert_eq!(Notify::from_text(&notify.to_string()), Some(notify));
            }
        }
    }

    fn nginx() -> ProgramName {
        ProgramName::from_text("nginx").unwrap()
    }

    /// The link of a program that an upgrade replaced ends with ` (deleted)`.
    #[test]
    fn a_program_has_its_name_also_after_an_upgrade() {
        for (link, is_it) in [
            (&b"nginx"[..], true),
            (b"nginx (deleted)", true),
            (b"nginx\n", false),
            (b"x\nnginx", false),
            (b"nginx (deleted) (deleted)", false),
            (b"nginx-debug", false),
            (b"", false),
            (b"\xffnginx", false),
        ] {
            assert_eq!(nginx().is_program(link), is_it, "{link:?}");
        }
    }
}
