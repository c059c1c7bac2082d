//! An operator's survey of the node: every volume-subpath and every volume, with names.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::time::Instant;
use std::{fs, io, slice};

use bindguard_core::error_chain;
use bindguard_core::evidence::{
    FileIdentity, FileKind, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
    VolumeMount,
};
use bindguard_core::judge::{
    Finding, Fit, PathInVolume, Unmounted, Verdict, VerdictName, judge_plain_volume, judge_reach,
    judge_subpath, judge_volume,
};
use bindguard_core::kubelet::{
    DATA_LINK, MountedVolume, Plugin, TimestampDirectory, VolumeLayout, VolumeSubpath,
};
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::paths::{below, join};
use bindguard_core::places::Places;
use bindguard_core::plan::{Plan, Rebind};
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::report::{Outcome, Report};
use bindguard_core::source::SourceKind;
use bindguard_guard::{Probes, dead_volume, judge_subpaths, planned_outcome, rebind};
use bindguard_sys::observe::{
    HeldSubpath, HeldVolume, Volumes, is_listed, list_subpaths, list_volumes,
};
use bindguard_sys::replace::detach;
use bindguard_sys::{Failure, Mounts, read_mount_table};

use crate::kubelet_roots::Roots;
use crate::kubelet_roots::place_in;
use crate::node_report::NodeReport;
use crate::old_files::old_files;
use crate::pods::Pods;

/// The action for the stale subpaths of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairAct {
    /// Nothing: report the effect of a re-bind.
    Check,
    /// Bind the current target in their place.
    Rebind,
    /// Detach the stale mount, and leave the rest to the kubelet.
    Detach,
}

/// Judges the volumes and subpaths of this node whose paths are `wanted`, and finds the running
/// containers of these pods that read old files.
pub fn survey_node(
    policy: &Policy,
    places: &Places,
    pods: &Pods,
    wanted: impl Fn(&Path) -> bool,
) -> NodeReport {
    let start = Instant::now();
    let probes = Probes::for_operator();
    let roots = Roots::of(places);
    let mut report = diagnose_subpaths(policy, &roots, &probes, |subpath| wanted(&subpath.path()));
    let mut volumes = diagnose_volumes(&roots, &probes, &wanted);
    report.binds.append(&mut volumes.binds);
    report.problems.append(&mut volumes.problems);
    let (old_files, mut unchecked) = old_files(roots.names(), pods, &wanted);
    report.problems.append(&mut unchecked);
    report.set_duration(start.elapsed());
    let mut report = with_table(report, read_mount_table(), roots, places, pods);
    report.keep_mounts(policy.below_emptydirs, wanted);
    NodeReport {
        old_files,
        ..report
    }
}

/// Acts on the stale subpaths that are `wanted`. Volumes are not inspected: none can be repaired
/// from here.
pub fn repair_node(
    policy: &Policy,
    places: &Places,
    pods: &Pods,
    act: RepairAct,
    wanted: impl Fn(&VolumeSubpath) -> bool,
) -> NodeReport {
    // Read before the repair: the report names the sources that the mounts had then.
    let table = read_mount_table();
    let roots = Roots::of(places);
    let report = match act {
        RepairAct::Check => diagnose_subpaths(policy, &roots, &Probes::for_operator(), wanted),
        RepairAct::Rebind => rebind_subpaths(policy, &roots, wanted),
        RepairAct::Detach => detach_subpaths(&roots, wanted),
    };
    let mut report = with_table(report, table, roots, places, pods);
    report.mounts_below_emptydir.clear();
    report
}

/// Overrides the policy of admissions: an operator's request is always inspected, and can be
/// repaired.
fn for_operators(policy: &Policy) -> Policy {
    Policy {
        stale_subpaths: Mode::Repair,
        ..*policy
    }
}

/// The outcome that a repair of this finding alone would have.
fn planned_alone(finding: &Finding, policy: &Policy) -> Option<Outcome> {
    let plan = Plan::from_findings(slice::from_ref(finding), policy);
    planned_outcome(finding, &plan, policy)
}

fn with_table(
    mut report: Report,
    table: Result<MountTable, Failure>,
    roots: Roots,
    places: &Places,
    pods: &Pods,
) -> NodeReport {
    let table = match table {
        Ok(table) => Some(roots.name_mounts(table)),
        Err(error) => {
            report.problems.push(error_chain(&error));
            None
        }
    };
    report.problems.extend(roots.problems);
    NodeReport::from_report(report, table.as_ref(), pods, places)
}

