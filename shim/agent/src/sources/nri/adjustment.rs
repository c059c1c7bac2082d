//! Edits of a spec as an NRI adjustment, limited to those that a runtime carries out.
//!
//! A mount is changed by removing and adding the same destination. The runtime sets
//! `linux.rootfsPropagation` for an added rslave mount itself, but fails the create if the source
//! is on a private mount (`pkg/runtime-tools/generate`). The runtime finds the mount by the
//! source's text and follows no symlink, so this module does too.

use std::collections::HashSet;
use std::path::{Component, Path};

use bindguard_core::mount_table::MountTable;
use bindguard_core::spec::{RequestedPropagation, SpecEdit};

use super::messages::NriMount;

const RSLAVE: &str = "rslave";

/// The edits that a runtime carries out. `None`: the mount table could not be read, so the
/// propagation of no source is known.
pub fn accepted(
    edits: &[SpecEdit],
    mounts: &[NriMount],
    table: Option<&MountTable>,
) -> Vec<SpecEdit> {
    let mut destinations = HashSet::new();
    let mut accepted = edits.to_vec();
    for mount in mounts {
        // A runtime removes one mount of a destination, and sorts mounts afterwards: of two mounts
        // on a destination the wrong mount could win.
        if !destinations.insert(&mount.destination) {
            return Vec::new();
        }
    }
    accepted.retain(|edit| is_accepted(edit, mounts, table));
    accepted
}

fn is_accepted(edit: &SpecEdit, mounts: &[NriMount], table: Option<&MountTable>) -> bool {
    match edit {
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
    }
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
pub fn mounts(edits: &[SpecEdit], mounts: &[NriMount]) -> Vec<NriMount> {
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
pub fn applied(mut mounts: Vec<NriMount>, changes: Vec<NriMount>) -> Vec<NriMount> {
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
        let by_bindguard = mounts(&[SpecEdit::BindRslave { bind: 0 }], &old);
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
            mounts(&edits, &old),
            [
                removed("-/a"),
                bind("/new", "/a", &["rbind", "ro"]),
                removed("-/host"),
                bind("/", "/host", &["rbind", "ro", "rslave"]),
            ]
        );
    }
}
