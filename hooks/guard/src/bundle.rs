//! The beginning of an admission, a check and a proof: a single read of config.json, and the policy
//! for its pod. And the bundle of a container that runs, from the state files of its runtime.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bindguard_core::identity::Identity;
use bindguard_core::judge::{Finding, Plan, refusal_of_unseen};
use bindguard_core::policy::{Policy, policy_of_pod};
use bindguard_core::report::Report;
use bindguard_core::spec::{Bind, SpecError, SpecView};
use bindguard_sys::bundle::read_spec;
use bindguard_sys::{Failure, OldKernel, require_calls, unless_absent};
use serde::Deserialize;

/// Why a bundle could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// config.json could not be read.
    #[error(transparent)]
    Read(#[from] Failure),
    /// It is not a spec.
    #[error(transparent)]
    Parse(#[from] SpecError),
    /// Nothing can be compared and repaired on this kernel.
    #[error(transparent)]
    Kernel(#[from] OldKernel),
}

/// A report with the names that the bundle has. A bundle that cannot be read has no names: the runtime
/// reports the bundle.
pub(crate) fn named_report(bundle: &Path) -> Report {
    let mut report = Report::about_bundle(bundle);
    if let Ok(bytes) = read_spec(bundle)
        && let Ok(spec) = SpecView::from_bytes(&bytes)
    {
        report.container = Identity::from_spec(&spec);
    }
    report
}

/// A bundle whose spec is parsed, and the policy for its pod.
pub(crate) struct OpenBundle<'b> {
    pub path: &'b Path,
    /// A view of its spec.
    pub spec: SpecView<'b>,
    /// The node's policy, with the changes of the pod's annotations.
    pub policy: Cow<'b, Policy>,
    /// Annotations that are not followed.
    not_followed: Vec<String>,
}

impl<'b> OpenBundle<'b> {
    /// The bundle at `path`, whose spec has these bytes. Relative sources are relative to `path`.
    ///
    /// # Errors
    /// If the kernel is too old, or the bytes are no spec.
    pub fn parse(bytes: &'b [u8], path: &'b Path, node: &'b Policy) -> Result<Self, OpenError> {
        require_calls()?;
        let spec = SpecView::from_bytes(bytes)?;
        let (policy, not_followed) = policy_of_pod(node, |name| spec.annotation(name));
        Ok(Self {
            path,
            spec,
            policy,
            not_followed,
        })
    }

    /// The plan for the findings in its binds. Policy may refuse a spec with unchecked parts.
    pub fn plan(&self, findings: &[Finding]) -> Plan {
        let mut plan = Plan::from_findings(findings, &self.policy);
        let unseen = || refusal_of_unseen(&self.spec.overlooked()?, &self.policy);
        plan.refusal = plan.refusal.or_else(unseen);
        plan
    }

    /// Adds the container's names, the parts that are not checked, and the annotations that are not
    /// followed.
    pub fn describe(&self, report: &mut Report) {
        report.container = Identity::from_spec(&self.spec);
        report.problems.extend(self.spec.overlooked());
        report.problems.extend(self.not_followed.iter().cloned());
    }
}

/// The source of a bind; a relative source is relative to the bundle.
pub(crate) fn source_of<'a>(bind: &'a Bind<'_>, bundle: &Path) -> Cow<'a, Path> {
    let source = bind.source();
    if source.is_absolute() {
        source.into()
    } else {
        bundle.join(source).into()
    }
}

// The bundle and the init process of a container, from the state files of crun, runc and youki.
//
// `status` of crun (`libcrun_container_status_s`), `state.json` of runc (`libcontainer.State`) and of
// youki (`libcontainer::container::State`).

#[derive(Debug, Deserialize)]
struct CrunStatus {
    pid: u32,
    bundle: PathBuf,
}

#[derive(Debug, Deserialize)]
struct RuncState {
    init_process_pid: u32,
    config: RuncConfig,
}

#[derive(Debug, Deserialize)]
struct RuncConfig {
    labels: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct YoukiState {
    pid: Option<u32>,
    bundle: PathBuf,
}

/// The bundle and the init process of a container with this state folder.
pub fn bundle_and_pid(state: &Path) -> Option<(PathBuf, u32)> {
    read_bundle_and_pid(state).ok().flatten()
}

fn read_bundle_and_pid(state: &Path) -> io::Result<Option<(PathBuf, u32)>> {
    let status = unless_absent(fs::read(state.join("status")))?.unwrap_or_default();
    let json = unless_absent(fs::read(state.join("state.json")))?.unwrap_or_default();
    let found = of_crun(&status)
        .or_else(|| of_runc(&json))
        .or_else(|| of_youki(&json));
    Ok(found.filter(|(_, pid)| *pid > 0))
}

fn of_crun(status: &[u8]) -> Option<(PathBuf, u32)> {
    let status: CrunStatus = serde_json::from_slice(status).ok()?;
    Some((status.bundle, status.pid))
}

fn of_runc(state: &[u8]) -> Option<(PathBuf, u32)> {
    let state: RuncState = serde_json::from_slice(state).ok()?;
    let bundle = state
        .config
        .labels
        .iter()
        .find_map(|label| label.strip_prefix("bundle="))?;
    Some((bundle.into(), state.init_process_pid))
}

fn of_youki(state: &[u8]) -> Option<(PathBuf, u32)> {
    let state: YoukiState = serde_json::from_slice(state).ok()?;
    Some((state.bundle, state.pid?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn the_state_of_each_runtime_is_read() {
        for (name, state, pid) in [
            (
                "status",
                r#"{"pid":7,"bundle":"/b","rootfs":"/b/rootfs"}"#,
                7,
            ),
            (
                "state.json",
                r#"{"init_process_pid":8,"config":{"labels":["a=1","bundle=/b"]}}"#,
                8,
            ),
            (
                "state.json",
                r#"{"ociVersion":"v1.0.2","id":"c","status":"created","pid":9,"bundle":"/b"}"#,
                9,
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), state).unwrap();
            assert_eq!(
                bundle_and_pid(folder.path()),
                Some(("/b".into(), pid)),
                "{state}"
            );
        }
        assert_eq!(bundle_and_pid(Path::new("/nowhere")), None);
    }
}
