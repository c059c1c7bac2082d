//! The parts below the top of a new tree of mounts: the restrictions of the old mounts, and the
//! binds of the spec that are nested in a volume.

use bindguard_core::judge::{StaleCause, Verdict};
use bindguard_core::refresh::{KeptMounts, NestedBind, SubpathInContainer};
use bindguard_sys::enter::{TreeChange, TreePart};
use bindguard_sys::replace::{NewMount, clone_like};

use super::current_files::OpenedNested;
use super::ids::Users;
use super::outcome::NotReplaced;
use super::progress::ContainerRefresh;

impl ContainerRefresh<'_> {
    /// The parts of the new tree in place of a stale mount, the outer ones first.
    pub(super) fn tree_parts(
        &self,
        stale: &SubpathInContainer,
        below: &KeptMounts,
    ) -> Result<Vec<TreePart>, NotReplaced> {
        let restricted = below.restrictions.iter().map(|it| TreePart {
            path: it.path.clone(),
            change: TreeChange::Restrict(it.attributes),
        });
        let mut parts: Vec<TreePart> = restricted.collect();
        for nested in &below.nested {
            let Some(new) = self.nested_mount(nested)? else {
                continue;
            };
            // A bind that is gone is no reason to leave the volume dead.
            let change = match nested.shown.is_some() || is_stale_without(stale) {
                true => TreeChange::Attach(new),
                false => TreeChange::TryAttach(new),
            };
            let path = nested.path.clone();
            parts.push(TreePart { path, change });
        }
        Ok(parts)
    }

    /// A new mount of a nested bind. `None` for a bind that is gone and that only a runtime can
    /// make again.
    fn nested_mount(&self, nested: &NestedBind) -> Result<Option<NewMount>, NotReplaced> {
        let opened = self.volumes.open_nested(nested);
        let OpenedNested {
            file,
            like,
            settings,
        } = match (opened, &nested.shown) {
            (Ok(opened), _) => opened,
            (Err(_), None) => return Ok(None),
            (Err(why), Some(_)) => return Err(why),
        };
        let has_ids = || self.spec.ids_of_mount_at(&like.mount_point).is_some();
        if nested.shown.is_none() && has_ids() {
            return Ok(None);
        }
        let users = Users::of_mount_like(self.helper, &like, self.spec, self.namespace)?;
        let users = users.as_ref().map(Users::file);
        Ok(Some(clone_like(&file, &like, users, settings)?))
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
