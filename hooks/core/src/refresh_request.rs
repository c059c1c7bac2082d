//! The requests for live refresh: annotations of a pod, labels of a container of Docker or Podman.
//!
//! A container runtime fixes a pod's annotations when it makes the sandbox: a later change of the
//! pod has no effect.

use std::fmt;
use std::str::FromStr;

use serde::de::IntoDeserializer;
use serde::de::value::Error as UnknownMode;
use serde::{Deserialize, Serialize};
use strum::{Display, EnumIter, EnumString, IntoStaticStr};

/// The annotation that requests refreshes: `true`, or names of containers, separated by commas.
pub const REFRESH: &str = "bindguard.io/refresh";

/// The annotation that requests refreshes of further binds: [`VOLUMES`], [`HOST_ROOT`],
/// [`HOST_FILES`], separated by commas.
pub const REFRESH_BINDS: &str = "bindguard.io/refresh-binds";

/// The word for volumes that the host has mounted anew.
pub const VOLUMES: &str = "volumes";

/// The word for private binds of the host's root, which keep mounts of the host alive.
pub const HOST_ROOT: &str = "host-root";

/// The word for single files and sockets of the host that were replaced.
pub const HOST_FILES: &str = "host-files";

/// The annotation that names the notification after a refresh.
pub const NOTIFY: &str = "bindguard.io/refresh-notify";

/// The label of a container of Docker or Podman that requests refreshes: `true`.
pub const REFRESH_LABEL: &str = "bindguard.refresh";

/// The label of a Docker or Podman container that requests refreshes of [`VOLUMES`] or
/// [`HOST_ROOT`] binds.
pub const REFRESH_BINDS_LABEL: &str = "bindguard.refresh-binds";

/// The label that names the notification after a refresh.
pub const NOTIFY_LABEL: &str = "bindguard.refresh-notify";

/// The longest text of an annotation or a label: 64 names of containers fit.
const MAX_TEXT: usize = 4096;

/// The limit of reported problems: a pod may have annotations of 256 KiB, all of wrong words.
const MAX_PROBLEMS: usize = 8;

const EXPECTED_CONTAINERS: &str = "\"true\", \"false\" or names of containers";

/// The containers of a node that the agent refreshes.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum RefreshMode {
    /// Containers of pods with the annotation [`REFRESH`] or [`REFRESH_BINDS`], and containers of
    /// engines with the label [`REFRESH_LABEL`] or [`REFRESH_BINDS_LABEL`].
    #[default]
    Annotated,
    All,
    Off,
}

/// The names of the config's key, for a command line.
impl FromStr for RefreshMode {
    type Err = UnknownMode;

    fn from_str(name: &str) -> Result<Self, UnknownMode> {
        Self::deserialize(name.into_deserializer())
    }
}

/// The containers of a pod that are refreshed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum OptIn {
    #[default]
    None,
    All,
    /// Those with these names.
    Named(Vec<String>),
}

/// The kinds of binds, besides subPaths, that a pod requested.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedBinds {
    /// Volumes that the host has mounted anew.
    pub volumes: bool,
    /// Private binds of the host's root.
    pub host_root: bool,
    /// Single files and sockets of the host.
    pub host_files: bool,
}

impl RequestedBinds {
    /// True if the pod requested a kind.
    pub fn any(self) -> bool {
        self.volumes || self.host_root || self.host_files
    }
}

/// The requests of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RefreshRequest {
    /// The containers that get new files.
    pub containers: OptIn,
    /// The kinds of binds, beside subPaths, that are refreshed in all containers of the pod.
    pub binds: RequestedBinds,
    /// Their notification.
    pub notify: Notify,
    /// Annotations whose value is not understood.
    pub problems: Vec<String>,
}

