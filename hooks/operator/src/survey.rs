//! An operator's survey of the node: every volume-subpath and every volume, with names.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::slice;
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::evidence::{
    FileIdentity, FileKind, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
    VolumeMount,
};
use bindguard_core::judge::{
    Finding, Fit, PathInVolume, Plan, Rebind, Unmounted, Verdict, judge_plain_volume, judge_reach,
    judge_subpath, judge_volume,
};
use bindguard_core::kubelet::{
    DATA_LINK, MountedVolume, Plugin, TimestampDirectory, VolumeLayout, VolumeSubpath,
};
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::report::{Outcome, Report};
use bindguard_core::text::{below, join};
use bindguard_guard::{Probes, dead_volume, judge_subpaths, planned_outcome, rebind};
use bindguard_sys::observe::{HeldSubpath, HeldVolume, is_listed, list_subpaths, list_volumes};
use bindguard_sys::replace::detach;
use bindguard_sys::{Failure, Mounts, read_mount_table};

use crate::kubelet_roots::{Root, Roots, place_in};
use crate::node_report::NodeReport;
use crate::old_binds::old_files;
use crate::pods::Pods;

/// Limit of sources that are open at a time, with at most three descriptors each: a shell's limit
/// is 1024, and a node may have thousands.
const MAX_OPEN_SOURCES: usize = 100;

/// The action for the stale subpaths of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairAct {
    /// Nothing: report the effect of a re-bind.
    Check,
    /// Bind the current target in their place.
    Rebind,
    /// Detach the stale mount, and leave the rest to the kubelet, which binds the path before
    /// the container's next start. Until then the path shows the empty file underneath. kubediag's
    /// recoverer does the same.
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
    let policy = for_operators(policy);
    let probes = Probes::for_operator();
    let roots = Roots::of(places);
    let mut report = Report::default();
    let is_wanted = |subpath: &VolumeSubpath| wanted(&subpath.path());
    let findings = judged_subpaths(&roots, &probes, is_wanted, &mut report.problems);
    report.add(findings, |finding| planned_alone(finding, &policy));
    let findings = judged_volumes(&roots, &probes, &wanted, &mut report.problems);
    report.add(findings, |_| None);
    let (old_files, unchecked) = old_files(roots.names(), pods, &wanted);
    report.problems.extend(unchecked);
    report.set_duration(start.elapsed());
    let mut report = with_table(report, read_mount_table(), roots, places, pods);
    report.keep_mounts(policy.below_emptydirs, wanted);
    report.old_files = old_files;
    report
}

/// Acts on the stale subpaths that are `wanted`, whatever the policy says of admissions. Volumes
/// are not inspected: none can be repaired from here.
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
    let start = Instant::now();
    let policy = for_operators(policy);
    let mut report = Report::default();
    let probes = Probes::for_operator();
    let findings = judged_subpaths(&roots, &probes, wanted, &mut report.problems);
    report.add(findings, |finding| match act {
        RepairAct::Check => planned_alone(finding, &policy),
        RepairAct::Rebind => {
            let order = Rebind::from_finding(finding, &policy)?;
            let probes = Probes::for_repairs(Instant::now());
            Some(rebind(&order, &probes).unwrap_or_else(Outcome::from))
        }
        RepairAct::Detach => match (&finding.kind, &finding.verdict) {
            (SourceKind::Subpath(subpath), Verdict::Stale { .. }) => {
                let detached = detach_stale(subpath).map(|()| Outcome::Detached);
                Some(detached.unwrap_or_else(|error| Outcome::Failed { error }))
            }
            _ => None,
        },
    });
    report.set_duration(start.elapsed());
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

/// A finding of a survey, which reads no spec.
fn finding(source: PathBuf, kind: SourceKind, verdict: Verdict) -> Finding {
    Finding {
        bind: None,
        source,
        destination: None,
        kind,
        verdict,
    }
}

