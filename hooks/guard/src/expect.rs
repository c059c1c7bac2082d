//! Records what the kernel will show for each bind of a new container, see
//! [`bindguard_core::proof`].
//!
//! The record is made after all repairs and edits, right before the runtime runs. A source is
//! opened only if no server or daemon must answer; the other sources are counted as unproven.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::{fs, io};

use bindguard_core::evidence::Reach;
use bindguard_core::kubelet::{CSI_RECORD, CsiRecord, Plugin, STAGING_MOUNT};
use bindguard_core::mount_table::MountEntry;
use bindguard_core::policy::Alarm;
use bindguard_core::proof::{AdmittedEntry, ExpectedBind, ExpectedBinds, ExpectedPropagation};
use bindguard_core::spec::{Bind, RequestedPropagation, SpecEdit};
use bindguard_sys::bundle::{spec_version, write_record};
use bindguard_sys::observe::BindSource;
use bindguard_sys::{Handle, Mounts, read_file};

use crate::bundle::{OpenBundle, source_of};
use crate::inspect::MAX_HELD_BINDS;
use crate::probes::Probes;

/// Writes the record of a bundle whose spec has these edits, and returns the number of recorded
/// binds. `is_host_root`: true for the position of a bind that must receive the host's umounts.
///
/// # Errors
/// If the record cannot be written.
pub(crate) fn record_expected_binds(
    bundle: &OpenBundle<'_>,
    edits: &[SpecEdit],
    is_host_root: impl Fn(usize) -> bool,
) -> io::Result<usize> {
    let expected = ExpectedBinds {
        refuses: Some(bundle.policy.proof == Alarm::Refuse),
        spec: spec_version(bundle.path),
        ..expect(bundle, edits, |bind| {
            propagation(bundle, bind, edits, is_host_root(bind.index))
        })
    };
    write_record(bundle.path, &expected)?;
    Ok(expected.binds.len())
}

/// The sources of the binds of an admitted spec, for a container that has no bundle yet.
#[derive(Debug, Default)]
pub struct ExpectedSources {
    sources: Vec<(PathBuf, ExpectedBind)>,
    refreshed: Vec<PathBuf>,
}

impl ExpectedSources {
    /// The number of binds whose source is known.
    pub fn binds(&self) -> usize {
        self.sources.len()
    }

    /// Adds the binds of an earlier check of the same container.
    pub fn extend(&mut self, earlier: Self) {
        self.sources.extend(earlier.sources);
    }

    /// Leaves out the binds at these places: a refresh has replaced their mounts since, and has
    /// verified the new mounts. The host's subpath may still show the old file.
    #[must_use]
    pub fn without_refreshed(self, places: Vec<PathBuf>) -> Self {
        Self {
            refreshed: places,
            ..self
        }
    }

    /// True if a refresh has replaced the mount of this bind.
    pub(crate) fn is_refreshed(&self, bind: &Bind<'_>) -> bool {
        let mut refreshed = self.refreshed.iter();
        refreshed.any(|place| place == bind.destination())
    }

    /// The sources of a spec that has these edits. None if policy wants no proof.
    pub(crate) fn of(bundle: &OpenBundle<'_>, edits: &[SpecEdit]) -> Self {
        let mut expected = Self::default();
        if bundle.policy.proof != Alarm::Off {
            // The bundle decides on flags and propagation later: other plugins may change them.
            let ExpectedBinds { binds, entries, .. } =
                expect(bundle, edits, |_| ExpectedPropagation::Any);
            for bind in binds {
                if let Some(source) = &entries[bind.bind].source {
                    expected.sources.push((source.clone(), bind));
                }
            }
        }
        expected
    }

