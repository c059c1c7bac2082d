//! Every key of `config.toml`, once: its name, its default, and the value that applies where the
//! file's value is unreadable. Below them the kinds of values: how each is read, and how each is
//! shown.
//!
//! Reading, showing and checking a config all go through [`Settings::visit`], so they cannot
//! disagree.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

use bindguard_core::places::Places;
use bindguard_core::policy::{
    Alarm, BelowEmptyDirs, FailedRepair, Mode, ReadOnlyBinds, Scope, Vanished,
};
use bindguard_core::refresh_request::RefreshMode;
use toml::de::DeValue;
use toml::{Spanned, Value};

/// Receives every key.
pub(crate) trait Visitor {
    /// `name`: `table.key`. `if_unreadable`: the value where the file's value is a mistake.
    fn key<T: Setting>(&mut self, name: &'static str, value: &mut T, if_unreadable: T);
}

/// `FIELD: TYPE, NAME, DEFAULT, VALUE IF UNREADABLE;` in the order of the shipped file. A mistake in
/// a value never makes bindguard do more than the value could have meant: checks report, and
/// optional features are off.
macro_rules! keys {
    ($($field:ident: $kind:ty, $name:literal, $default:expr, $if_unreadable:expr;)*) => {
        /// The values of all keys.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) struct Settings {
            $(pub(crate) $field: $kind,)*
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl Settings {
            pub(crate) fn visit(&mut self, visitor: &mut impl Visitor) {
                $(visitor.key($name, &mut self.$field, $if_unreadable);)*
            }
        }
    };
}

keys! {
    deadline_ms: Number<1, 600_000>, "guard.deadline-ms", Number(2_000), Number(2_000);
    failed_repairs: FailedRepair, "guard.failed-repairs", FailedRepair::Pass, FailedRepair::Pass;
    runtime: Program, "runtime.path", Program::runc(), Program::runc();
    kubelet_roots: Vec<PathBuf>, "kubelet.roots", kubelet_roots(), kubelet_roots();
    stale_subpaths: Mode, "checks.stale-subpaths", Mode::Repair, Mode::Report;
    host_root: Mode, "checks.host-root", Mode::Repair, Mode::Report;
    unmounted_volumes: Alarm, "checks.unmounted-volumes", Alarm::Report, Alarm::Report;
    dead_sources: Alarm, "checks.dead-sources", Alarm::Report, Alarm::Report;
    proof: Alarm, "checks.proof", Alarm::Report, Alarm::Report;
    vanished_directories: Vanished, "checks.vanished-directories", Vanished::Leave, Vanished::Leave;
    below_emptydirs: BelowEmptyDirs, "checks.mounts-below-emptydir", BelowEmptyDirs::Report, BelowEmptyDirs::Report;
    scope: Scope, "host-root.scope", Scope::RuntimeDirectories, Scope::HostRoot;
    read_only: ReadOnlyBinds, "host-root.read-only", ReadOnlyBinds::MakeRslave, ReadOnlyBinds::Keep;
    extra_directories: Vec<PathBuf>, "host-root.extra-directories", Vec::new(), Vec::new();
    annotation_mode: bool, "annotations.mode", false, false;
    annotation_propagation: bool, "annotations.propagation", false, false;
    journal_enabled: bool, "journal.enabled", true, true;
    journal: PathBuf, "journal.path", JOURNAL.into(), JOURNAL.into();
    metrics: Option<SocketAddr>, "agent.metrics", Some(local(9474)), None;
    socket: PathBuf, "agent.socket", SOCKET.into(), SOCKET.into();
    survey_seconds: Number<1, { u32::MAX }>, "agent.survey-seconds", Number(300), Number(300);
    nri_enabled: bool, "agent.nri.enabled", false, false;
    nri_socket: PathBuf, "agent.nri.socket", NRI_SOCKET.into(), NRI_SOCKET.into();
    kubeconfig: Option<PathBuf>, "agent.kubernetes.kubeconfig", None, None;
    node: String, "agent.kubernetes.node", String::new(), String::new();
    events: EventMode, "agent.events.mode", EventMode::Off, EventMode::Off;
    event_requests: Number<1, 600>, "agent.events.requests-per-minute", Number(6), Number(6);
    kubediag_enabled: bool, "agent.kubediag.enabled", false, false;
    // Port 8090 is that of kubediag's own agent on the same node.
    kubediag_listen: SocketAddr, "agent.kubediag.listen", local(9475), local(9475);
    refresh: RefreshMode, "refresh.mode", RefreshMode::Annotated, RefreshMode::Off;
}

const JOURNAL: &str = "/run/bindguard/journal.jsonl";
const SOCKET: &str = "/run/bindguard/agent.sock";
const NRI_SOCKET: &str = "/var/run/nri/nri.sock";

fn kubelet_roots() -> Vec<PathBuf> {
    Places::default().kubelet_roots
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// The keys by which bindguard changes a node or a container. A mistake that may be about any of them
/// makes the first three "report" and the last "off".
pub const CHANGING_KEYS: [&str; 4] = [
    "checks.stale-subpaths",
    "checks.host-root",
    "checks.mounts-below-emptydir",
    "refresh.mode",
];

impl Settings {
    /// The same settings without a change of the node: no check repairs, and nothing is refreshed.
    #[must_use]
    pub(crate) fn only_report(self) -> Self {
        Self {
            stale_subpaths: self.stale_subpaths.without_repair(),
            host_root: self.host_root.without_repair(),
            below_emptydirs: match self.below_emptydirs {
                BelowEmptyDirs::Off => BelowEmptyDirs::Off,
                BelowEmptyDirs::Report | BelowEmptyDirs::Detach => BelowEmptyDirs::Report,
            },
            refresh: RefreshMode::Off,
            ..self
        }
    }
}

/// A mistake in a value: its place in the text, and what is expected there.
#[derive(Debug)]
pub(crate) struct Mistake {
    pub(crate) place: Range<usize>,
    pub(crate) expected: String,
}

/// A kind of value.
pub(crate) trait Setting: Clone {
    /// Reads a value. `None` if it is unreadable; a list may also be read without its unreadable
    /// elements.
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        let read = Self::from_value(value.get_ref());
        if read.is_none() {
            mistakes.push(Mistake {
                place: value.span(),
                expected: Self::expected(),
            });
        }
        read
    }

    fn from_value(value: &DeValue<'_>) -> Option<Self>;

    /// The valid values, in words.
    fn expected() -> String;

    /// The value as the file would state it.
    fn shown(&self) -> Value;
}

/// A value from a fixed list of words.
pub(crate) trait Choice: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];
}

