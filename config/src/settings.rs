//! Every key of `config.toml`, once: its name, its default, and the value that applies where the
//! file's value is unreadable.
//!
//! Reading, showing and checking a config all go through [`Settings::visit`], so they cannot
//! disagree.

use std::net::SocketAddr;

use bindguard_core::places::Places;
use bindguard_core::policy::{
    Alarm, BelowEmptyDirs, FailedRepair, Mode, ReadOnlyBinds, Scope, Vanished,
};
use bindguard_core::refresh_request::RefreshMode;

use crate::event_mode::EventMode;
use crate::value::{Absolute, Number, OptionalPath, Program, Setting};

/// The values of all keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) deadline_ms: Number<1, 600_000>,
    pub(crate) failed_repairs: FailedRepair,
    pub(crate) runtime: Program,
    pub(crate) kubelet_roots: Vec<Absolute>,
    pub(crate) stale_subpaths: Mode,
    pub(crate) host_root: Mode,
    pub(crate) unmounted_volumes: Alarm,
    pub(crate) dead_sources: Alarm,
    pub(crate) proof: Alarm,
    pub(crate) vanished_directories: Vanished,
    pub(crate) below_emptydirs: BelowEmptyDirs,
    pub(crate) scope: Scope,
    pub(crate) read_only: ReadOnlyBinds,
    pub(crate) extra_directories: Vec<Absolute>,
    pub(crate) annotation_mode: bool,
    pub(crate) annotation_propagation: bool,
    pub(crate) journal_enabled: bool,
    pub(crate) journal: Absolute,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) socket: Absolute,
    pub(crate) survey_seconds: Number<1, { u32::MAX }>,
    pub(crate) nri_enabled: bool,
    pub(crate) nri_socket: Absolute,
    pub(crate) kubeconfig: OptionalPath,
    pub(crate) node: String,
    pub(crate) events: EventMode,
    pub(crate) event_requests: Number<1, 600>,
    pub(crate) kubediag_enabled: bool,
    pub(crate) kubediag_listen: SocketAddr,
    pub(crate) refresh: RefreshMode,
}

/// Receives every key.
pub(crate) trait Visitor {
    /// `name`: `table.key`. `if_unreadable`: the value where the file's value is a mistake.
    fn key<T: Setting>(&mut self, name: &'static str, value: &mut T, if_unreadable: T);
}

impl Default for Settings {
    fn default() -> Self {
        let roots = Places::default().kubelet_roots;
        Self {
            deadline_ms: Number(2_000),
            failed_repairs: FailedRepair::Pass,
            runtime: Program("runc".to_owned()),
            kubelet_roots: roots
                .iter()
                .map(|root| Absolute(root.to_string_lossy().into_owned()))
                .collect(),
            stale_subpaths: Mode::Repair,
            host_root: Mode::Repair,
            unmounted_volumes: Alarm::Report,
            dead_sources: Alarm::Report,
            proof: Alarm::Report,
            vanished_directories: Vanished::Leave,
            below_emptydirs: BelowEmptyDirs::Report,
            scope: Scope::RuntimeDirectories,
            read_only: ReadOnlyBinds::MakeRslave,
            extra_directories: Vec::new(),
            annotation_mode: false,
            annotation_propagation: false,
            journal_enabled: true,
            journal: absolute("/run/bindguard/journal.jsonl"),
            metrics: Some(SocketAddr::from(([127, 0, 0, 1], 9474))),
            socket: absolute("/run/bindguard/agent.sock"),
            survey_seconds: Number(300),
            nri_enabled: false,
            nri_socket: absolute("/var/run/nri/nri.sock"),
            kubeconfig: OptionalPath::default(),
            node: String::new(),
            events: EventMode::Off,
            event_requests: Number(6),
            kubediag_enabled: false,
            // Port 8090 is that of kubediag's own agent on the same node.
            kubediag_listen: SocketAddr::from(([127, 0, 0, 1], 9475)),
            refresh: RefreshMode::Annotated,
        }
    }
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

    /// Visits every key, in the order of the shipped file. A mistake in a value never makes
    /// bindguard do more than the value could have meant: checks report, and optional features are
    /// off.
    pub(crate) fn visit(&mut self, visitor: &mut impl Visitor) {
        let default = Self::default();
        visitor.key(
            "guard.deadline-ms",
            &mut self.deadline_ms,
            default.deadline_ms,
        );
        visitor.key(
            "guard.failed-repairs",
            &mut self.failed_repairs,
            FailedRepair::Pass,
        );
        visitor.key("runtime.path", &mut self.runtime, default.runtime);
        visitor.key(
            "kubelet.roots",
            &mut self.kubelet_roots,
            default.kubelet_roots,
        );
        visitor.key(
            "checks.stale-subpaths",
            &mut self.stale_subpaths,
            Mode::Report,
        );
        visitor.key("checks.host-root", &mut self.host_root, Mode::Report);
        visitor.key(
            "checks.unmounted-volumes",
            &mut self.unmounted_volumes,
            Alarm::Report,
        );
        visitor.key("checks.dead-sources", &mut self.dead_sources, Alarm::Report);
        visitor.key("checks.proof", &mut self.proof, Alarm::Report);
        visitor.key(
            "checks.vanished-directories",
            &mut self.vanished_directories,
            Vanished::Leave,
        );
        visitor.key(
            "checks.mounts-below-emptydir",
            &mut self.below_emptydirs,
            BelowEmptyDirs::Report,
        );
        visitor.key("host-root.scope", &mut self.scope, Scope::HostRoot);
        visitor.key(
            "host-root.read-only",
            &mut self.read_only,
            ReadOnlyBinds::Keep,
        );
        visitor.key(
            "host-root.extra-directories",
            &mut self.extra_directories,
            Vec::new(),
        );
        visitor.key("annotations.mode", &mut self.annotation_mode, false);
        visitor.key(
            "annotations.propagation",
            &mut self.annotation_propagation,
            false,
        );
        visitor.key(
            "journal.enabled",
            &mut self.journal_enabled,
            default.journal_enabled,
        );
        visitor.key("journal.path", &mut self.journal, default.journal);
        visitor.key("agent.metrics", &mut self.metrics, None);
        visitor.key("agent.socket", &mut self.socket, default.socket);
        visitor.key(
            "agent.survey-seconds",
            &mut self.survey_seconds,
            default.survey_seconds,
        );
        visitor.key("agent.nri.enabled", &mut self.nri_enabled, false);
        visitor.key("agent.nri.socket", &mut self.nri_socket, default.nri_socket);
        visitor.key(
            "agent.kubernetes.kubeconfig",
            &mut self.kubeconfig,
            OptionalPath::default(),
        );
        visitor.key("agent.kubernetes.node", &mut self.node, String::new());
        visitor.key("agent.events.mode", &mut self.events, EventMode::Off);
        visitor.key(
            "agent.events.requests-per-minute",
            &mut self.event_requests,
            default.event_requests,
        );
        visitor.key("agent.kubediag.enabled", &mut self.kubediag_enabled, false);
        visitor.key(
            "agent.kubediag.listen",
            &mut self.kubediag_listen,
            default.kubediag_listen,
        );
        visitor.key("refresh.mode", &mut self.refresh, RefreshMode::Off);
    }
}

fn absolute(path: &str) -> Absolute {
    Absolute(path.to_owned())
}
