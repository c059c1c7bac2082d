//! After the runtime created a container, and before its program runs: compares its mounts with the
//! record of the admission.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::judge::{Finding, Verdict, refusal_of_uncompared, refusal_of_wrong};
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::{Places, SourceKind};
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::proof::{Comparison, Difference, ExpectedBind, ExpectedBinds};
use bindguard_core::report::Report;
use bindguard_sys::bundle::{self, read_record};
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::walk_path_of_process;

use crate::bundle::{OpenBundle, named_report, source_of};
use crate::expect::{ExpectedSources, expect_again};
use crate::refresh::{RefreshError, refuse_sandbox};

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
        let written = bundle::record_written_at(path);
        let bytes = bundle::read_spec(path)?;
        let mut bundle = OpenBundle::parse(&bytes, path, policy)?;
        match expected.refuses {
            Some(true) => bundle.policy.to_mut().proof = Alarm::Refuse,
            Some(false) => bundle.policy.to_mut().proof = Alarm::Report,
            None => {}
        }
        self.compare_mounts(&bundle, &expected, written, pid, places)?;
        if expected.spec.is_some() && expected.spec != bundle::spec_version(path) {
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
        bundle::add_mounts_before(path, expected);
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
        let bytes = bundle::read_spec(path)?;
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
        let mut ways = Self {
            places: HashMap::new(),
            unknown: HashSet::new(),
        };
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
