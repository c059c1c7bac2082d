//! Checks that a container's own mount receives the host's umounts.
//!
//! rslave in a spec is only a request. A runtime may ignore it, a rootfs propagation may override
//! it, or the host's mount may be private. Then the container has a copy of the host's mounts that
//! no umount reaches.

use crate::evidence::Observed;
use crate::mount_table::Propagation;

use super::verdict::Verdict;

/// Judges the mount at the destination of a bind that requests rslave.
pub fn judge_in_container(mount: &Observed<Propagation>) -> Verdict {
    match mount {
        Observed::Seen(propagation) if propagation.passes_umounts_on() => Verdict::Current,
        Observed::Seen(_) => Verdict::WithoutMaster,
        Observed::Absent => {
            Verdict::Unknown("nothing is mounted at its destination in the container".to_owned())
        }
        Observed::Unreadable(why) => Verdict::Unknown(why.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_with_a_master_or_a_peer_receives_umounts() {
        let judged = |propagation| judge_in_container(&Observed::Seen(propagation));
        assert_eq!(
            judged(Propagation {
                master: Some(1),
                ..Propagation::default()
            }),
            Verdict::Current
        );
        assert_eq!(
            judged(Propagation {
                peer_group: Some(1),
                ..Propagation::default()
            }),
            Verdict::Current
        );
        assert_eq!(judged(Propagation::default()), Verdict::WithoutMaster);
        assert!(matches!(
            judge_in_container(&Observed::Absent),
            Verdict::Unknown(_)
        ));
    }
}