    /// The expectations for a bundle, whose spec other plugins may have changed: for the binds that
    /// still have the same source and destination.
    pub(crate) fn in_bundle(&self, bundle: &OpenBundle<'_>) -> ExpectedBinds {
        let mut in_bundle = entries(bundle, &[]);
        for bind in bundle.spec.binds() {
            let mut sources = self.sources.iter();
            let known = sources.find(|(source, expected)| {
                source == bind.source() && expected.destination == bind.destination()
            });
            if let Some((_, expected)) = known
                && !self.is_refreshed(bind)
            {
                in_bundle.binds.push(ExpectedBind {
                    bind: bind.index,
                    denied: bind.denied,
                    propagation: propagation(bundle, bind, &[], false),
                    ..expected.clone()
                });
            }
        }
        in_bundle
    }
}

/// The expectations for recorded binds, by what their recorded sources are now. `None` for a source
/// that shows no place any more.
pub(crate) fn expect_again(
    bundle: &Path,
    expected: &ExpectedBinds,
    recorded: &[&ExpectedBind],
) -> Vec<Option<ExpectedBind>> {
    let mut now = vec![None; recorded.len()];
    let (mut known, mut sources) = (Vec::new(), Vec::new());
    for (at, bind) in recorded.iter().enumerate() {
        let entry = expected.entries.get(bind.bind);
        // The record of an earlier version has no sources.
        if let Some(source) = entry.and_then(|entry| entry.source.as_ref()) {
            known.push(at);
            sources.push(bundle.join(source));
        }
    }
    for (at, observed) in known.into_iter().zip(observe(&sources)) {
        if let Some(observed) = observed
            && let Some(moved) = recorded[at].moved_to(&observed.mount, &observed.path)
        {
            now[at] = Some(observed.complete(moved));
        }
    }
    now
}

