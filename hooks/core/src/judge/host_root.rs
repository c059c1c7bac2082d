//! Detects a host-root bind that pins the host's mounts.
//!
//! A bind that is not recursive includes no mount below its source, so nothing is to be repaired:
//! rslave would only let in the mounts that the host makes later, and crun would make it recursive.
//!
//! With rprivate (the default of the kubelet and of runc) the container has a copy of every mount
//! below the source. No umount on the host reaches these copies. The effects: `device or resource
//! busy`, loop and dm devices that stay, network namespaces that never go. rslave lets umounts in
//! and nothing out. crun follows `linux.rootfsPropagation` for all mounts, so that value must
//! agree; runc's default does.
//!
//! rslave also lets later mounts of the host in. `ro` and `rro` make only those mounts read-only
//! that exist when the container starts, so a bind that must stay read-only as a whole stays
//! private.

use crate::evidence::{HostMount, Observed};
use crate::policy::Kept;
use crate::spec::{RequestedPropagation, RootfsPropagation};

use super::verdict::{Pinning, Verdict};

/// Judges a host-root bind. `is_recursive`: the runtime includes the mounts below the source.
/// `kept`: the reason for which the bind must not be made rslave. `any_shared`: some bind of the same
/// spec requests shared propagation.
pub fn judge_host_root(
    requested: RequestedPropagation,
    is_recursive: bool,
    kept: Option<Kept>,
    rootfs: &RootfsPropagation,
    any_shared: bool,
    host: &Observed<HostMount>,
) -> Verdict {
    if requested == RequestedPropagation::Shared || !is_recursive {
        return Verdict::Current;
    }
    // A root made `shared` for a shared bind stays: rslave there would also lower that bind.
    let rootfs_may_stay = rootfs.lets_umounts_in() || (rootfs.is_shared() && any_shared);
    let private_mount = match host {
        Observed::Seen(mount) => (!mount.passes_umounts_on).then(|| mount.mount_point.clone()),
        Observed::Absent => return Verdict::Unknown("its source does not exist".to_owned()),
        Observed::Unreadable(why) => return Verdict::Unknown(why.clone()),
    };
    let kept = kept.filter(|_| requested.keeps_host_mounts_alive());
    let pinning = match kept {
        Some(_) => Pinning {
            bind: true,
            rootfs: false,
            private_mount: None,
            kept,
        },
        None => Pinning {
            bind: requested.keeps_host_mounts_alive(),
            rootfs: !rootfs_may_stay,
            private_mount,
            kept,
        },
    };
    let is_pinning = pinning.bind || pinning.rootfs || pinning.private_mount.is_some();
    if is_pinning {
        Verdict::Pinning(pinning)
    } else {
        Verdict::Current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_root_stays_for_a_shared_bind_only() {
        let host = Observed::Seen(HostMount {
            mount_point: "/".into(),
            passes_umounts_on: true,
        });
        for (rootfs, any_shared, is_edited) in [
            ("shared", true, false),
            ("shared", false, true),
            ("rprivate", true, true),
            ("rslave", false, false),
        ] {
            let rootfs = RootfsPropagation::Set(rootfs.to_owned());
            let requested = RequestedPropagation::Private;
            let verdict = judge_host_root(requested, true, None, &rootfs, any_shared, &host);
            let Verdict::Pinning(pinning) = verdict else {
                panic!("{rootfs:?}: {verdict:?}");
            };
            assert_eq!(pinning.rootfs, is_edited, "{rootfs:?} {any_shared}");
        }
    }
}
