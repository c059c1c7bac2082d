//! The guard's admission of a new container, before the runtime writes the bundle.
//!
//! The guard reads a spec, so this module writes the request as a spec. Stale subpaths are re-bound
//! on the host; edits of the spec become an adjustment.

use std::sync::Arc;
use std::time::Duration;

use bindguard_config::Config;
use bindguard_core::identity::{MANAGER, OF_CONTAINERD, OF_KUBELET};
use bindguard_guard::{Admission, admit_spec};
use bindguard_sys::read_mount_table;
use serde_json::json;
use tracing::warn;

use super::adjustment;
use super::calls::{Calls, CreateRefused};
use super::messages::{CreateContainerRequest, NriContainer, NriMount, PodSandbox};
use super::reports::NriReport;
use crate::sinks::metrics::NriAnswer;

/// The runtime waits 2 s for a plugin, then closes its connection and creates the container without
/// it.
const LIMIT: Duration = Duration::from_millis(500);

impl Calls {
    /// The adjusted mounts of a new container; none if it needs no adjustment, or could not be
    /// checked in time.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub fn adjust(&self, request: CreateContainerRequest) -> Result<Vec<NriMount>, CreateRefused> {
        let (pod, container) = (
            request.pod.unwrap_or_default(),
            request.container.unwrap_or_default(),
        );
        let (id, config) = (container.id.clone(), Arc::clone(&self.config));
        match self
            .creating
            .within(LIMIT, move || admitted(&pod, &container, &config))
        {
            Ok((admission, mounts)) => {
                self.metrics.nri.checked(&admission.report);
                self.metrics
                    .nri
                    .answered(match (&admission.refusal, mounts.is_empty()) {
                        (Some(_), _) => NriAnswer::refused,
                        (None, false) => NriAnswer::adjusted,
                        (None, true) => NriAnswer::unchanged,
                    });
                self.report(NriReport::Create(id.clone(), admission.report));
                if let Some(reason) = admission.refusal {
                    return Err(CreateRefused(reason));
                }
                self.expected.keep(id, admission.expected);
                Ok(mounts)
            }
            Err(no_result) => {
                self.metrics.nri.answered(match no_result.is_late() {
                    true => NriAnswer::timed_out,
                    false => NriAnswer::failed,
                });
                warn!("container {id} is created as it is: check its mounts: {no_result}");
                Ok(Vec::new())
            }
        }
    }
}

fn admitted(
    pod: &PodSandbox,
    container: &NriContainer,
    config: &Config,
) -> (Admission, Vec<NriMount>) {
    let spec = spec(pod, container).to_string();
    let mut accepted = Vec::new();
    let admission = admit_spec(
        spec.as_bytes(),
        config.policy(),
        config.places(),
        LIMIT,
        |_, edits| {
            let table = if edits.is_empty() {
                None
            } else {
                read_mount_table().ok()
            };
            accepted = adjustment::accepted(edits, &container.mounts, table.as_ref());
            accepted.clone()
        },
    );
    (admission, adjustment::mounts(&accepted, &container.mounts))
}

/// The request as a spec. The runtime itself makes the root rslave for every rslave mount, so the
/// spec has it already.
fn spec(pod: &PodSandbox, container: &NriContainer) -> serde_json::Value {
    let mut annotations = pod.annotations.clone();
    // The names are the runtime's, whatever the pod's annotations claim.
    annotations.remove(MANAGER);
    let names = [&container.name, &pod.uid, &pod.namespace, &pod.name];
    for keys in [OF_CONTAINERD, OF_KUBELET] {
        annotations.extend(
            keys.map(str::to_owned)
                .into_iter()
                .zip(names.map(Clone::clone)),
        );
    }
    let mount = |mount: &NriMount| {
        let NriMount {
            destination,
            r#type,
            source,
            options,
        } = mount;
        json!({"destination": destination, "type": r#type, "source": source, "options": options})
    };
    let mounts: Vec<_> = container.mounts.iter().map(mount).collect();
    json!({"annotations": annotations, "linux": {"rootfsPropagation": "rslave"}, "mounts": mounts})
}

#[cfg(test)]
mod tests {
    use bindguard_core::identity::Identity;
    use bindguard_core::spec::SpecView;

    use super::*;

    #[test]
    fn a_pods_annotations_choose_no_names() {
        let forged = [OF_CONTAINERD[1], OF_KUBELET[1], MANAGER];
        let forged = forged.map(|key| (key.to_owned(), "libpod".to_owned()));
        let pod = PodSandbox {
            uid: "u-1".to_owned(),
            annotations: forged.into(),
            ..PodSandbox::default()
        };
        let bytes = spec(&pod, &NriContainer::default()).to_string();
        let view = SpecView::from_bytes(bytes.as_bytes()).expect("a spec");
        let names = Identity::from_spec(&view).pod;
        assert_eq!(names.uid.as_deref(), Some("u-1"));
    }
}