impl RefreshRequest {
    /// Reads a pod's annotations.
    pub fn from_annotations<'a>(annotation: impl Fn(&str) -> Option<&'a str>) -> Self {
        let mut request = Self::default();
        match request.checked(REFRESH, annotation(REFRESH)) {
            None | Some("false") => {}
            Some("true") => request.containers = OptIn::All,
            Some("") => request.refuse(REFRESH, "", EXPECTED_CONTAINERS),
            Some(text) => {
                let mut names = Vec::new();
                for name in text.split(',') {
                    match name.trim() {
                        "" => {}
                        name if may_be_container(name) => names.push(name.to_owned()),
                        name => request.refuse(REFRESH, name, EXPECTED_CONTAINERS),
                    }
                }
                if !names.is_empty() {
                    request.containers = OptIn::Named(names);
                }
            }
        }
        let expected = "\"volumes\", \"host-root\" or \"host-files\"";
        request.read_binds(REFRESH_BINDS, annotation(REFRESH_BINDS), expected);
        request.read_notify(NOTIFY, annotation(NOTIFY));
        request
    }

    /// True if no container is refreshed.
    pub fn is_none(&self) -> bool {
        self.containers == OptIn::None && !self.binds.any()
    }

    /// Reads the labels of a container, or its annotations of the same names. The label
    /// [`REFRESH_LABEL`] covers all files of the host.
    pub fn from_labels<'a>(label: impl Fn(&str) -> Option<&'a str>) -> Self {
        let mut request = Self::default();
        match request.checked(REFRESH_LABEL, label(REFRESH_LABEL)) {
            None | Some("false") => {}
            Some("true") => request.containers = OptIn::All,
            Some(text) => request.refuse(REFRESH_LABEL, text, "\"true\" or \"false\""),
        }
        let expected = "\"volumes\" or \"host-root\"";
        request.read_binds(REFRESH_BINDS_LABEL, label(REFRESH_BINDS_LABEL), expected);
        if std::mem::take(&mut request.binds.host_files) {
            request.refuse(REFRESH_BINDS_LABEL, HOST_FILES, expected);
        }
        request.read_notify(NOTIFY_LABEL, label(NOTIFY_LABEL));
        request
    }

    /// The text of an annotation or a label, without a text that is too long.
    fn checked<'t>(&mut self, name: &str, text: Option<&'t str>) -> Option<&'t str> {
        let text = text.map(str::trim)?;
        if text.len() <= MAX_TEXT {
            return Some(text);
        }
        self.refuse(name, text, &format!("a text of at most {MAX_TEXT} bytes"));
        None
    }

    fn read_binds(&mut self, name: &str, text: Option<&str>, expected: &str) {
        let Some(text) = self.checked(name, text) else {
            return;
        };
        for kind in text.split(',') {
            match kind.trim() {
                VOLUMES => self.binds.volumes = true,
                HOST_ROOT => self.binds.host_root = true,
                HOST_FILES => self.binds.host_files = true,
                other => self.refuse(name, other, expected),
            }
        }
    }

    fn read_notify(&mut self, name: &str, text: Option<&str>) {
        let Some(text) = self.checked(name, text) else {
            return;
        };
        match Notify::from_text(text) {
            Some(notify) => self.notify = notify,
            None => self.refuse(
                name,
                text,
                "\"none\", \"touch\" or \"signal:\" with HUP, USR1, USR2 or WINCH, and \"@PROGRAM\" if it is not for the init",
            ),
        }
    }

    fn refuse(&mut self, name: &str, text: &str, expected: &str) {
        let text = crate::text::cut(text, 64);
        let problem = format!("ignoring {name}: {text:?} is not {expected}");
        if self.problems.len() < MAX_PROBLEMS && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }
}

/// True if a container of a pod can have this name: a DNS label. `True` is none.
fn may_be_container(name: &str) -> bool {
    let mut bytes = name.bytes();
    name.len() <= 63 && bytes.all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

impl OptIn {
    /// True if a container of this name is refreshed.
    pub fn includes(&self, container: &str) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Named(names) => names.iter().any(|name| name == container),
        }
    }
}

// The notification of an application whose files are new.

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
        let is_invalid = text.contains(|letter: char| letter == '/' || letter.is_control());
        let is_name = !is_invalid && (1..=MAX_FILE_NAME).contains(&text.len());
        is_name.then(|| Self(text.to_owned()))
    }

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, EnumString)]
#[strum(serialize_all = "UPPERCASE")]
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
        let text = match text.trim() {
            "none" => return Some(Self::None),
            "touch" => return Some(Self::Touch),
            text => text.strip_prefix("signal:")?,
        };
        let signal_of = |name: &str| name.strip_prefix("SIG").unwrap_or(name).parse().ok();
        Some(match text.split_once('@') {
            Some((signal, program)) => {
                Self::SignalProgram(signal_of(signal)?, ProgramName::from_text(program)?)
            }
            None => Self::Signal(signal_of(text)?),
        })
    }
}