/// The expectations for a spec that has these edits.
fn expect(
    bundle: &OpenBundle<'_>,
    edits: &[SpecEdit],
    propagation: impl Fn(&Bind<'_>) -> ExpectedPropagation,
) -> ExpectedBinds {
    let mut expected = entries(bundle, edits);
    let mut sources = Vec::with_capacity(bundle.spec.binds().len());
    for bind in bundle.spec.binds() {
        sources.extend(expected.entries[bind.index].source.clone());
    }
    for (bind, observed) in bundle.spec.binds().iter().zip(observe(&sources)) {
        let Some(observed) = observed else { continue };
        let new = ExpectedBind::new(bind, &observed.mount, &observed.path, propagation(bind));
        expected.binds.extend(new.map(|new| observed.complete(new)));
    }
    expected
}

/// The entries of a spec that has these edits, without expectations. The entry of each bind has a
/// source.
fn entries(bundle: &OpenBundle<'_>, edits: &[SpecEdit]) -> ExpectedBinds {
    let mut expected = ExpectedBinds::default();
    for destination in &bundle.spec.destinations {
        expected.entries.push(AdmittedEntry {
            destination: PathBuf::from(&**destination),
            source: None,
        });
    }
    for bind in bundle.spec.binds() {
        let edited = edits.iter().find_map(|edit| match edit {
            SpecEdit::Source { bind: index, to } if *index == bind.index => Some(to.clone()),
            SpecEdit::Source { .. } | SpecEdit::BindRslave { .. } | SpecEdit::RootfsRslave => None,
        });
        let source = edited.unwrap_or_else(|| source_of(bind, bundle.path).into_owned());
        expected.entries[bind.index].source = Some(source);
    }
    for masked in &bundle.spec.masked_paths {
        if !masked.is_empty() {
            expected.masked.push(PathBuf::from(&**masked));
        }
    }
    expected
}

/// The mount and the path of a source.
struct Observed {
    mount: Rc<MountEntry>,
    path: PathBuf,
    is_moved: bool,
    inode: Option<u64>,
}

impl Observed {
    fn complete(self, expected: ExpectedBind) -> ExpectedBind {
        ExpectedBind {
            resolved: self.is_moved.then_some(self.path),
            inode: self.inode,
            ..expected
        }
    }
}

/// Opens sources, if no server or daemon must answer.
fn observe(sources: &[PathBuf]) -> Vec<Option<Observed>> {
    let mut all = Vec::with_capacity(sources.len());
    let earlier = Mounts::default();
    for some in sources.chunks(MAX_HELD_BINDS) {
        let mut opened = Vec::with_capacity(some.len());
        for named in some {
            let handle = earlier.open_without_waiting(named);
            opened.push((named, handle.ok().map(|handle| handle.unqueried())));
        }
        let mounts = earlier.for_newly_opened();
        for (named, handle) in &opened {
            let handle = handle.as_ref();
            let source = handle.and_then(|handle| BindSource::of(handle, &mounts));
            all.push(source.map(|BindSource { mount, path }| {
                let identity = handle
                    .and_then(|handle| handle.identity().ok())
                    .filter(|_| mount.fs_type.is_local());
                Observed {
                    is_moved: path != **named,
                    inode: identity.map(|identity| identity.inode),
                    mount,
                    path,
                }
            }));
        }
    }
    all
}

fn propagation(
    bundle: &OpenBundle<'_>,
    bind: &Bind<'_>,
    edits: &[SpecEdit],
    is_host_root: bool,
) -> ExpectedPropagation {
    let is_edited = edits.contains(&SpecEdit::BindRslave { bind: bind.index });
    let requested = if is_edited {
        RequestedPropagation::RecursiveSlave
    } else {
        bind.propagation
    };
    if requested == RequestedPropagation::RecursiveSlave
        && is_host_root
        && bundle.policy.is_recursive(bind)
    {
        return ExpectedPropagation::Slave;
    }
    ExpectedPropagation::of_request(requested, &bundle.spec.rootfs_propagation)
}

// Reads the kubelet's record of a CSI volume.

/// Size limit of a record.
const MAX_RECORD: u64 = 64 << 10;

/// The record in the folder of a volume or of a staging mount; `None` if the folder has no record.
pub(crate) fn csi_record_in(folder: &Path) -> Option<CsiRecord> {
    CsiRecord::from_json(&read_file(&folder.join(CSI_RECORD), MAX_RECORD).ok()?)
}

// The staging mount of a dead CSI volume.
//
// A driver mounts a volume once for the node (staging) and binds that mount for each pod
// (publish). Many drivers mount only staging anew after a restart: blobfuse, k8s-csi-s3. The bind
// stays dead, and only a new pod gets a new bind.

/// Limit of staging folders that are compared.
const MAX_FOLDERS: usize = 4096;

/// The advice for a dead volume whose staging mount answers.
const STAGING_ALIVE: &str = "host mount dead, staging alive: its driver does not mount the volume of a running pod anew; only a new pod gets the new mount";

/// The reason why a volume is dead, with the advice if only the staging mount of the volume
/// answers.
pub fn dead_volume(volume: &Path, words: String, probes: &Probes) -> String {
    if let Some(staging) = staging_mount(volume)
        && matches!(probes.reaches(&[staging])[..], [Reach::Alive])
    {
        return format!("{words}; {STAGING_ALIVE}");
    }
    words
}

/// The staging mount of the volume that is published at this path,
/// `<root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount`, by the kubelet's records. No folder
/// on the way is in a volume.
fn staging_mount(publish: &Path) -> Option<PathBuf> {
    let csi = Plugin::csi();
    let folder = publish.parent().filter(|_| publish.ends_with(csi.below))?;
    let root = folder.ancestors().nth(5)?;
    if folder.parent()?.file_name()? != csi.folder {
        return None;
    }
    let volume = csi_record_in(folder)?;
    let mut staging = None;
    let folders = fs::read_dir(volume.staging_folders(root)?);
    for folder in folders.into_iter().flatten().flatten().take(MAX_FOLDERS) {
        let record = csi_record_in(&folder.path());
        if record.is_some_and(|record| record.is_of_volume(&volume)) {
            staging = Some(folder.path().join(STAGING_MOUNT));
            break;
        }
    }
    let staging = staging.or_else(|| volume.old_staging_mount(root))?;
    let handle = Handle::of(&staging).ok()?.unqueried();
    let mount = Mounts::default().mount_of(&handle).ok()?;
    mount.is_mount_point.then_some(staging)
}