/// The volume-subpaths of this node that are `wanted`, judged. Changes nothing.
fn judged_subpaths(
    roots: &Roots,
    probes: &Probes,
    wanted: impl Fn(&VolumeSubpath) -> bool,
    problems: &mut Vec<String>,
) -> Vec<Finding> {
    let mut subpaths = Vec::new();
    for root in roots.names() {
        match list_subpaths(root) {
            Ok(found) => subpaths.extend(found),
            Err(error) => problems.push(error_chain(&error)),
        }
    }
    subpaths.retain(wanted);
    let mut findings = Vec::new();
    for some in subpaths.chunks(MAX_OPEN_SOURCES) {
        findings.extend(judge_subpaths(some, probes));
    }
    // The kubelet may have removed a subpath after it was listed.
    findings.retain(|finding| match (&finding.kind, &finding.verdict) {
        (
            SourceKind::Subpath(subpath),
            Verdict::Unmounted(Unmounted::Subpath) | Verdict::Unknown(_),
        ) => is_listed(subpath),
        _ => true,
    });
    findings
}

/// The volumes of this node that are `wanted`, judged by the mounts at their places. Those on
/// servers are probed first.
fn judged_volumes(
    roots: &Roots,
    probes: &Probes,
    wanted: impl Fn(&Path) -> bool,
    problems: &mut Vec<String>,
) -> Vec<Finding> {
    let (mut volumes, mut plain) = (Vec::new(), Vec::new());
    for root in roots.names() {
        match list_volumes(root) {
            Ok(found) => {
                for volume in found.mounted {
                    let place = volume.mount_point().to_owned();
                    volumes.push((place, Some(volume)));
                }
                plain.extend(found.plain.into_iter().map(|place| (place, None)));
            }
            Err(error) => problems.push(error_chain(&error)),
        }
    }
    volumes.extend(plain);
    volumes.retain(|(place, _)| wanted(place));
    let mut findings = Vec::new();
    for some in volumes.chunks(MAX_OPEN_SOURCES) {
        let mounts = Mounts::default();
        let (mut held, mut served) = (Vec::new(), Vec::new());
        for (place, _) in some {
            let volume = HeldVolume::hold(place);
            if volume.is_on_a_server(&mounts) {
                served.push(place.clone());
            }
            held.push(volume);
        }
        let reaches = probes.reaches(&served);
        let reaches: HashMap<&PathBuf, Reach> = served.iter().zip(reaches).collect();
        for ((place, volume), held) in some.iter().zip(held) {
            let verdict = match (reaches.get(place).and_then(judge_reach), volume) {
                (Some(Verdict::Dead(words)), _) => Verdict::Dead(dead_volume(place, words, probes)),
                (Some(verdict), _) => verdict,
                (None, Some(volume)) => judge_volume(volume, &held.observe(&mounts)),
                (None, None) => judge_plain_volume(&held.observe(&mounts)),
            };
            let kind = volume.clone().map(SourceKind::MountedVolume);
            let kind = kind.unwrap_or(SourceKind::PlainVolume);
            findings.push(finding(place.clone(), kind, verdict));
        }
    }
    findings
}

/// Detaches the mount of a subpath that is still stale: the very mount that was judged, whatever a
/// guard attaches meanwhile.
fn detach_stale(subpath: &VolumeSubpath) -> Result<(), String> {
    let held = HeldSubpath::hold(subpath.clone());
    let probes = Probes::for_repairs(Instant::now());
    match judge_subpath(subpath, &probes.observe_one(&held, &Mounts::default())) {
        Verdict::Stale { .. } => {}
        // A guard repaired it, or the pod went away.
        verdict => return Err(format!("it is no longer stale: {}", verdict.name())),
    }
    let stale = held.handle().ok_or("it went away")?;
    detach(stale).map_err(|error| error_chain(&error))
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
    let table = roots.name_mounts(table.clone());
    let recorded = Recorded {
        table: MountIndex::of(&table),
        skipped: table.skipped().map(ToString::to_string),
        roots: &roots,
        root,
    };
    let mut report = Report::default();
    let mut findings = recorded.subpaths(&table, &mut report.problems);
    findings.extend(recorded.volumes(&mut report.problems));
    findings.retain(|finding| wanted(&finding.source));
    report.add(findings, |finding| planned_alone(finding, &policy));
    report.set_duration(start.elapsed());
    let skipped = table.skipped().map(|skipped| error_chain(skipped));
    let complete = Some(&table).filter(|_| skipped.is_none());
    report.problems.extend(skipped);
    let mut report = NodeReport::from_report(report, complete, pods, places);
    report.keep_mounts(policy.below_emptydirs, wanted);
    report
}

