//! Looking at the binds of a spec, read only.

use std::path::Path;

use bindguard_core::judge::{Finding, Verdict, judge_host_root, judge_subpath, judge_volume};
use bindguard_core::kubelet::{MountedVolume, VolumeSubpath};
use bindguard_core::policy::{Alarm, Mode, Policy};
use bindguard_core::source::SourceKind;
use bindguard_core::spec::{AskedPropagation, Bind, SpecView};
use bindguard_sys::observe::{HeldSubpath, HeldVolume, observe_host_mount};
use bindguard_sys::{Handle, HandleError, Mounts};

/// A bind's source, held until it is judged.
enum Held {
    Subpath(VolumeSubpath, HeldSubpath),
    Volume(MountedVolume, HeldVolume),
    HostRoot(Result<Handle, HandleError>),
    InVolume,
    Foreign,
}

impl Held {
    fn hold(source: &Path, policy: &Policy) -> Self {
        match SourceKind::from_path(source, None, policy) {
            SourceKind::Subpath(subpath) if policy.stale_subpaths != Mode::Off => {
                let held = HeldSubpath::hold(&subpath);
                Self::Subpath(subpath, held)
            }
            SourceKind::MountedVolume(volume) if policy.unmounted_volumes != Alarm::Off => {
                let held = HeldVolume::hold(&volume);
                Self::Volume(volume, held)
            }
            SourceKind::HostRoot if policy.host_root != Mode::Off => Self::HostRoot(Handle::follow(source)),
            SourceKind::Foreign if policy.host_root != Mode::Off => Self::behind_links(source, policy),
            SourceKind::InVolume => Self::InVolume,
            SourceKind::Subpath(_) | SourceKind::MountedVolume(_) | SourceKind::HostRoot | SourceKind::Foreign => {
                Self::Foreign
            }
        }
    }

    /// A path that is not itself a host root may be a link to one: `/var/run` is `/run` nearly everywhere.
    fn behind_links(source: &Path, policy: &Policy) -> Self {
        let handle = Handle::follow(source);
        let resolved = handle.as_ref().ok().and_then(|handle| handle.resolved_path().ok());
        match resolved {
            Some(path) if policy.holds_runtime_mounts(&path) => Self::HostRoot(handle),
            _ => Self::Foreign,
        }
    }

    fn judge(&self, bind: &Bind, spec: &SpecView<'_>, mounts: &Mounts) -> Verdict {
        match self {
            Self::Subpath(_, held) => judge_subpath(&held.observe(mounts)),
            Self::Volume(volume, held) => judge_volume(volume, &held.observe(mounts)),
            Self::HostRoot(source) => {
                let any_shared = spec.binds().iter().any(|bind| bind.propagation() == AskedPropagation::Shared);
                let host = observe_host_mount(source, mounts);
                judge_host_root(bind.propagation(), spec.rootfs_propagation(), any_shared, &host)
            }
            Self::InVolume => Verdict::Current,
            Self::Foreign => Verdict::Foreign,
        }
    }

    fn into_kind(self) -> SourceKind {
        match self {
            Self::Subpath(subpath, _) => SourceKind::Subpath(subpath),
            Self::Volume(volume, _) => SourceKind::MountedVolume(volume),
            Self::HostRoot(_) => SourceKind::HostRoot,
            Self::InVolume => SourceKind::InVolume,
            Self::Foreign => SourceKind::Foreign,
        }
    }
}

/// Judges every bind of a spec.
pub(crate) fn inspect(spec: &SpecView<'_>, bundle: &Path, policy: &Policy) -> Vec<Finding> {
    let held: Vec<Held> = spec.binds().iter().map(|bind| Held::hold(&bundle.join(bind.source()), policy)).collect();
    let mounts = Mounts::default();
    let judged = spec.binds().iter().zip(held).map(|(bind, held)| Finding {
        bind: Some(bind.index()),
        source: bind.source().to_owned(),
        destination: Some(bind.destination().to_owned()),
        verdict: held.judge(bind, spec, &mounts),
        kind: held.into_kind(),
    });
    judged.collect()
}
