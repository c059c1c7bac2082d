//! The parts below the top of a new tree of mounts: the restrictions of the old mounts, and the
//! binds of the spec that are nested in a volume.

use std::fs::File;

use bindguard_core::judge::{StaleCause, Verdict};
use bindguard_core::mount_table::MountEntry;
use bindguard_core::refresh::{KeptMounts, NestedBind, Refused, RefusedReason, SubpathInContainer};
use bindguard_sys::enter::{TreeChange, TreePart};
use bindguard_sys::replace::{NewMount, clone_like};

use super::current_files::OpenedNested;
use super::outcome::NotReplaced;
use super::progress::ContainerRefresh;

/// Limit of binds in a volume: the new mount of each is a descriptor of this process until the tree
/// is complete.
const MAX_NESTED_BINDS: usize = 256;

impl ContainerRefresh<'_> {
    /// The parts of the new tree in place of a stale mount, outer parts first.
    pub(super) fn tree_parts(
        &self,
        stale: &SubpathInContainer,
        below: &KeptMounts,
    ) -> Result<Vec<TreePart>, NotReplaced> {
        let (count, limit) = (below.nested.len(), MAX_NESTED_BINDS);
        if count > limit {
            let refused = Refused::new(RefusedReason::ManyNestedBinds, &stale.mount.mount_point);
            return Err(refused
                .with_error(format!("{count} instead of {limit}"))
                .into());
        }
        let restricted = below.restrictions.iter().map(|it| TreePart {
            path: it.path.clone(),
            change: TreeChange::Restrict(it.attributes),
        });
        let mut parts: Vec<TreePart> = restricted.collect();
        let mut refused = None;
        let mut has_gone_bind = false;
        for nested in &below.nested {
            let is_gone = nested.shown.is_none();
            let new = match self.nested_mount(stale, nested) {
                Ok(new) => new,
                Err(why) if is_gone => {
                    refused.get_or_insert(why);
                    continue;
                }
                Err(why) => return Err(why),
            };
            // A bind that is gone is no reason to leave the volume dead.
            let change = match is_gone && !is_stale_without(stale) {
                true => TreeChange::TryAttach(new),
                false => TreeChange::Attach(new),
            };
            has_gone_bind |= is_gone;
            let path = nested.path.clone();
            parts.push(TreePart { path, change });
        }
        match refused {
            Some(why) if is_stale_without(stale) && !has_gone_bind => Err(why),
            _ => Ok(parts),
        }
    }

    /// A new mount of a nested bind.
    fn nested_mount(
        &self,
        stale: &SubpathInContainer,
        nested: &NestedBind,
    ) -> Result<NewMount, NotReplaced> {
        let OpenedNested {
            file,
            like,
            settings,
        } = self.volumes.open_nested(stale, nested)?;
        let place = &like.mount_point;
        if nested.shown.is_none() && self.spec.is_idmapped_at(place) {
            let error = "it is gone, and only the runtime can make it again".to_owned();
            let refused = Refused::new(RefusedReason::OtherIds, place);
            return Err(refused.with_error(error).into());
        }
        self.refuse_unreadable(&file)?;
        let users = self.users_of(&like)?;
        Ok(clone_like(&file, &like, users, settings)?)
    }

    /// The user namespace for a new mount like `stale`; `None` if `stale` is not idmapped. It is the
    /// namespace that the spec gives the container, never a namespace that a process entered: that
    /// one may show files of the host's root as files of the process.
    pub(super) fn users_of(&self, stale: &MountEntry) -> Result<Option<&File>, Refused> {
        if !stale.attributes.is_idmapped() {
            return Ok(None);
        }
        let place = &stale.mount_point;
        match self.namespace.has_own_users() && self.spec.has_ids_of_container_at(place) {
            true => Ok(Some(self.namespace.users())),
            false => Err(Refused::new(RefusedReason::OtherIds, place)),
        }
    }
}

/// True if the volume is current and lacks a bind of the spec: then that bind is the reason of the
/// refresh.
fn is_stale_without(stale: &SubpathInContainer) -> bool {
    let Verdict::Stale { cause, .. } = &stale.verdict else {
        return false;
    };
    matches!(cause, StaleCause::LacksBind(_))
}
