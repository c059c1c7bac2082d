//! The mounts of a new container: recorded when it is admitted, and compared after its runtime
//! created it and before its program runs. See [`bindguard_core::proof`].
//!
//! The record is made after all repairs and edits, right before the runtime runs. A source is
//! opened only if no server or daemon must answer; the other sources are counted as unproven.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::judge::{Finding, Verdict, refusal_of_uncompared, refusal_of_wrong};
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::proof::{
    AdmittedEntry, Comparison, Difference, ExpectedBind, ExpectedBinds, ExpectedPropagation,
};
use bindguard_core::report::Report;
use bindguard_core::spec::{Bind, RequestedPropagation, SpecEdit};
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::files::{self, read_record, spec_version, write_record};
use bindguard_sys::journal::named_report;
use bindguard_sys::observe::BindSource;
use bindguard_sys::{Handle, Mounts, walk_path_of_process};

use crate::inspect::{MAX_HELD_BINDS, OpenBundle, source_of};
use crate::refresh::{RefreshError, refuse_sandbox};

// The record.

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

/// The expectations for recorded binds, from a new look at the recorded sources. `None` for a source
/// whose mount and path cannot be read.
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
    for (index, observed) in observe(&sources).into_iter().enumerate() {
        let at = known[index];
        if let Some(observed) = observed
            && let BindSource { mount, path } = &observed.source
            && let Some(moved) = recorded[at].moved_to(mount, path)
        {
            now[at] = Some(observed.complete(&sources[index], moved));
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
    for (index, observed) in observe(&sources).into_iter().enumerate() {
        let Some(observed) = observed else { continue };
        let bind = &bundle.spec.binds()[index];
        let BindSource { mount, path } = &observed.source;
        if let Some(new) = ExpectedBind::new(bind, mount, path, propagation(bind)) {
            let new = observed.complete(&sources[index], new);
            expected.binds.push(new);
        }
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

/// A source that was opened, and its inode number on a local filesystem.
struct Observed {
    source: BindSource,
    inode: Option<u64>,
}

impl Observed {
    /// Adds the facts about the source with this name.
    fn complete(self, named: &Path, expected: ExpectedBind) -> ExpectedBind {
        let path = self.source.path;
        ExpectedBind {
            resolved: (path != *named).then_some(path),
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
            opened.push(handle.ok().map(Handle::unqueried));
        }
        let mounts = earlier.for_newly_opened();
        for handle in &opened {
            let handle = handle.as_ref();
            let source = handle.and_then(|handle| BindSource::of(handle, &mounts));
            all.push(source.map(|source| {
                let identity = handle
                    .and_then(|handle| handle.identity().ok())
                    .filter(|_| source.mount.fs_type.is_local());
                Observed {
                    inode: identity.map(|identity| identity.inode),
                    source,
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

// The comparison.

/// Time limit for the exit of an init that has no mount namespace any more.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// The result of a comparison.
#[derive(Debug, Default)]
pub struct Proved {
    /// The binds that differ, and the number of binds that could not be compared.
    pub report: Report,
    /// The reason why policy refuses the container.
    pub refusal: Option<String>,
}

/// An error leaves the mounts of a container uncompared, and is only printed.
type Compared = Result<(), Box<dyn Error>>;

/// Compares the mounts of a container with this init with the record beside its bundle. Changes
/// nothing. A file that was replaced between the admission and the runtime's mount is no
/// difference: the comparison is repeated with the source of now.
pub fn prove_container(bundle: &Path, pid: u32, policy: &Policy, places: &Places) -> Proved {
    Proved::by(bundle, policy, |proved| {
        proved.compare(bundle, pid, policy, places)
    })
}

/// The result for a container whose comparison came to no end, for this reason.
pub fn uncompared_container(bundle: &Path, why: &str, policy: &Policy) -> Proved {
    let mut proved = Proved {
        report: named_report(bundle),
        refusal: None,
    };
    proved.report.unproven = read_record(bundle).map_or(0, |expected| expected.binds.len());
    proved.skip(why.to_owned(), policy);
    proved
}

/// Compares the mounts of a new container with this init with the sources of its admission, for a
/// shim that calls no guard; without sources, the create was not checked. `None` if the bundle has a
/// record: bindguard's shim or wrapper compares such a container.
pub fn prove_new_container(
    path: &Path,
    pid: u32,
    sources: Option<&ExpectedSources>,
    policy: &Policy,
    places: &Places,
) -> Option<Proved> {
    if read_record(path).is_ok() {
        return None;
    }
    Some(Proved::by(path, policy, |proved| {
        proved.compare_new(path, pid, sources, policy, places)
    }))
}

impl Proved {
    fn by(bundle: &Path, policy: &Policy, compare: impl FnOnce(&mut Self) -> Compared) -> Self {
        let start = Instant::now();
        let mut proved = Self {
            report: Report::about_bundle(bundle),
            refusal: None,
        };
        if let Err(error) = compare(&mut proved) {
            proved.skip(error_chain(&*error), policy);
        }
        proved.report.set_duration(start.elapsed());
        proved
    }

    fn compare(&mut self, path: &Path, pid: u32, policy: &Policy, places: &Places) -> Compared {
        let expected = read_record(path)?;
        let written = files::record_written_at(path);
        let bytes = files::read_spec(path)?;
        let mut bundle = OpenBundle::parse(&bytes, path, policy)?;
        match expected.refuses {
            Some(true) => bundle.policy.to_mut().proof = Alarm::Refuse,
            Some(false) => bundle.policy.to_mut().proof = Alarm::Report,
            None => {}
        }
        self.compare_mounts(&bundle, &expected, written, pid, places)?;
        if expected.spec.is_some() && expected.spec != spec_version(path) {
            // A program below the guard, such as nvidia-container-runtime, may have added binds.
            let mut admitted = HashSet::new();
            for entry in &expected.entries {
                admitted.insert((entry.source.as_deref(), entry.destination.as_path()));
            }
            for bind in bundle.spec.binds() {
                let source = source_of(bind, path);
                let is_admitted = admitted.contains(&(Some(&*source), bind.destination()));
                self.report.unproven += usize::from(!is_admitted);
            }
        }
        files::add_mounts_before(path, expected);
        Ok(())
    }

    fn compare_new(
        &mut self,
        path: &Path,
        pid: u32,
        sources: Option<&ExpectedSources>,
        policy: &Policy,
        places: &Places,
    ) -> Compared {
        let bytes = files::read_spec(path)?;
        let bundle = OpenBundle::parse(&bytes, path, policy)?;
        if bundle.policy.proof == Alarm::Off {
            return Ok(());
        }
        let binds = bundle.spec.binds();
        let Some(sources) = sources else {
            self.report.container = Identity::from_spec(&bundle.spec);
            self.report.unproven = binds.len();
            // The agent was started since, or was late.
            return Err("its create was not checked by this agent".into());
        };
        let expected = sources.in_bundle(&bundle);
        if !expected.binds.is_empty() {
            self.compare_mounts(&bundle, &expected, None, pid, places)?;
        }
        let compared = binds.iter().filter(|bind| !sources.is_refreshed(bind));
        self.report.unproven += compared.count() - expected.binds.len();
        Ok(())
    }

    /// `written`: the time of the record; `None` for a container that another shim created.
    fn compare_mounts(
        &mut self,
        bundle: &OpenBundle<'_>,
        expected: &ExpectedBinds,
        written: Option<Duration>,
        pid: u32,
        places: &Places,
    ) -> Compared {
        // No program of a container whose init has ended can run any more.
        let process = match HeldProcess::open(pid) {
            Err(ProcessError::Ended(_)) => return Ok(()),
            process => process?,
        };
        let table = match process.mounts() {
            // An exiting process loses its mount namespace before its end.
            Err(_) if process.ends_within(EXIT_TIMEOUT) => return Ok(()),
            table => table?,
        };
        // The admission reported the problems of the spec.
        self.report.container = Identity::from_spec(&bundle.spec);
        let mut comparison = Comparison::new(expected);
        for mount in table.entries() {
            comparison.add(mount);
        }
        // Other shims have sandboxes whose processes have no mount of the container.
        let mut is_of_sandbox = written.is_none() && !comparison.is_of_container;
        if comparison.differences().is_empty() {
            return Ok(());
        }
        if !is_of_sandbox {
            let namespace = process.mount_namespace()?;
            is_of_sandbox = match refuse_sandbox(&process, &namespace) {
                Ok(()) => false,
                Err(RefreshError::MountsOfNode(_) | RefreshError::Sandbox(_)) => true,
                Err(error) => return Err(error.into()),
            };
        }
        if is_of_sandbox {
            self.report.unproven = expected.binds.len();
            return Ok(());
        }
        let ways = Ways::of(expected, pid, &table, written);
        let found = ways.differences(expected, &table);
        if found.is_empty() || !process.is_alive() {
            return Ok(());
        }
        self.add(bundle, expected, &ways, &table, &found, places);
        Ok(())
    }

    /// A container that could not be compared runs, unless policy refuses it.
    fn skip(&mut self, problem: String, policy: &Policy) {
        self.refusal = refusal_of_uncompared(&problem, policy);
        let problem = format!("the mounts of the container are not proven: {problem}");
        self.report.problems.push(problem);
    }

    fn add(
        &mut self,
        bundle: &OpenBundle<'_>,
        expected: &ExpectedBinds,
        ways: &Ways,
        table: &MountTable,
        found: &[(&ExpectedBind, Difference)],
        places: &Places,
    ) {
        let recorded: Vec<_> = found.iter().map(|(recorded, _)| *recorded).collect();
        let now = expect_again(bundle.path, expected, &recorded);
        let mut expected_now = expected.clone();
        for bind in &mut expected_now.binds {
            if let Some(now) = now.iter().flatten().find(|now| now.bind == bind.bind) {
                bind.clone_from(now);
            }
        }
        let still_differ = ways.differences(&expected_now, table);
        let mut findings = Vec::new();
        for ((recorded, difference), now) in found.iter().zip(&now) {
            let is_wrong = match now {
                // A symlink on the way leads elsewhere: the writer of the symlink chose the source
                // after the guard had checked another source.
                Some(now) if now == *recorded || !now.has_same_way(recorded) => true,
                Some(now) if still_differ.iter().all(|(it, _)| it.bind != now.bind) => continue,
                // The source changed again, or is gone: there is nothing to compare with.
                Some(_) | None => false,
            };
            // Without a walk the place of a symlink's target is unknown. What the container sees at
            // the literal destination is known.
            let is_elsewhere =
                *difference == Difference::NotMounted && ways.unknown.contains(&recorded.bind);
            if !is_wrong || is_elsewhere {
                self.report.unproven += 1;
                continue;
            }
            let entry = expected.entries.get(recorded.bind);
            let source = entry
                .and_then(|entry| entry.source.clone())
                .unwrap_or_default();
            let scope = bundle.policy.host_root_scope;
            findings.push(Finding {
                bind: Some(recorded.bind),
                kind: SourceKind::from_path(&source, places, scope),
                source,
                destination: Some(recorded.destination.clone()),
                verdict: Verdict::Wrong(difference.clone()),
            });
        }
        let policy = &bundle.policy;
        self.refusal = findings.iter().find_map(|it| refusal_of_wrong(it, policy));
        self.report.add(findings, |_| None);
    }
}

/// The places to which the destinations lead through the symlinks of the container's root.
#[derive(Default)]
struct Ways {
    places: HashMap<usize, PathBuf>,
    /// The entries that could not be walked: a server or daemon would have to answer.
    unknown: HashSet<usize>,
}

impl Ways {
    /// Walks all destinations, because any entry can cover another entry. `written` is the time of
    /// the record: the runtime did not follow a symlink that is newer.
    fn of(
        expected: &ExpectedBinds,
        pid: u32,
        table: &MountTable,
        written: Option<Duration>,
    ) -> Self {
        let mut local = HashSet::new();
        for mount in table.entries() {
            if mount.fs_type.is_local() {
                local.insert(u64::from(mount.id.0));
            }
        }
        let mut ways = Self::default();
        let destinations = expected.entries.iter().map(|entry| &entry.destination);
        for (index, path) in destinations.chain(&expected.masked).enumerate() {
            match walk_path_of_process(pid, path, &|mount| local.contains(&mount)) {
                Ok(walk) if written.is_some() && walk.newest_link > written => {}
                Ok(walk) => {
                    ways.places.insert(index, walk.place);
                }
                Err(_) => {
                    ways.unknown.insert(index);
                }
            }
        }
        ways
    }

    fn differences<'e>(
        &self,
        expected: &'e ExpectedBinds,
        table: &MountTable,
    ) -> Vec<(&'e ExpectedBind, Difference)> {
        let mut comparison = Comparison::at_places(expected, &self.places);
        for mount in table.entries() {
            comparison.add(mount);
        }
        comparison.differences()
    }
}