impl fmt::Display for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Touch => f.write_str("touch"),
            Self::Signal(signal) => write!(f, "signal:SIG{signal}"),
            Self::SignalProgram(signal, program) => {
                write!(f, "signal:SIG{signal}@{}", program.0)
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

    fn request(refresh: Option<&'static str>, notify: Option<&'static str>) -> RefreshRequest {
        RefreshRequest::from_annotations(|name| match name {
            REFRESH => refresh,
            NOTIFY => notify,
            _ => None,
        })
    }

    #[test]
    fn a_pod_opts_in_as_a_whole_or_by_container() {
        for (value, app, side) in [
            (None, false, false),
            (Some("false"), false, false),
            (Some("true"), true, true),
            (Some("app"), true, false),
            (Some(" side , app "), true, true),
            (Some(""), false, false),
            (Some("True"), false, false),
        ] {
            let containers = request(value, None).containers;
            assert_eq!(
                (containers.includes("app"), containers.includes("side")),
                (app, side),
                "{value:?}"
            );
        }
        for (value, problems) in [
            ("", 1),
            ("True", 1),
            ("YES,app,On", 2),
            ("app", 0),
            ("true", 0),
            ("false", 0),
        ] {
            assert_eq!(
                request(Some(value), None).problems.len(),
                problems,
                "{value}"
            );
        }
        assert!(request(Some("YES,app"), None).containers.includes("app"));
    }

    /// All annotations of a pod may have 256 KiB, and each problem is kept, logged and reported.
    #[test]
    fn long_texts_of_wrong_words_become_few_problems() {
        let words: String = (0..1000).map(|word| format!("A{word},")).collect();
        for (text, problems) in [
            (",".repeat(4000), 1),
            ("A,".repeat(2000), 2),
            (words[..4000].to_owned(), MAX_PROBLEMS),
            (",".repeat(200_000), 1),
        ] {
            let annotation = |name: &str| (name == REFRESH_BINDS).then_some(text.as_str());
            let request = RefreshRequest::from_annotations(annotation);
            assert_eq!(request.problems.len(), problems, "{} bytes", text.len());
            assert!(request.problems.iter().all(|problem| problem.len() < 300));
        }
        let names = format!("app,{}", "a,".repeat(200_000));
        let annotation = |name: &str| (name == REFRESH).then_some(names.as_str());
        let request = RefreshRequest::from_annotations(annotation);
        assert_eq!(request.containers, OptIn::None);
        assert_eq!(request.problems.len(), 1);
    }

    #[test]
    fn a_pod_opts_in_to_kinds_of_binds() {
        for (value, [volumes, host_root, host_files], problems) in [
            ("volumes", [true, false, false], 0),
            (" volumes ", [true, false, false], 0),
            ("volumes,host-root", [true, true, false], 0),
            ("host-files, host-dirs", [false, false, true], 1),
            ("Volumes", [false; 3], 1),
            ("true", [false; 3], 1),
            ("", [false; 3], 1),
        ] {
            let binds = |name: &str| (name == REFRESH_BINDS).then_some(value);
            let request = RefreshRequest::from_annotations(binds);
            let binds = RequestedBinds {
                volumes,
                host_root,
                host_files,
            };
            assert_eq!(
                (request.binds, request.problems.len(), request.is_none()),
                (binds, problems, !binds.any()),
                "{value:?}"
            );
            let label = |name: &str| (name == REFRESH_BINDS_LABEL).then_some(value);
            let request = RefreshRequest::from_labels(label);
            let of_engine = RequestedBinds {
                host_files: false,
                ..binds
            };
            let refused = usize::from(host_files);
            assert_eq!(
                (request.binds, request.problems.len()),
                (of_engine, problems + refused),
                "{value:?}"
            );
        }
        let files = request(Some("true"), None);
        assert!(!files.binds.any() && !files.is_none());
    }

    #[test]
    fn a_label_opts_one_container_in() {
        for (value, is_in, problems) in [
            (None, false, 0),
            (Some("false"), false, 0),
            (Some("true"), true, 0),
            (Some("app"), false, 1),
        ] {
            let notify = |name: &str| (name == NOTIFY_LABEL).then_some("signal:HUP");
            let request = RefreshRequest::from_labels(|name| {
                if name == REFRESH_LABEL {
                    value
                } else {
                    notify(name)
                }
            });
            assert_eq!(
                (request.containers == OptIn::All, request.problems.len()),
                (is_in, problems),
                "{value:?}"
            );
            assert_eq!(request.notify, Notify::Signal(NotifySignal::Hup));
        }
    }

    #[test]
    fn an_unknown_notification_is_a_problem_and_none_is_sent() {
        let long = Box::leak("x".repeat(3000).into_boxed_str());
        for (value, notify, problems) in [
            ("signal:HUP", Notify::Signal(NotifySignal::Hup), 0),
            ("signal:KILL", Notify::None, 1),
            (long, Notify::None, 1),
        ] {
            let request = request(Some("true"), Some(value));
            assert_eq!(
                (request.notify, request.problems.len()),
                (notify, problems),
                "{value}"
            );
            assert!(request.problems.iter().all(|problem| problem.len() < 300));
        }
    }
}

#[cfg(test)]
mod notify_tests {
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