impl<T: Choice> Setting for T {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        let text = value.as_str()?;
        let found = Self::WORDS.iter().find(|(word, _)| *word == text);
        Some(found?.1)
    }

    /// `"a", "b" or "c"`
    fn expected() -> String {
        let mut expected = String::new();
        for (n, (word, _)) in Self::WORDS.iter().enumerate() {
            let before = match n {
                0 => "",
                n if n + 1 == Self::WORDS.len() => " or ",
                _ => ", ",
            };
            expected.push_str(&format!("{before}{word:?}"));
        }
        expected
    }

    fn shown(&self) -> Value {
        let found = Self::WORDS.iter().find(|(_, choice)| choice == self);
        Value::from(found.map_or("", |(word, _)| word))
    }
}

impl Choice for Mode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("repair", Self::Repair),
        ("report", Self::Report),
        ("off", Self::Off),
    ];
}

impl Choice for Alarm {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("report", Self::Report),
        ("refuse", Self::Refuse),
        ("off", Self::Off),
    ];
}

impl Choice for Vanished {
    const WORDS: &'static [(&'static str, Self)] =
        &[("leave", Self::Leave), ("remake", Self::Remake)];
}

impl Choice for BelowEmptyDirs {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("report", Self::Report),
        ("detach", Self::Detach),
        ("off", Self::Off),
    ];
}

impl Choice for FailedRepair {
    const WORDS: &'static [(&'static str, Self)] =
        &[("pass", Self::Pass), ("refuse", Self::Refuse)];
}

impl Choice for Scope {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("host-root", Self::HostRoot),
        ("runtime-dirs", Self::RuntimeDirectories),
        ("any-submounts", Self::AnySubmounts),
    ];
}

impl Choice for ReadOnlyBinds {
    const WORDS: &'static [(&'static str, Self)] =
        &[("rslave", Self::MakeRslave), ("keep", Self::Keep)];
}

impl Choice for RefreshMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("annotated", Self::Annotated),
        ("all", Self::All),
        ("off", Self::Off),
    ];
}