fn diagnose_volumes(roots: &Roots, probes: &Probes, wanted: impl Fn(&Path) -> bool) -> Report {
    let mut report = Report::default();
    let mut volumes = Volumes::default();
    for root in roots.names() {
        match list_volumes(root) {
            Ok(found) => {
                volumes.mounted.extend(found.mounted);
                volumes.plain.extend(found.plain);
            }
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    volumes
        .mounted
        .retain(|volume| wanted(volume.mount_point()));
    volumes.plain.retain(|directory| wanted(directory));
    let mounted = judged(
        &volumes.mounted,
        probes,
        MountedVolume::mount_point,
        judge_volume,
    );
    let plain = judged(&volumes.plain, probes, PathBuf::as_path, |_, mount| {
        judge_plain_volume(mount)
    });
    let mounted = mounted.into_iter().zip(volumes.mounted);
    let mounted = mounted.map(|(verdict, volume)| {
        let source = volume.mount_point().to_owned();
        without_bind(source, SourceKind::MountedVolume(volume), verdict)
    });
    let plain = plain.into_iter().zip(volumes.plain);
    let plain =
        plain.map(|(verdict, source)| without_bind(source, SourceKind::PlainVolume, verdict));
    report.add(mounted.chain(plain).collect(), |_| None);
    report
}

/// Judges volumes by the mounts at their places; probes those on servers first.
fn judged<V>(
    volumes: &[V],
    probes: &Probes,
    place: impl Fn(&V) -> &Path,
    judge: impl Fn(&V, &Observed<VolumeMount>) -> Verdict,
) -> Vec<Verdict> {
    let some = |volumes: &[V]| {
        let mounts = Mounts::default();
        let held: Vec<_> = volumes
            .iter()
            .map(|volume| HeldVolume::hold(place(volume)))
            .collect();
        let on_server: Vec<bool> = held
            .iter()
            .map(|held| held.is_on_a_server(&mounts))
            .collect();
        let paths_to_probe = volumes
            .iter()
            .zip(&on_server)
            .filter(|(_, on_server)| **on_server);
        let paths_to_probe: Vec<PathBuf> = paths_to_probe
            .map(|(volume, _)| place(volume).to_owned())
            .collect();
        let mut answers = probes.reaches(&paths_to_probe).into_iter();
        let mut verdict = |((volume, held), on_server): ((&V, &HeldVolume), &bool)| {
            let dead = on_server
                .then(|| answers.next())
                .flatten()
                .as_ref()
                .and_then(judge_reach);
            match dead {
                Some(Verdict::Dead(words)) => {
                    Verdict::Dead(dead_volume(place(volume), words, probes))
                }
                Some(verdict) => verdict,
                None => judge(volume, &held.observe(&mounts)),
            }
        };
        volumes
            .iter()
            .zip(&held)
            .zip(&on_server)
            .map(&mut verdict)
            .collect::<Vec<_>>()
    };
    volumes.chunks(MAX_OPEN_SOURCES).flat_map(some).collect()
}

/// A finding of a survey, which reads no spec.
fn without_bind(source: PathBuf, kind: SourceKind, verdict: Verdict) -> Finding {
    Finding {
        bind: None,
        source,
        destination: None,
        kind,
        verdict,
    }
}

// Detaches a stale subpath's mount, and nothing more: the kubelet binds it again when it next
// starts the container.
//
// An operator wants this on a node whose kubelet has the fix of 1.19 and where a re-bind is not
// possible; kubediag's recoverer does the same. Until the kubelet binds again, the path shows the
// empty file underneath.

/// The reason why a mount was not detached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotDetached {
    /// A guard repaired it, or the pod went away.
    #[error("it is no longer stale: {0}")]
    NoLongerStale(VerdictName),
    #[error("{0}")]
    Failed(String),
}

/// Detaches the mount of a subpath that is still stale: the very mount that was judged, whatever a
/// guard attaches meanwhile.
pub(crate) fn detach_stale(subpath: &VolumeSubpath) -> Result<(), NotDetached> {
    let held = HeldSubpath::hold(subpath.clone());
    let probes = Probes::for_repairs(Instant::now());
    match judge_subpath(subpath, &probes.observe_one(&held, &Mounts::default())) {
        Verdict::Stale { .. } => {}
        verdict => return Err(NotDetached::NoLongerStale(verdict.name())),
    }
    let stale = held
        .handle()
        .ok_or_else(|| NotDetached::Failed("it went away".to_owned()))?;
    detach(stale).map_err(|error| NotDetached::Failed(error_chain(&error)))
}

// All volume-subpaths of a node: judged, or repaired without waiting for a container's next
// create.

/// The volume-subpaths of this node that are `wanted`, subpaths_judged. Changes nothing.
pub(crate) fn diagnose_subpaths(
    policy: &Policy,
    roots: &Roots,
    probes: &Probes,
    wanted: impl Fn(&VolumeSubpath) -> bool,
) -> Report {
    let policy = for_operators(policy);
    report_on_subpaths(roots, probes, wanted, |finding| {
        planned_alone(finding, &policy)
    })
}

/// Re-binds every stale subpath that is `wanted`, whatever policy says of admissions: an operator
/// requested it. Other subpaths are not inspected.
pub(crate) fn rebind_subpaths(
    policy: &Policy,
    roots: &Roots,
    wanted: impl Fn(&VolumeSubpath) -> bool,
) -> Report {
    let policy = for_operators(policy);
    let probes = Probes::for_operator();
    report_on_subpaths(roots, &probes, wanted, |finding| {
        Rebind::from_finding(finding, &policy).map(|order| repaired(&order))
    })
}

/// Detaches the stale mount of every subpath that is `wanted`. Only stale subpaths are detached.
pub(crate) fn detach_subpaths(roots: &Roots, wanted: impl Fn(&VolumeSubpath) -> bool) -> Report {
    report_on_subpaths(roots, &Probes::for_operator(), wanted, |finding| {
        match (&finding.kind, &finding.verdict) {
            (SourceKind::Subpath(subpath), Verdict::Stale { .. }) => {
                Some(match detach_stale(subpath) {
                    Ok(()) => Outcome::Detached,
                    Err(error) => Outcome::Failed {
                        error: error.to_string(),
                    },
                })
            }
            _ => None,
        }
    })
}

fn repaired(order: &Rebind) -> Outcome {
    let probes = Probes::for_repairs(Instant::now());
    rebind(order, &probes).unwrap_or_else(Outcome::from)
}

fn report_on_subpaths(
    roots: &Roots,
    probes: &Probes,
    wanted: impl Fn(&VolumeSubpath) -> bool,
    outcome: impl Fn(&Finding) -> Option<Outcome>,
) -> Report {
    let start = Instant::now();
    let mut report = Report::default();
    let mut subpaths = Vec::new();
    for root in roots.names() {
        match list_subpaths(root) {
            Ok(found) => subpaths.extend(found),
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    subpaths.retain(wanted);
    report.add(subpaths_judged(&subpaths, probes), outcome);
    report.set_duration(start.elapsed());
    report
}

/// Limit of sources that are open at a time, with at most three descriptors each: a shell's limit
/// is 1024, and a node may have thousands.
pub(crate) const MAX_OPEN_SOURCES: usize = 100;

fn subpaths_judged(subpaths: &[VolumeSubpath], probes: &Probes) -> Vec<Finding> {
    let at_a_time = subpaths.chunks(MAX_OPEN_SOURCES);
    let findings = at_a_time.flat_map(|some| judge_subpaths(some, probes));
    findings.filter(|finding| !is_gone(finding)).collect()
}

/// True if the kubelet removed the subpath after it was listed.
fn is_gone(finding: &Finding) -> bool {
    let SourceKind::Subpath(subpath) = &finding.kind else {
        return false;
    };
    may_be_gone(&finding.verdict) && !is_listed(subpath)
}

/// The verdicts on a subpath that the kubelet removed after it was listed.
fn may_be_gone(verdict: &Verdict) -> bool {
    matches!(
        verdict,
        Verdict::Unmounted(Unmounted::Subpath) | Verdict::Unknown(_)
    )
}

// The survey of a node by a file with its mount table, and by its files below a directory.
//
// A debug pod has the node's root directory, and reads it without entering the node's mount
// namespace. The pod lacks mounts that the node made later. If a volume is not readable there, a
// deleted root is still certain: nothing can be bound from it.

/// Judges the `wanted` subpaths and volumes of a node by its mount table and its files below
/// `root`.
pub fn survey_recorded(
    policy: &Policy,
    places: &Places,
    pods: &Pods,
    table: &MountTable,
    root: &Path,
    wanted: impl Fn(&Path) -> bool,
) -> NodeReport {
    let start = Instant::now();
    let policy = for_operators(policy);
    let roots = recorded_roots(places, table, root);
    let mut table = table.clone();
    for root in roots.iter().filter(|root| root.named != root.real) {
        table = table.with_name(&root.real, &root.named);
    }
    let table = &table;
    let (recorded, mut report) = (Recorded::new(table, root, &roots), Report::default());
    let mut findings = subpaths(&roots, table, &recorded, &mut report);
    let (mounted, mut plain) = volumes(&roots, &recorded, &mut report);
    findings.extend(mounted);
    findings.retain(|finding| wanted(&finding.source));
    plain.retain(|directory| wanted(directory));
    findings.extend(plain.into_iter().map(plain_volume));
    report.add(findings, |finding| planned_alone(finding, &policy));
    report.set_duration(start.elapsed());
    let skipped = table.skipped().map(|skipped| error_chain(skipped));
    let complete = Some(table).filter(|_| skipped.is_none());
    report.problems.extend(skipped);
    let mut report = NodeReport::from_report(report, complete, pods, places);
    report.keep_mounts(policy.below_emptydirs, wanted);
    report
}

/// The mounted subpaths, and those of which only the directory is left.
fn subpaths(
    roots: &[RecordedRoot],
    table: &MountTable,
    recorded: &Recorded<'_>,
    report: &mut Report,
) -> Vec<Finding> {
    let mounted = table
        .entries()
        .iter()
        .filter_map(|e| VolumeSubpath::from_path(&e.mount_point, names(roots)));
    let mut found: Vec<VolumeSubpath> = mounted.collect();
    for root in names(roots) {
        match list_subpaths(&recorded.readable(root)) {
            Ok(listed) => found.extend(listed.iter().map(|subpath| subpath.at_root(root))),
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    found.sort_by_key(VolumeSubpath::path);
    found.dedup();
    let judged = found.into_iter().map(|subpath| {
        let verdict = judge_subpath(&subpath, &recorded.subpath(&subpath));
        without_bind(subpath.path(), SourceKind::Subpath(subpath), verdict)
    });
    judged.collect()
}

fn names(roots: &[RecordedRoot]) -> impl Iterator<Item = &Path> {
    roots.iter().map(|root| root.named.as_path())
}

/// A server cannot be probed from here.
fn plain_volume(source: PathBuf) -> Finding {
    without_bind(source, SourceKind::PlainVolume, Verdict::Current)
}

/// The volumes that must be mounted, judged by the mount table, and the directories of volumes that
/// need no mount.
fn volumes(
    roots: &[RecordedRoot],
    recorded: &Recorded<'_>,
    report: &mut Report,
) -> (Vec<Finding>, Vec<PathBuf>) {
    let (mut mounted, mut plain) = (Vec::new(), Vec::new());
    for named in names(roots) {
        let readable = recorded.readable(named);
        match list_volumes(&readable) {
            Ok(listed) => {
                for volume in &listed.mounted {
                    mounted.extend(volume.moved(&readable, named));
                }
                for volume in &listed.plain {
                    plain.extend(
                        volume
                            .strip_prefix(&readable)
                            .map(|below| named.join(below)),
                    );
                }
            }
            Err(error) => report.problems.push(error_chain(&error)),
        }
    }
    let judged = mounted.into_iter().map(|volume| {
        let verdict = judge_volume(&volume, &recorded.volume_mount(&volume));
        let source = volume.mount_point().to_owned();
        without_bind(source, SourceKind::MountedVolume(volume), verdict)
    });
    (judged.collect(), plain)
}

/// A kubelet root of a recorded node.
#[derive(Debug)]
struct RecordedRoot {
    /// Its name in the config.
    named: PathBuf,
    /// Its name in the mount table and below the directory: a folder of the name may be a symlink.
    real: PathBuf,
}

/// The kubelet roots of a recorded node, each directory once.
fn recorded_roots(places: &Places, table: &MountTable, root: &Path) -> Vec<RecordedRoot> {
    let mut roots: Vec<RecordedRoot> = Vec::new();
    for named in places.kubelet_roots() {
        let real = resolved_in(root, named);
        let place = place_in(table, &real);
        let is_known = |known: &RecordedRoot| {
            known.real == real || place.is_some() && place_in(table, &known.real) == place
        };
        if !roots.iter().any(is_known) {
            let named = named.to_owned();
            roots.push(RecordedRoot { named, real });
        }
    }
    roots
}

/// The path to which `path` leads with `root` as `/`. No symlink below `root` leads to a file of the
/// reader's own root directory.
fn resolved_in(root: &Path, path: &Path) -> PathBuf {
    const MAX_LINKS: usize = 40;
    let names = |path: &Path| -> Vec<OsString> {
        let names = path.components().map(|name| name.as_os_str().to_owned());
        names.rev().collect()
    };
    let (mut done, mut left, mut links) = (PathBuf::from("/"), names(path), 0);
    while let Some(name) = left.pop() {
        match Path::new(&name).components().next() {
            Some(Component::RootDir) => done = PathBuf::from("/"),
            Some(Component::ParentDir) => drop(done.pop()),
            Some(Component::Normal(name)) => {
                let next = done.join(name);
                match fs::read_link(path_below(root, &next)) {
                    Ok(target) if links < MAX_LINKS => {
                        links += 1;
                        left.extend(names(&target));
                    }
                    Ok(_) | Err(_) => done = next,
                }
            }
            Some(Component::CurDir | Component::Prefix(_)) | None => {}
        }
    }
    done
}

fn path_below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A node by its mount table and its files. Paths are the node's own.
#[derive(Debug)]
struct Recorded<'r> {
    table: MountIndex<'r>,
    roots: &'r [RecordedRoot],
    /// A skipped line may be a mount at any path, and on top of any other mount.
    skipped: Option<String>,
    root: &'r Path,
}

impl<'r> Recorded<'r> {
    /// The node with this mount table, which has the names of `roots`, whose `/` is at `root`.
    fn new(table: &'r MountTable, root: &'r Path, roots: &'r [RecordedRoot]) -> Self {
        Self {
            roots,
            table: MountIndex::of(table),
            skipped: table.skipped().map(ToString::to_string),
            root,
        }
    }

    /// The path at which a file of the node is read.
    fn readable(&self, path: &Path) -> PathBuf {
        for root in self.roots {
            if let Some(rest) = below(path, &root.named) {
                return path_below(self.root, &join(root.real.clone(), rest));
            }
        }
        path_below(self.root, path)
    }

    /// The recorded mount of a volume.
    fn volume_mount(&self, volume: &MountedVolume) -> Observed<VolumeMount> {
        if let Some(why) = &self.skipped {
            return Observed::Unreadable(why.clone());
        }
        match self.table.stack_at(volume.mount_point()).last() {
            Some(entry) => Observed::Seen(VolumeMount {
                fs_type: entry.fs_type.clone(),
                deleted: entry.root.deleted,
            }),
            None => Observed::Absent,
        }
    }

    /// The recorded evidence about a subpath.
    fn subpath(&self, subpath: &VolumeSubpath) -> SubpathEvidence {
        let path = subpath.path();
        let stack = self.table.stack_at(&path);
        let without_mount = |mount| SubpathEvidence {
            mount,
            reach: Reach::NotNeeded,
            volume: Observed::Absent,
            target: Observed::Absent,
        };
        if let Some(why) = &self.skipped {
            return without_mount(Observed::Unreadable(why.clone()));
        }
        let Some(entry) = stack.last() else {
            return without_mount(Observed::Absent);
        };
        let mut mount = SubpathMount {
            root: entry.root.clone(),
            device: entry.device,
            fs_type: entry.fs_type.clone(),
            identity: Observed::Seen(recorded_identity(FileKind::File)),
            covers_its_equal: stack.len() > 1,
        };
        let volume = self.volume(subpath, entry, &mount);
        let target = match &volume {
            Observed::Seen(volume) => self.target(&mount, volume),
            Observed::Absent | Observed::Unreadable(_) => Observed::Absent,
        };
        if let Observed::Seen(Target {
            file: Observed::Seen(file),
            ..
        }) = &target
        {
            // The directory shows which file has the name, and not which file is mounted.
            mount.identity = Observed::Seen(*file);
        }
        SubpathEvidence {
            mount: Observed::Seen(mount),
            reach: Reach::NotNeeded,
            volume,
            target,
        }
    }

    /// The volume with this name whose plugin fits best.
    fn volume(
        &self,
        subpath: &VolumeSubpath,
        entry: &MountEntry,
        mount: &SubpathMount,
    ) -> Observed<Volume> {
        let mut volumes = Vec::new();
        for plugin in Plugin::all() {
            let directory = subpath.volume_directory(plugin);
            if self.readable(&directory).symlink_metadata().is_ok() {
                volumes.push(self.volume_of(plugin, directory, entry));
            }
        }
        volumes.sort_by_key(|volume| match volume {
            Observed::Seen(volume) => Fit::of(mount, volume),
            Observed::Absent | Observed::Unreadable(_) => Fit::None,
        });
        match volumes.into_iter().next() {
            Some(Observed::Seen(volume)) => Observed::Seen(Volume {
                layout: self.layout(mount, &volume),
                ..volume
            }),
            Some(other) => other,
            None => {
                let root = self.root.display();
                Observed::Unreadable(format!("its volume is not below {root}"))
            }
        }
    }

    fn volume_of(
        &self,
        plugin: Plugin,
        directory: PathBuf,
        entry: &MountEntry,
    ) -> Observed<Volume> {
        let over = self.table.mount_over(&directory);
        let Some((mount, place)) =
            over.and_then(|over| Some((over, over.place_in_filesystem(&directory)?)))
        else {
            return Observed::Unreadable("the mount table has no mount of its volume".to_owned());
        };
        Observed::Seen(Volume {
            plugin,
            device: mount.device,
            fs_type: mount.fs_type.clone(),
            place,
            is_mount_point: mount.mount_point == directory,
            is_newer: self.table.is_listed_after(mount, entry),
            layout: plugin.layout(),
            directory,
        })
    }

    /// The layout that the volume's writer made: see [`PathInVolume::begins_like_a_payload`].
    fn layout(&self, mount: &SubpathMount, volume: &Volume) -> VolumeLayout {
        let may_be_payload = PathInVolume::from_mount(mount, volume)
            .is_ok_and(|sub_path| sub_path.begins_like_a_payload());
        let link = || fs::read_link(self.readable(&volume.directory).join(DATA_LINK)).ok();
        let is_payload = may_be_payload
            && link().is_some_and(|to| TimestampDirectory::from_name(to.as_os_str()).is_some());
        if is_payload {
            VolumeLayout::Payload
        } else {
            volume.layout
        }
    }

    fn target(&self, mount: &SubpathMount, volume: &Volume) -> Observed<Target> {
        let Ok(sub_path) = PathInVolume::from_mount(mount, volume) else {
            return Observed::Absent;
        };
        let directory = self.readable(&volume.directory);
        let payload = match volume.layout {
            VolumeLayout::Plain => None,
            VolumeLayout::Payload => match fs::read_link(directory.join(DATA_LINK)) {
                Ok(link) => TimestampDirectory::from_name(link.as_os_str()),
                Err(error) => return unreadable(&directory.join(DATA_LINK), &error),
            },
        };
        let folder = match &payload {
            Some(payload) => directory.join(payload.name()),
            None => directory,
        };
        let file = match folder.join(&sub_path.path).symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => {
                Observed::Seen(recorded_identity(FileKind::Directory))
            }
            Ok(_) => Observed::Seen(recorded_identity(FileKind::File)),
            // If the payload is not readable, its keys are unknown.
            Err(_) => match fs::read_dir(&folder) {
                Ok(_) => Observed::Absent,
                Err(error) => return unreadable(&folder, &error),
            },
        };
        Observed::Seen(Target {
            timestamp: payload,
            file,
        })
    }
}

fn unreadable<T>(path: &Path, error: &io::Error) -> Observed<T> {
    Observed::Unreadable(format!("read {}: {error}", path.display()))
}

/// The identity of all files of a kind. The mount table has no inode of a bound file, so files with
/// the same names are treated as the same file.
fn recorded_identity(kind: FileKind) -> FileIdentity {
    FileIdentity {
        device: 0,
        inode: 0,
        kind,
    }
}
