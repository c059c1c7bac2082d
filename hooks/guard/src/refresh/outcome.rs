//! The result of a refresh, for each stale mount of a container.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::judge::Verdict;
use bindguard_core::paths::join;
use bindguard_core::refresh::{Refused, RefusedReason, SpecBind, SubpathInContainer};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{MountResult, Notification, RefreshedMount};
use bindguard_core::source::KindName;
use bindguard_sys::enter::{Abandoned, EnterError, NamespaceError, ProcessError, TreeError};
use bindguard_sys::replace::{CloneError, ReplaceError};
use bindguard_sys::{MountinfoError, OldKernel, TargetError};

use crate::rebind::MAX_ROUNDS;
use crate::refresh::files::BoundFileError;
use crate::refresh::records::TuckRecordError;
use crate::refresh::round::{ContainerRefresh, MountProgress};

pub use bindguard_core::report::AttachMethod;

/// A stale mount of a container, and the outcome of its refresh.
#[derive(Debug)]
pub struct MountRefresh {
    /// Its mount point in the container.
    pub destination: PathBuf,
    /// The directory of its volume on the host.
    pub volume: PathBuf,
    /// The path below the payload.
    pub sub_path: PathBuf,
    /// The kind of the bind, if the mount is that of a host root.
    pub kind: Option<KindName>,
    pub outcome: MountOutcome,
}

/// The result, or why the mount is still stale.
pub type MountOutcome = Result<MountResult, NotReplaced>;