/// The events that the agent writes to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventMode {
    /// None.
    Off,
    /// Those of type Warning.
    Warnings,
    /// All.
    All,
}

impl Choice for EventMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("off", Self::Off),
        ("warnings", Self::Warnings),
        ("all", Self::All),
    ];
}

impl FromStr for EventMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::from_value(&DeValue::String(text.into()))
            .ok_or_else(|| format!("expected {}", Self::expected()))
    }
}

impl Setting for bool {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        value.as_bool()
    }

    fn expected() -> String {
        "true or false".to_owned()
    }

    fn shown(&self) -> Value {
        Value::from(*self)
    }
}

/// A whole number from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Number<const MIN: u32, const MAX: u32>(pub(crate) u32);

impl<const MIN: u32, const MAX: u32> Setting for Number<MIN, MAX> {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        let integer = value.as_integer()?;
        let number = u32::from_str_radix(integer.as_str(), integer.radix()).ok()?;
        (MIN..=MAX).contains(&number).then_some(Self(number))
    }

    fn expected() -> String {
        format!("a number from {MIN} to {MAX}")
    }

    fn shown(&self) -> Value {
        Value::from(self.0)
    }
}

/// A text, which may be empty.
impl Setting for String {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }

    fn expected() -> String {
        "a text in quotes".to_owned()
    }

    fn shown(&self) -> Value {
        Value::from(self.as_str())
    }
}

/// A program: a path, or a name to search for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program(pub(crate) String);

impl Program {
    fn runc() -> Self {
        Self("runc".to_owned())
    }
}

impl Setting for Program {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        let name = value.as_str()?;
        let is_name = !name.is_empty() && !name.contains('\0');
        is_name.then(|| Self(name.to_owned()))
    }

    fn expected() -> String {
        "a path, or a program's name".to_owned()
    }

    fn shown(&self) -> Value {
        Value::from(self.0.as_str())
    }
}

/// An absolute path. A relative path would depend on the directory from which a runtime is called,
/// and match nothing. No file's name has a NUL byte, and a system call with a NUL byte would fail.
impl Setting for PathBuf {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        let path = value.as_str()?;
        let is_absolute = path.starts_with('/') && !path.contains('\0');
        is_absolute.then(|| path.into())
    }

    fn expected() -> String {
        "an absolute path, \"/...\"".to_owned()
    }

    fn shown(&self) -> Value {
        Value::from(self.to_string_lossy().into_owned())
    }
}

/// An absolute path; empty for none.
impl Setting for Option<PathBuf> {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        if value.as_str() == Some("") {
            return Some(None);
        }
        PathBuf::from_value(value).map(Some)
    }

    fn expected() -> String {
        format!("{}, or \"\"", PathBuf::expected())
    }

    fn shown(&self) -> Value {
        self.as_ref().map_or(Value::from(""), Setting::shown)
    }
}

/// A list of absolute paths. Invalid elements are skipped; a list that has only invalid elements is
/// unreadable.
impl Setting for Vec<PathBuf> {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        let Some(elements) = value.get_ref().as_array() else {
            mistakes.push(Mistake {
                place: value.span(),
                expected: Self::expected(),
            });
            return None;
        };
        let mut read = Self::new();
        for element in elements {
            read.extend(PathBuf::read(element, mistakes));
        }
        if read.is_empty() && !elements.is_empty() {
            return None;
        }
        Some(read)
    }

    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        let elements = value.as_array()?.iter();
        elements
            .map(|path| PathBuf::from_value(path.get_ref()))
            .collect()
    }

    fn expected() -> String {
        "a list of absolute paths, [\"/...\"]".to_owned()
    }

    fn shown(&self) -> Value {
        Value::Array(self.iter().map(Setting::shown).collect())
    }
}

impl Setting for SocketAddr {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }

    fn expected() -> String {
        "an address, \"IP:PORT\"".to_owned()
    }

    fn shown(&self) -> Value {
        Value::from(self.to_string())
    }
}

/// An address, or "off".
impl Setting for Option<SocketAddr> {
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        if value.as_str() == Some("off") {
            return Some(None);
        }
        SocketAddr::from_value(value).map(Some)
    }

    fn expected() -> String {
        format!("{}, or \"off\"", SocketAddr::expected())
    }

    fn shown(&self) -> Value {
        self.as_ref().map_or(Value::from("off"), Setting::shown)
    }
}
