//! Annotations for live refresh that have no effect: a value that is not understood, or a name that
//! no container of the pod has.
//!
//! `True` in place of `true` would otherwise go unnoticed until an update does not arrive.

use bindguard_core::identity::PodName;
use std::collections::BTreeMap;

use bindguard_core::refresh_request::{OptIn, REFRESH};
use bindguard_core::text::cut;

use crate::pods::Pods;

/// A pod with such an annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IgnoredRequest {
    pub pod: PodName,
    /// Values that are not understood.
    pub problems: Vec<String>,
    /// Names that no container of the pod has. A container that has yet to start is not known,
    /// either: only a name that stays unknown is wrong.
    pub unknown_names: Vec<String>,
}

/// The pods with such annotations.
pub fn ignored_requests(pods: &Pods) -> Vec<IgnoredRequest> {
    let mut names = BTreeMap::<&str, Vec<&str>>::new();
    for container in &pods.containers {
        if let (Some(uid), Some(name)) = (container.pod.uid.as_deref(), container.name.as_deref()) {
            names.entry(uid).or_default().push(name);
        }
    }
    let mut ignored = Vec::new();
    for (uid, request) in &pods.refresh_requests {
        let mut unknown_names = Vec::new();
        if let OptIn::Named(wanted) = &request.containers {
            let known = names.get(uid.as_str());
            for name in wanted {
                if known.is_none_or(|known| !known.contains(&name.as_str())) {
                    unknown_names.push(cut(name, 64).into());
                }
            }
        }
        if !request.problems.is_empty() || !unknown_names.is_empty() {
            ignored.push(IgnoredRequest {
                pod: pods.of_uid(uid),
                problems: request.problems.clone(),
                unknown_names,
            });
        }
    }
    ignored
}

impl IgnoredRequest {
    /// The problems in words. A name counts if the earlier findings have the name as well.
    pub fn confirmed_by(&self, earlier: &[Self]) -> Vec<String> {
        let mut problems = self.problems.clone();
        if let Some(before) = earlier.iter().find(|it| it.pod.uid == self.pod.uid) {
            for name in &self.unknown_names {
                if before.unknown_names.contains(name) {
                    problems.push(format!(
                        "ignoring {REFRESH}: the pod has no container {name:?}"
                    ));
                }
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use bindguard_core::refresh_request::RefreshRequest;

    use super::*;
    use crate::pods::PodContainer;

    fn pods(value: &'static str) -> Pods {
        let container = |name: Option<&str>| PodContainer {
            id: "c".to_owned(),
            name: name.map(str::to_owned),
            state: None,
            attempt: None,
            pod: PodName::of_uid("u"),
            guarded: None,
            shim_version: None,
        };
        let request = RefreshRequest::from_annotations(|name| (name == REFRESH).then_some(value));
        let refresh_requests = [("u".to_owned(), request)].into();
        Pods {
            containers: vec![container(None), container(Some("app"))],
            runtime_directories: Vec::new(),
            refresh_requests,
        }
    }

    #[test]
    fn only_an_annotation_without_effect_is_found() {
        for (value, problems, names) in [
            ("true", 0, 0),
            ("false", 0, 0),
            ("app", 0, 0),
            ("True", 1, 0),
            ("yes", 0, 1),
            ("app,sidecar", 0, 1),
            ("YES,on", 1, 1),
        ] {
            let found = ignored_requests(&pods(value));
            let sum = |of: fn(&IgnoredRequest) -> usize| found.iter().map(of).sum::<usize>();
            assert_eq!(
                (
                    sum(|it| it.problems.len()),
                    sum(|it| it.unknown_names.len())
                ),
                (problems, names),
                "{value}"
            );
        }
    }

    /// The container may start a moment later.
    #[test]
    fn a_name_is_wrong_once_it_stays_unknown() {
        let found = ignored_requests(&pods("yes"));
        assert_eq!(found[0].confirmed_by(&[]), [""; 0]);
        assert_eq!(
            found[0].confirmed_by(&found),
            [r#"ignoring bindguard.io/refresh: the pod has no container "yes""#]
        );
        let found = ignored_requests(&pods("True"));
        assert_eq!(found[0].confirmed_by(&[]).len(), 1);
    }
}
