//! The guard's admission of a new container, before the runtime writes the bundle.
//!
//! The guard reads a spec, so this module writes the request as a spec. Stale subpaths are re-bound
//! on the host; edits of the spec become an adjustment.

use std::collections::{BTreeMap, HashSet};
use std::hash::BuildHasher;
use std::mem;
use std::time::Duration;

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::identity::{OF_CONTAINERD, OF_KUBELET};
use bindguard_core::judge::refusal_of_unseen;
use bindguard_core::policy::{MODE, PROPAGATION, Policy, policy_of_pod};
use bindguard_core::spec::MAX_BINDS;
use bindguard_guard::{Admission, admit_spec};
use bindguard_sys::read_mount_table;
use prost::DecodeError;
use serde_json::json;
use tracing::warn;

use super::adjustment;
use super::messages::{
    CreateContainerRequest, NriContainer, NriMount, PodSandbox, ValidateRequest,
};
use crate::sinks::AgentLine;
use crate::sinks::metrics::{NriAnswer, TotalBy};
use crate::sources::nri::{Calls, CreateRefused};

/// The runtime waits 2 s for a plugin, then closes its connection and creates the container without
/// it.
const LIMIT: Duration = Duration::from_millis(500);

impl Calls {
    /// The adjusted mounts of a new container; none if it needs no adjustment, or could not be
    /// checked in time.
    ///
    /// # Errors
    /// If policy refuses the container. As in the shim, a policy that refuses a fault also refuses
    /// mounts that were not checked: the fault may be there.
    pub fn adjust(&self, request: CreateContainerRequest) -> Result<Vec<NriMount>, CreateRefused> {
        let container = request.container.unwrap_or_default();
        let mounts = container.first_mounts(MAX_BINDS);
        self.check_create(request.pod.unwrap_or_default(), container, mounts, true)
    }

    /// Checks the mounts that later plugins added or changed. The runtime takes no changes of
    /// these mounts.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub fn validate(&self, request: ValidateRequest) -> Result<(), CreateRefused> {
        let container = request.container.unwrap_or_default();
        let mut checked = HashSet::new();
        if let Some(created) = self.created().get_mut(&container.id) {
            checked = mem::take(&mut created.checked);
        }
        let changes = request.adjust.unwrap_or_default().mounts;
        let mounts = container.first_mounts(MAX_BINDS).map(|mounts| {
            let mut mounts = adjustment::applied(mounts, changes);
            mounts.retain(|mount| !checked.contains(&self.hasher.hash_one(mount)));
            mounts
        });
        if mounts.as_ref().is_ok_and(Vec::is_empty) {
            return Ok(());
        }
        self.check_create(request.pod.unwrap_or_default(), container, mounts, false)
            .map(drop)
    }

    fn check_create(
        &self,
        pod: PodSandbox,
        container: NriContainer,
        mounts: Result<Vec<NriMount>, DecodeError>,
        is_adjustable: bool,
    ) -> Result<Vec<NriMount>, CreateRefused> {
        let annotations = pod.annotations;
        let (id, config) = (container.id, &self.node.config);
        let (policy, _) = policy_of_pod(config.policy(), |name| annotations.get(name));
        let mounts = match mounts {
            Ok(mounts) => mounts,
            Err(error) => return self.not_checked(&id, &error_chain(&error), false, &policy),
        };
        let mut overlooked = None;
        if container.mounts.len() > MAX_BINDS {
            let count = container.mounts.len() - MAX_BINDS;
            let unseen = format!("{count} mounts behind the first {MAX_BINDS} were not checked");
            if let Some(reason) = refusal_of_unseen(&unseen, &policy) {
                return Err(self.refused(&id, reason));
            }
            overlooked = Some(unseen);
        }
        let names = [container.name, pod.uid, pod.namespace, pod.name];
        let work = move || {
            let annotation = |name: &str| annotations.get(name);
            let admitted = admitted(&names, annotation, &mounts, is_adjustable, config);
            (admitted, mounts)
        };
        let admitted = self.creating.within(&container.pod_sandbox_id, LIMIT, work);
        let ((mut admission, adjusted), mounts) = match admitted {
            Ok(admitted) => admitted,
            Err(late) => return self.not_checked(&id, &late.to_string(), late.is_late(), &policy),
        };
        admission.report.problems.extend(overlooked);
        self.node.metrics.checked(&admission.report);
        self.report(AgentLine::NriCreate(id.clone(), None, admission.report));
        if let Some(reason) = admission.refusal {
            return Err(self.refused(&id, reason));
        }
        let mut checked = HashSet::new();
        if is_adjustable {
            self.answered(match adjusted.is_empty() {
                true => NriAnswer::Unchanged,
                false => NriAnswer::Adjusted,
            });
            for mount in adjustment::applied(mounts, adjusted.clone()) {
                checked.insert(self.hasher.hash_one(mount));
            }
        }
        self.keep(&id, admission.expected, checked);
        Ok(adjusted)
    }

    /// Answers a request that could not be read.
    ///
    /// # Errors
    /// If the node's policy refuses mounts that were not checked.
    pub fn unread_create(&self, error: &DecodeError) -> Result<Vec<NriMount>, CreateRefused> {
        let why = format!("read the runtime's request: {}", error_chain(error));
        self.not_checked("without an id", &why, false, self.node.config.policy())
    }

    fn not_checked(
        &self,
        id: &str,
        why: &str,
        is_late: bool,
        policy: &Policy,
    ) -> Result<Vec<NriMount>, CreateRefused> {
        let unseen = format!("the plugin could not check the mounts ({why})");
        if let Some(reason) = refusal_of_unseen(&unseen, policy) {
            return Err(self.refused(id, reason));
        }
        self.answered(match is_late {
            true => NriAnswer::TimedOut,
            false => NriAnswer::Failed,
        });
        warn!("container {id} is created as it is: check its mounts: {why}");
        Ok(Vec::new())
    }

    fn answered(&self, answer: NriAnswer) {
        self.node.metrics.count_by(TotalBy::NriCreates, answer, 1);
    }

    fn refused(&self, id: &str, reason: String) -> CreateRefused {
        self.answered(NriAnswer::Refused);
        warn!("container {id} is refused: {reason}");
        CreateRefused(reason)
    }
}