/// Why a stale mount was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum NotReplaced {
    /// The volume no longer has the file.
    #[error("the volume no longer has the file")]
    KeyGone,
    /// A rule leaves the mount as it is.
    #[error("{0}")]
    Refused(Refused),
    /// The new mounts could not be put together.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The mounts of the host could not be read.
    #[error("compare with the mounts of the host")]
    HostMounts(#[source] MountinfoError),
    /// The current file could not be opened.
    #[error("open the current file")]
    Open(#[from] TargetError),
    /// The way to a bound file could not be walked.
    #[error("open the current file")]
    Walk(#[from] BoundFileError),
    /// The bind has no new mount.
    #[error(transparent)]
    Clone(#[from] CloneError),
    /// A step in the container failed.
    #[error(transparent)]
    Enter(#[from] EnterError),
    /// No child could enter the container.
    #[error(transparent)]
    NotEntered(Arc<EnterError>),
    /// The mount point now shows a different mount.
    #[error("the mount table of the container changed meanwhile")]
    Changed,
    /// The mount table could not be recorded: without a record nothing is made shared.
    #[error(transparent)]
    NotRecorded(Arc<TuckRecordError>),
    /// The place of the new mount could not be recorded: a later refresh would take that mount for the
    /// container's own.
    #[error("record the new mount beside the container's bundle")]
    PlaceNotRecorded(#[source] io::Error),
    /// The new mount did not arrive: the parent mount does not propagate.
    #[error("the new mount did not arrive beneath the stale one")]
    DidNotArrive,
    /// The refresh of the container ended early, after mounts were replaced.
    #[error(transparent)]
    Interrupted(Arc<RefreshError>),
    /// The time of the container's refresh is over.
    #[error("the refresh of the container took longer than {} ms", .0.as_millis())]
    OutOfTime(Duration),
    /// The volume changed faster than the mount could be replaced.
    #[error("its volume changed {0} times meanwhile")]
    Restless(u32),
}

impl From<Refused> for NotReplaced {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

/// The refresh of a container.
#[derive(Debug, Default)]
pub struct Refreshed {
    /// The container's stale mounts. Current mounts are left out.
    pub mounts: Vec<MountRefresh>,
    /// The number of its mounts that show a part of a kubelet-written volume.
    pub subpaths: usize,
    /// The number of further mounts of the same files, which are left as they are.
    pub overlooked: usize,
    /// True if the time was over before all of it was done.
    pub is_out_of_time: bool,
    /// Why the application was not notified, if its pod requested that and it failed.
    pub not_notified: Option<NotNotified>,
    /// A child that hangs in the container: no second child may enter.
    pub abandoned: Option<Abandoned>,
}

/// Why an application was not notified.
#[derive(Debug, thiserror::Error)]
pub enum NotNotified {
    /// The container itself cannot write the file beneath the mount.
    #[error("touch the file beneath {}: the container cannot write there", .0.display())]
    ReadOnly(PathBuf),
    /// The file beneath the mount could not be touched.
    #[error(transparent)]
    Touch(#[from] EnterError),
    /// The signal could not be sent.
    #[error(transparent)]
    Signal(#[from] ProcessError),
}

/// Why a container could not be refreshed at all.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// Its spec is not known: nothing says which user namespace its mounts belong to.
    #[error("its spec is not known: the container runtime reports none")]
    NoSpec,
    /// Its init process is not in the mount namespace that its runtime made.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Its init process could not be read, for example because it ended.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Its init process is in the node's own mount namespace: it is no container of runc or crun.
    #[error(
        "process {0} is in the node's own mount namespace, as with Kata and other sandboxes, which are not supported"
    )]
    MountsOfNode(u32),
    /// Its init process is the kernel of gVisor, which has mounts of its own.
    #[error("process {0} is gVisor's sandbox, which is not supported")]
    Sandbox(u32),
    #[error(transparent)]
    OldKernel(#[from] OldKernel),
    /// Another refresh works on the container, or the container holds the lock of its own
    /// namespace.
    #[error("another refresh has locked its mount namespace for {} ms", .0.as_millis())]
    Locked(Duration),
}

impl RefreshError {
    /// True if a later refresh may succeed without any change. For example, another refresh has the
    /// lock, a reader of the process was late, or the process is about to end.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Locked(_) => true,
            Self::Process(error) | Self::Namespace(NamespaceError::Process(error)) => {
                !matches!(error, ProcessError::Table { .. })
            }
            Self::NoSpec
            | Self::Namespace(_)
            | Self::MountsOfNode(_)
            | Self::Sandbox(_)
            | Self::OldKernel(_) => false,
        }
    }
}

impl NotReplaced {
    /// True if a rule or the lack of a file keeps the mount, so that another try has the same
    /// result.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::KeyGone | Self::Refused(_))
    }

    /// The result for the current file at this path, as a report has it.
    fn result(&self, source: &Path) -> MountResult {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        match self {
            Self::KeyGone => MountResult::KeyGone,
            Self::Restless(_) => MountResult::Restless,
            Self::Refused(refused) => MountResult::Refused {
                reason: refused.reason,
                path: text(&refused.path),
                error: refused.error.clone(),
            },
            Self::Enter(EnterError::Step(ReplaceError::OtherType)) => MountResult::Refused {
                reason: RefusedReason::OtherType,
                path: text(source),
                error: None,
            },
            why => MountResult::Failed {
                error: error_chain(why),
            },
        }
    }
}

impl MountRefresh {
    /// A bind of the spec that is gone.
    pub(super) fn of_missing(bind: &SpecBind) -> Self {
        let (volume, sub_path) = match (bind.source.parent(), bind.source.file_name()) {
            (Some(directory), Some(name)) => (directory.to_owned(), name.into()),
            _ => (bind.source.clone(), PathBuf::new()),
        };
        Self {
            destination: bind.destination.clone(),
            volume,
            sub_path,
            kind: None,
            outcome: Ok(MountResult::Missing),
        }
    }

    /// True if the container shows the current file.
    pub fn is_replaced(&self) -> bool {
        self.outcome.as_ref().is_ok_and(MountResult::is_replaced)
    }

    /// The result as a report has it.
    pub fn result(&self) -> MountResult {
        match &self.outcome {
            Ok(result) => result.clone(),
            Err(why) => why.result(&self.source()),
        }
    }

    fn source(&self) -> PathBuf {
        join(self.volume.clone(), &self.sub_path)
    }
}

impl From<&MountRefresh> for RefreshedMount {
    fn from(mount: &MountRefresh) -> Self {
        Self {
            kind: mount.kind,
            ..Self::new(&mount.destination, &mount.source(), mount.result())
        }
    }
}

impl Refreshed {
    /// True if every stale mount was replaced.
    pub fn is_current(&self) -> bool {
        self.mounts.iter().all(|mount| mount.is_replaced())
    }

    /// The requested notification, if a mount was replaced or the notification failed.
    pub fn notification(&self, request: &Notify) -> Option<Notification> {
        let error = self.not_notified.as_ref().map(|error| error_chain(error));
        let is_due = *request != Notify::None && (self.replaced() > 0 || error.is_some());
        is_due.then(|| Notification {
            request: request.clone(),
            error,
        })
    }

    /// The number of mounts that were replaced.
    pub fn replaced(&self) -> usize {
        self.replaced_places().count()
    }

    /// The places in the container of the mounts that were replaced.
    pub fn replaced_places(&self) -> impl Iterator<Item = &Path> {
        let replaced = self.mounts.iter().filter(|mount| mount.is_replaced());
        replaced.map(|mount| mount.destination.as_path())
    }
}

// The report of a refresh: an outcome for each stale mount and each missing bind.

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
