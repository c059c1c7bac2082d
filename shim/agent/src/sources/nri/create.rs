//! The guard's admission of a new container, before the runtime writes the bundle.
//!
//! The guard reads a spec, so this module writes the request as a spec. Stale subpaths are re-bound
//! on the host; edits of the spec become an adjustment, limited to those that a runtime carries out.

use std::collections::{BTreeMap, HashSet};
use std::hash::BuildHasher;
use std::mem;
use std::path::{Component, Path};
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::identity::{OF_CONTAINERD, OF_KUBELET};
use bindguard_core::judge::refusal_of_unseen;
use bindguard_core::mount_table::MountTable;
use bindguard_core::policy::{MODE, PROPAGATION, Policy, policy_of_pod};
use bindguard_core::spec::{MAX_BINDS, RequestedPropagation, SpecEdit};
use bindguard_guard::admit_spec;
use bindguard_sys::read_mount_table;
use prost::DecodeError;
use serde_json::json;
use tracing::warn;

use super::messages::{
    CreateContainerRequest, NriContainer, NriMount, PodSandbox, ValidateRequest,
};
use super::ttrpc::RpcStatus;
use crate::sinks::AgentLine;
use crate::sinks::metrics::{NriAnswer, TotalBy};
use crate::sources::nri::Calls;

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
    pub fn adjust(&self, request: CreateContainerRequest) -> Result<Vec<NriMount>, RpcStatus> {
        let container = request.container.unwrap_or_default();
        let mounts = container.first_mounts(MAX_BINDS);
        self.check_create(request.pod.unwrap_or_default(), container, mounts, true)
    }

    /// Checks the mounts that later plugins added or changed. The runtime takes no changes of
    /// these mounts.
    ///
    /// # Errors
    /// If policy refuses the container.
    pub fn validate(&self, request: ValidateRequest) -> Result<(), RpcStatus> {
        let container = request.container.unwrap_or_default();
        let mut checked = HashSet::new();
        if let Some(created) = self.created().get_mut(&container.id) {
            checked = mem::take(&mut created.checked);
        }
        let changes = request.adjust.unwrap_or_default().mounts;
        let mounts = container.first_mounts(MAX_BINDS).map(|mounts| {
            let mut mounts = applied(mounts, changes);
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
    ) -> Result<Vec<NriMount>, RpcStatus> {
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
            let spec = spec(&names, |name| annotations.get(name), &mounts).to_string();
            let (policy, places) = (config.policy(), config.places());
            let mut changed = Vec::new();
            let admission = admit_spec(spec.as_bytes(), policy, places, LIMIT, |_, edits| {
                if edits.is_empty() || !is_adjustable {
                    return Vec::new();
                }
                let table = read_mount_table().ok();
                let accepted = accepted(edits, &mounts, table.as_ref());
                changed = changes(&accepted, &mounts);
                accepted
            });
            (admission, changed, mounts)
        };
        let admitted = self.creating.within(&container.pod_sandbox_id, LIMIT, work);
        let (mut admission, adjusted, mounts) = match admitted {
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
            for mount in applied(mounts, adjusted.clone()) {
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
    pub fn unread_create(&self, error: &DecodeError) -> Result<Vec<NriMount>, RpcStatus> {
        let why = format!("read the runtime's request: {}", error_chain(error));
        self.not_checked("without an id", &why, false, self.node.config.policy())
    }

    fn not_checked(
        &self,
        id: &str,
        why: &str,
        is_late: bool,
        policy: &Policy,
    ) -> Result<Vec<NriMount>, RpcStatus> {
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

    fn refused(&self, id: &str, reason: String) -> RpcStatus {
        self.answered(NriAnswer::Refused);
        warn!("container {id} is refused: {reason}");
        RpcStatus::refused(&reason)
    }
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

// The adjustment.
//
// A mount is changed by removing and adding the same destination. The runtime sets
// `linux.rootfsPropagation` for an added rslave mount itself, but fails the create if the source
// is on a private mount (`pkg/runtime-tools/generate`). The runtime finds the mount by the
// source's text and follows no symlink, so this module does too.

const RSLAVE: &str = "rslave";

/// The edits that a runtime carries out. `None`: the mount table could not be read, so the
/// propagation of no source is known.
fn accepted(edits: &[SpecEdit], mounts: &[NriMount], table: Option<&MountTable>) -> Vec<SpecEdit> {
    let mut destinations = HashSet::new();
    let mut accepted = edits.to_vec();
    for mount in mounts {
        // A runtime removes one mount of a destination, and sorts mounts afterwards: of two mounts
        // on a destination the wrong mount could win.
        if !destinations.insert(&mount.destination) {
            return Vec::new();
        }
    }
    accepted.retain(|edit| match edit {
        SpecEdit::Source { bind, to } => {
            // The runtime checks the new source's mount for these, and earlier versions for all
            // later mounts.
            let is_checked = |option: &String| option == RSLAVE || option == "rshared";
            let mount = mounts.get(*bind);
            let is_checked = mount.is_none_or(|mount| mount.options.iter().any(is_checked));
            to.to_str().is_some() && !is_checked
        }
        SpecEdit::BindRslave { bind } => match (mounts.get(*bind), table) {
            (Some(mount), Some(table)) => accepts_rslave(Path::new(&mount.source), table),
            _ => false,
        },
        SpecEdit::RootfsRslave => false,
    });
    accepted
}

/// True if all mounts at the nearest mount point above the source are shared or slaves.
fn accepts_rslave(source: &Path, table: &MountTable) -> bool {
    if !source.is_absolute() || source.components().any(|part| part == Component::ParentDir) {
        return false;
    }
    let mut above = source.ancestors();
    let nearest = above.find(|above| table.stack_at(above).next().is_some());
    nearest.is_some_and(|point| {
        let mut stack = table.stack_at(point);
        stack.all(|mount| mount.propagation.passes_umounts_on())
    })
}

/// The removed and added mounts. New sources come first: some versions of nri apply the propagation
/// of an added mount to the next mount.
fn changes(edits: &[SpecEdit], mounts: &[NriMount]) -> Vec<NriMount> {
    let (mut sources, mut slaves) = (Vec::new(), Vec::new());
    for edit in edits {
        match edit {
            SpecEdit::Source { bind, to } => {
                if let (Some(mount), Some(to)) = (mounts.get(*bind), to.to_str()) {
                    let source = to.to_owned();
                    sources.push(NriMount {
                        source,
                        ..mount.clone()
                    });
                }
            }
            SpecEdit::BindRslave { bind } => slaves.extend(mounts.get(*bind).map(made_rslave)),
            SpecEdit::RootfsRslave => {}
        }
    }
    let mut changes = Vec::new();
    for mount in sources.into_iter().chain(slaves) {
        changes.push(NriMount {
            destination: format!("-{}", mount.destination),
            ..NriMount::default()
        });
        changes.push(mount);
    }
    changes
}

/// The mounts of a container with the changes of all plugins.
fn applied(mut mounts: Vec<NriMount>, changes: Vec<NriMount>) -> Vec<NriMount> {
    let mut added = Vec::new();
    for change in changes {
        match change.destination.strip_prefix('-') {
            Some(removed) => mounts.retain(|mount| mount.destination != removed),
            None => added.push(change),
        }
    }
    mounts.extend(added);
    mounts
}

/// runc applies all propagation options in order, so every option that lowers propagation is
/// removed.
fn made_rslave(mount: &NriMount) -> NriMount {
    let mut mount = mount.clone();
    mount.options.retain(|option| {
        let requested = RequestedPropagation::from_option(option);
        !requested.is_some_and(RequestedPropagation::keeps_host_mounts_alive)
    });
    mount.options.push(RSLAVE.to_owned());
    mount
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

#[cfg(test)]
mod adjustment_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    const TABLE: &str = "\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 21 0:9 / /run rw - tmpfs tmpfs rw
31 21 0:10 / /srv rw master:7 - tmpfs tmpfs rw
32 21 0:11 / /twice rw - tmpfs tmpfs rw
33 32 0:12 / /twice rw shared:9 - tmpfs tmpfs rw
";

    fn bind(source: &str, destination: &str, options: &[&str]) -> NriMount {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        NriMount {
            destination: destination.into(),
            r#type: "bind".into(),
            source: source.into(),
            options,
        }
    }

    fn are_accepted(edit: SpecEdit, of: &[NriMount]) -> bool {
        !accepted(
            &[edit],
            of,
            Some(&MountTable::from_mountinfo(TABLE.as_bytes()).unwrap()),
        )
        .is_empty()
    }

    #[test]
    fn rslave_is_requested_only_where_the_runtime_accepts_it() {
        let edit = || SpecEdit::BindRslave { bind: 0 };
        for source in ["/", "/var/lib", "/srv", "/srv/a"] {
            assert!(
                are_accepted(edit(), &[bind(source, "/host", &["rbind"])]),
                "{source}"
            );
        }
        // The last source is a link to a shared mount on some nodes; the runtime checks the mount
        // of the link's path.
        for source in [
            "/run",
            "/run/containerd",
            "/twice",
            "/srv/../run",
            "relative",
            "/run/link",
        ] {
            assert!(
                !are_accepted(edit(), &[bind(source, "/host", &["rbind"])]),
                "{source}"
            );
        }
        assert!(accepted(&[edit()], &[bind("/", "/host", &[])], None).is_empty());
    }

    #[test]
    fn nothing_is_adjusted_if_two_mounts_have_one_destination() {
        let twice = [
            bind("/", "/host", &["rbind"]),
            bind("/srv", "/host", &["rbind"]),
        ];
        assert!(!are_accepted(SpecEdit::BindRslave { bind: 0 }, &twice));
    }

    #[test]
    fn a_new_source_is_not_requested_for_a_mount_whose_propagation_the_runtime_would_check() {
        let edit = || SpecEdit::Source {
            bind: 0,
            to: "/new".into(),
        };
        assert!(are_accepted(
            edit(),
            &[bind("/old", "/a", &["rbind", "rprivate"])]
        ));
        assert!(!are_accepted(
            edit(),
            &[bind("/old", "/a", &["rbind", "rslave"])]
        ));
        assert!(!are_accepted(
            SpecEdit::RootfsRslave,
            &[bind("/old", "/a", &[])]
        ));
    }

    #[test]
    fn the_changes_of_all_plugins_are_applied() {
        let old = [bind("/", "/host", &["rbind"]), bind("/old", "/a", &["ro"])];
        let by_bindguard = changes(&[SpecEdit::BindRslave { bind: 0 }], &old);
        let later = bind("/later", "/b", &[]);
        let changes = [by_bindguard, vec![later.clone()]].concat();
        assert_eq!(
            applied(old.to_vec(), changes),
            [old[1].clone(), made_rslave(&old[0]), later]
        );
    }

    #[test]
    fn a_mount_is_removed_and_added_with_its_other_options() {
        let old = [
            bind("/", "/host", &["rbind", "rprivate", "ro"]),
            bind("/old", "/a", &["rbind", "ro"]),
        ];
        let edits = [
            SpecEdit::BindRslave { bind: 0 },
            SpecEdit::Source {
                bind: 1,
                to: "/new".into(),
            },
        ];
        let removed = |destination: &str| NriMount {
            destination: destination.to_owned(),
            ..NriMount::default()
        };
        assert_eq!(
            changes(&edits, &old),
            [
                removed("-/a"),
                bind("/new", "/a", &["rbind", "ro"]),
                removed("-/host"),
                bind("/", "/host", &["rbind", "ro", "rslave"]),
            ]
        );
    }
}
