//! The report of a refresh: an outcome for each stale mount and each missing bind.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bindguard_core::judge::Verdict;
use bindguard_core::refresh::{SpecBind, SubpathInContainer};
use bindguard_core::report::MountResult;
use bindguard_core::source::KindName;

use super::outcome::{MountOutcome, MountRefresh, NotReplaced, Refreshed};
use super::progress::{ContainerRefresh, MountProgress};
use crate::attempts::MAX_ROUNDS;

/// The outcome of a mount that a survey found.
pub(super) fn stale_unless(failure: Option<NotReplaced>) -> MountOutcome {
    failure.map_or(Ok(MountResult::Stale), Err)
}

/// The outcome of a mount that a refresh did not replace.
pub(super) fn not_replaced(failure: Option<NotReplaced>) -> MountOutcome {
    Err(failure.unwrap_or(NotReplaced::Restless(MAX_ROUNDS)))
}

impl ContainerRefresh<'_> {
    /// Ends the refresh: see [`into_report`].
    pub(super) fn into_report(
        self,
        subpaths: Vec<SubpathInContainer>,
        otherwise: impl Fn(Option<NotReplaced>) -> MountOutcome,
    ) -> Refreshed {
        let Self {
            progress,
            missing,
            not_notified,
            overlooked,
            abandoned,
            ..
        } = self;
        Refreshed {
            not_notified,
            overlooked,
            abandoned,
            ..into_report(subpaths, progress, &missing, otherwise)
        }
    }
}

/// A line for each stale mount, with the attach method if the mount is current now, and a line for
/// each missing bind.
pub(super) fn into_report(
    subpaths: Vec<SubpathInContainer>,
    mut progress: BTreeMap<PathBuf, MountProgress>,
    missing: &[SpecBind],
    otherwise: impl Fn(Option<NotReplaced>) -> MountOutcome,
) -> Refreshed {
    let count = subpaths.len();
    let mounts = subpaths.into_iter().filter_map(|subpath| {
        let progress = progress.get_mut(&subpath.mount.mount_point);
        let outcome = match &subpath.verdict {
            _ if subpath.is_due() => otherwise(progress.and_then(|it| it.failure.take())),
            Verdict::Current => {
                let progress = progress?;
                let method = progress.replaced?;
                match progress.failure.take() {
                    Some(NotReplaced::KeyGone) | None => Ok(MountResult::Replaced { method }),
                    failure => otherwise(failure),
                }
            }
            Verdict::Foreign => Ok(MountResult::Hidden),
            Verdict::Stale { .. } => Ok(MountResult::Occupied),
            Verdict::Orphaned { .. }
            | Verdict::Unmounted(_)
            | Verdict::Pinning(_)
            | Verdict::Wrong(_)
            | Verdict::Dead(_)
            | Verdict::NotProbed
            | Verdict::Unknown(_) => otherwise(None),
        };
        let is_host_root = matches!(subpath.verdict, Verdict::Pinning(_));
        let SubpathInContainer {
            mount,
            volume,
            sub_path,
            ..
        } = subpath;
        Some(MountRefresh {
            destination: mount.mount_point,
            volume,
            sub_path,
            kind: is_host_root.then_some(KindName::HostRoot),
            outcome,
        })
    });
    let mounts = mounts
        .chain(missing.iter().map(MountRefresh::of_missing))
        .collect();
    Refreshed {
        mounts,
        subpaths: count,
        ..Refreshed::default()
    }
}
