//! The requests for live refresh: annotations of a pod, labels of a container of Docker or Podman.
//!
//! A container runtime fixes a pod's annotations when it makes the sandbox: a later change of the
//! pod has no effect.

mod notify;

use std::str::FromStr;

use serde::de::IntoDeserializer;
use serde::de::value::Error as UnknownMode;
use serde::{Deserialize, Serialize};

pub use notify::{Notify, NotifySignal, ProgramName, UnknownNotification};

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

/// The containers of a node that the agent refreshes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefreshMode {
    /// None.
    Off,
    /// Containers of pods with the annotation [`REFRESH`] or [`REFRESH_BINDS`], and containers of
    /// engines with the label [`REFRESH_LABEL`] or [`REFRESH_BINDS_LABEL`].
    #[default]
    Annotated,
    /// All.
    All,
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
    /// None.
    #[default]
    None,
    /// All.
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
            Some("") => request.refuse(REFRESH, "", "\"true\", \"false\" or names of containers"),
            Some(names) => {
                let names = names
                    .split(',')
                    .map(str::trim)
                    .filter(|name| !name.is_empty());
                let (names, others): (Vec<_>, Vec<_>) =
                    names.partition(|name| may_be_container(name));
                for other in others {
                    request.refuse(REFRESH, other, "\"true\", \"false\" or names of containers");
                }
                if !names.is_empty() {
                    request.containers =
                        OptIn::Named(names.into_iter().map(str::to_owned).collect());
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
        if text.len() > MAX_TEXT {
            let expected = format!("a text of at most {MAX_TEXT} bytes");
            self.refuse(name, text, &expected);
            return None;
        }
        Some(text)
    }

    fn read_binds(&mut self, name: &str, text: Option<&str>, expected: &str) {
        let text = self.checked(name, text);
        for kind in text.into_iter().flat_map(|text| text.split(',')) {
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
    let is_of_label = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    name.len() <= 63 && name.bytes().all(is_of_label)
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