/// The kubelet roots of a recorded node, each directory once: a folder of the configured name may
/// be a symlink, or a bind of another folder.
fn recorded_roots(places: &Places, table: &MountTable, root: &Path) -> Roots {
    let mut roots = Roots::default();
    for named in places.kubelet_roots() {
        let real = resolved_in(root, named);
        let place = place_in(table, &real);
        let is_known = |known: &Root| {
            known.real == real || place.is_some() && place_in(table, &known.real) == place
        };
        if !roots.known.iter().any(is_known) {
            let named = named.to_owned();
            roots.known.push(Root { named, real });
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
struct Recorded<'r> {
    /// With the names of `roots`.
    table: MountIndex<'r>,
    /// A skipped line may be a mount at any path, and on top of any other mount.
    skipped: Option<String>,
    roots: &'r Roots,
    /// The node's `/`.
    root: &'r Path,
}

impl Recorded<'_> {
    /// The mounted subpaths, and those of which only the directory is left.
    fn subpaths(&self, table: &MountTable, problems: &mut Vec<String>) -> Vec<Finding> {
        let mut found: Vec<VolumeSubpath> = table
            .mount_points()
            .filter_map(|path| VolumeSubpath::from_path(path, self.roots.names()))
            .collect();
        for root in self.roots.names() {
            match list_subpaths(&self.readable(root)) {
                Ok(listed) => found.extend(listed.iter().map(|subpath| subpath.at_root(root))),
                Err(error) => problems.push(error_chain(&error)),
            }
        }
        found.sort_by_key(VolumeSubpath::path);
        found.dedup();
        let judged = found.into_iter().map(|subpath| {
            let verdict = judge_subpath(&subpath, &self.evidence(&subpath));
            finding(subpath.path(), SourceKind::Subpath(subpath), verdict)
        });
        judged.collect()
    }

    /// The volumes that must be mounted, judged by the mount table, and the directories of volumes
    /// that need no mount. Their servers cannot be probed from here.
    fn volumes(&self, problems: &mut Vec<String>) -> Vec<Finding> {
        let (mut mounted, mut plain) = (Vec::new(), Vec::new());
        for named in self.roots.names() {
            let readable = self.readable(named);
            let listed = match list_volumes(&readable) {
                Ok(listed) => listed,
                Err(error) => {
                    problems.push(error_chain(&error));
                    continue;
                }
            };
            for volume in &listed.mounted {
                if let Some(volume) = volume.moved(&readable, named) {
                    let verdict = judge_volume(&volume, &self.volume_mount(&volume));
                    let place = volume.mount_point().to_owned();
                    mounted.push(finding(place, SourceKind::MountedVolume(volume), verdict));
                }
            }
            for volume in &listed.plain {
                if let Ok(below) = volume.strip_prefix(&readable) {
                    let place = named.join(below);
                    plain.push(finding(place, SourceKind::PlainVolume, Verdict::Current));
                }
            }
        }
        mounted.extend(plain);
        mounted
    }

    /// The path at which a file of the node is read.
    fn readable(&self, path: &Path) -> PathBuf {
        for root in &self.roots.known {
            if let Some(rest) = below(path, &root.named) {
                return path_below(self.root, &join(root.real.clone(), rest));
            }
        }
        path_below(self.root, path)
    }

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

    fn evidence(&self, subpath: &VolumeSubpath) -> SubpathEvidence {
        let mut evidence = SubpathEvidence {
            mount: Observed::Absent,
            reach: Reach::NotNeeded,
            volume: Observed::Absent,
            target: Observed::Absent,
        };
        if let Some(why) = &self.skipped {
            evidence.mount = Observed::Unreadable(why.clone());
            return evidence;
        }
        let path = subpath.path();
        let stack = self.table.stack_at(&path);
        let Some(entry) = stack.last() else {
            return evidence;
        };
        let mut mount = SubpathMount {
            root: entry.root.clone(),
            device: entry.device,
            fs_type: entry.fs_type.clone(),
            identity: Observed::Seen(recorded_identity(FileKind::File)),
            covers_its_equal: stack.len() > 1,
        };
        evidence.volume = self.volume(subpath, entry, &mount);
        if let Observed::Seen(volume) = &mut evidence.volume {
            evidence.target = self.target(&mount, volume);
        }
        if let Observed::Seen(Target {
            file: Observed::Seen(file),
            ..
        }) = &evidence.target
        {
            // The directory shows which file has the name, and not which file is mounted.
            mount.identity = Observed::Seen(*file);
        }
        evidence.mount = Observed::Seen(mount);
        evidence
    }

    /// The volume with this name whose plugin fits best.
    fn volume(
        &self,
        subpath: &VolumeSubpath,
        entry: &MountEntry,
        mount: &SubpathMount,
    ) -> Observed<Volume> {
        let mut best = None;
        for plugin in Plugin::all() {
            let directory = subpath.volume_directory(plugin);
            if self.readable(&directory).symlink_metadata().is_err() {
                continue;
            }
            let over = self.table.mount_over(&directory);
            let place = over.and_then(|over| over.place_in_filesystem(&directory));
            let (volume, fit) = match over.zip(place) {
                Some((over, place)) => {
                    let volume = Volume {
                        plugin,
                        device: over.device,
                        fs_type: over.fs_type.clone(),
                        place,
                        is_mount_point: over.mount_point == directory,
                        is_newer: self.table.is_listed_after(over, entry),
                        layout: plugin.layout(),
                        directory,
                    };
                    let fit = Fit::of(mount, &volume);
                    (Observed::Seen(volume), fit)
                }
                None => {
                    let why = "the mount table has no mount of its volume";
                    (Observed::Unreadable(why.to_owned()), Fit::None)
                }
            };
            if best.as_ref().is_none_or(|(_, known)| fit < *known) {
                best = Some((volume, fit));
            }
        }
        best.map_or_else(
            || Observed::Unreadable(format!("its volume is not below {}", self.root.display())),
            |(volume, _)| volume,
        )
    }

    /// The file that the kubelet would bind today. Sets the layout that the volume's writer made:
    /// see [`PathInVolume::begins_like_a_payload`].
    fn target(&self, mount: &SubpathMount, volume: &mut Volume) -> Observed<Target> {
        let Ok(mut sub_path) = PathInVolume::from_mount(mount, volume) else {
            return Observed::Absent;
        };
        let mut folder = self.readable(&volume.directory);
        let mut timestamp = None;
        if volume.layout == VolumeLayout::Payload || sub_path.begins_like_a_payload() {
            let link = folder.join(DATA_LINK);
            match fs::read_link(&link) {
                Ok(to) => timestamp = TimestampDirectory::from_name(to.as_os_str()),
                Err(error) if volume.layout == VolumeLayout::Payload => {
                    return Observed::Unreadable(format!("read {}: {error}", link.display()));
                }
                Err(_) => {}
            }
        }
        if let Some(payload) = &timestamp {
            volume.layout = VolumeLayout::Payload;
            sub_path = PathInVolume::from_mount(mount, volume).unwrap_or(sub_path);
            folder.push(payload.name());
        }
        let file = match folder.join(&sub_path.path).symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => {
                Observed::Seen(recorded_identity(FileKind::Directory))
            }
            Ok(_) => Observed::Seen(recorded_identity(FileKind::File)),
            // If the payload is not readable, its keys are unknown.
            Err(_) => match fs::read_dir(&folder) {
                Ok(_) => Observed::Absent,
                Err(error) => {
                    return Observed::Unreadable(format!("read {}: {error}", folder.display()));
                }
            },
        };
        Observed::Seen(Target { timestamp, file })
    }
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