fn admitted<'a>(
    names: &'a [String; 4],
    annotation: impl Fn(&str) -> Option<&'a str>,
    mounts: &[NriMount],
    is_adjustable: bool,
    config: &Config,
) -> (Admission, Vec<NriMount>) {
    let spec = spec(names, annotation, mounts).to_string();
    let mut accepted = Vec::new();
    let admission = admit_spec(
        spec.as_bytes(),
        config.policy(),
        config.places(),
        LIMIT,
        |_, edits| {
            if edits.is_empty() || !is_adjustable {
                return Vec::new();
            }
            let table = read_mount_table().ok();
            accepted = adjustment::accepted(edits, mounts, table.as_ref());
            accepted.clone()
        },
    );
    (admission, adjustment::mounts(&accepted, mounts))
}

/// The request as a spec. `names`: the container's name, and the pod's uid, namespace and name, as
/// the runtime reports them, whatever the pod's annotations claim. The runtime itself makes the root
/// rslave for every rslave mount, so the spec has it already.
fn spec<'a>(
    names: &'a [String; 4],
    annotation: impl Fn(&str) -> Option<&'a str>,
    mounts: &[NriMount],
) -> serde_json::Value {
    let mut annotations = BTreeMap::new();
    for name in [MODE, PROPAGATION] {
        annotations.extend(annotation(name).map(|value| (name, value)));
    }
    for keys in [OF_CONTAINERD, OF_KUBELET] {
        annotations.extend(keys.into_iter().zip(names.iter().map(String::as_str)));
    }
    json!({"annotations": annotations, "linux": {"rootfsPropagation": "rslave"}, "mounts": mounts})
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::sync::mpsc::channel;

    use bindguard_core::identity::{Identity, MANAGER};
    use bindguard_core::spec::SpecView;

    use super::*;
    use crate::sources::nri::NoResult;
    use crate::work::Node;

    /// The shim refuses a container whose guard is late.
    #[test]
    fn a_late_check_is_refused_by_policy() {
        for (config, is_refused) in [
            ("", false),
            ("checks.dead-sources = 'refuse'", true),
            ("checks.proof = 'refuse'", true),
        ] {
            let node = Node::silent(config);
            let calls = Calls::new(node);
            // Checks of other containers of the pod hang: no check of the pod begins.
            let mut hanging = Vec::new();
            let busy = loop {
                let (keep, never) = channel::<()>();
                hanging.push(keep);
                let work = move || never.recv().is_ok();
                let no_result = calls.creating.within("", Duration::ZERO, work);
                let no_result = no_result.unwrap_err();
                if matches!(no_result, NoResult::Busy(_)) {
                    break no_result;
                }
            };
            assert!(busy.is_late());
            let answer = calls.adjust(CreateContainerRequest::default());
            assert_eq!(answer.is_err(), is_refused, "{answer:?}");
            let figures = node.metrics.text().unwrap();
            let word = if is_refused { "refused" } else { "timed_out" };
            let counted = format!("bindguard_nri_creates_total{{answer=\"{word}\"}} 1\n");
            assert!(figures.contains(&counted), "{figures}");
        }
    }

    #[test]
    fn a_pods_annotations_choose_no_names() {
        let names = ["app", "u-1", "default", "web"].map(str::to_owned);
        let spec = spec(&names, |_| Some("libpod"), &[]).to_string();
        let view = SpecView::from_bytes(spec.as_bytes()).unwrap();
        assert_eq!(Identity::from_spec(&view).pod.uid.as_deref(), Some("u-1"));
        assert_eq!(view.annotation(MANAGER), None);
        assert_eq!(view.annotation(MODE), Some("libpod"));
    }
}
