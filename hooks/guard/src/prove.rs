//! After the runtime created a container, and before its program runs: compares its mounts with the
//! record of the admission.

use std::path::Path;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::judge::{Finding, Verdict};
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::plan::{refusal_of_uncompared, refusal_of_wrong};
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::proof::{Comparison, Difference, ExpectedBind, ExpectedBinds};
use bindguard_core::report::Report;
use bindguard_core::source::SourceKind;
use bindguard_sys::bundle::{self, BundleError, record};
use bindguard_sys::enter::{HeldProcess, ProcessError};

use crate::admission::{OpenBundle, OpenError, named_report};
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

/// Why the mounts of a container could not be compared.
#[derive(Debug, thiserror::Error)]
enum ProveError {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The agent was started since, or was late.
    #[error("its create was not checked by this agent")]
    CreateNotChecked,
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Sandbox(#[from] RefreshError),
}

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
    proved.report.unproven = record::read(bundle).map_or(0, |expected| expected.binds.len());
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
    if record::read(path).is_ok() {
        return None;
    }
    Some(Proved::by(path, policy, |proved| {
        proved.compare_new(path, pid, sources, policy, places)
    }))
}

impl Proved {
    fn by(
        bundle: &Path,
        policy: &Policy,
        compare: impl FnOnce(&mut Self) -> Result<(), ProveError>,
    ) -> Self {
        let start = Instant::now();
        let mut proved = Self {
            report: Report::about_bundle(bundle),
            refusal: None,
        };
        if let Err(error) = compare(&mut proved) {
            proved.skip(error_chain(&error), policy);
        }
        proved.report.set_duration(start.elapsed());
        proved
    }

    fn compare(
        &mut self,
        path: &Path,
        pid: u32,
        policy: &Policy,
        places: &Places,
    ) -> Result<(), ProveError> {
        let expected = record::read(path)?;
        let bytes = bundle::read_spec(path).map_err(OpenError::from)?;
        let bundle = OpenBundle::parse(&bytes, path, policy).map_err(OpenError::from)?;
        self.compare_mounts(&bundle, &expected, pid, places)?;
        record::add_mounts_before(path, expected);
        Ok(())
    }

    fn compare_new(
        &mut self,
        path: &Path,
        pid: u32,
        sources: Option<&ExpectedSources>,
        policy: &Policy,
        places: &Places,
    ) -> Result<(), ProveError> {
        let bytes = bundle::read_spec(path).map_err(OpenError::from)?;
        let bundle = OpenBundle::parse(&bytes, path, policy).map_err(OpenError::from)?;
        if bundle.policy.proof == Alarm::Off {
            return Ok(());
        }
        let binds = bundle.spec.binds();
        let Some(sources) = sources else {
            self.report.container = Identity::from_spec(&bundle.spec);
            self.report.unproven = binds.len();
            return Err(ProveError::CreateNotChecked);
        };
        let expected = sources.in_bundle(&bundle);
        if !expected.binds.is_empty() {
            self.compare_mounts(&bundle, &expected, pid, places)?;
        }
        let compared = binds.iter().filter(|bind| !sources.is_refreshed(bind));
        self.report.unproven += compared.count() - expected.binds.len();
        Ok(())
    }

    fn compare_mounts(
        &mut self,
        bundle: &OpenBundle<'_>,
        expected: &ExpectedBinds,
        pid: u32,
        places: &Places,
    ) -> Result<(), ProveError> {
        let Some((process, table)) = mounts_unless_ended(pid)? else {
            return Ok(());
        };
        let found = match differences(expected, &table) {
            Some(found) if !found.is_empty() && is_sandbox(&process)? => None,
            found => found,
        };
        // The admission reported the problems of the spec.
        self.report.container = Identity::from_spec(&bundle.spec);
        match found {
            Some(found) => self.add(bundle, &table, &found, places),
            None => self.report.unproven = expected.binds.len(),
        }
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
        table: &MountTable,
        found: &[(&ExpectedBind, Difference)],
        places: &Places,
    ) {
        let recorded: Vec<_> = found.iter().map(|(expected, _)| *expected).collect();
        let now = expect_again(bundle, &recorded);
        let still_differ = differences(&now, table).unwrap_or_default();
        let mut wrong = Vec::new();
        for (recorded, difference) in found {
            let is_now = |it: &&ExpectedBind| it.bind == recorded.bind;
            match now.binds.iter().find(is_now) {
                // A symlink on the way leads elsewhere: the writer of the symlink chose the source
                // after the guard had checked another source.
                Some(now) if now == *recorded || !now.has_same_way(recorded) => {
                    wrong.push((recorded.bind, difference.clone()));
                }
                Some(now) if still_differ.iter().all(|(it, _)| it.bind != now.bind) => {}
                // The source changed again, or is gone: there is nothing to compare with.
                Some(_) | None => self.report.unproven += 1,
            }
        }
        let scope = bundle.policy.host_root_scope;
        let findings = wrong.into_iter().filter_map(|(index, difference)| {
            let mut binds = bundle.spec.binds().iter();
            let bind = binds.find(|bind| bind.index() == index)?;
            Some(Finding {
                bind: Some(index),
                source: bind.source().to_owned(),
                destination: Some(bind.destination().to_owned()),
                kind: SourceKind::from_path(bind.source(), places, scope),
                verdict: Verdict::Wrong(difference),
            })
        });
        let findings: Vec<_> = findings.collect();
        let policy = &bundle.policy;
        self.refusal = findings.iter().find_map(|it| refusal_of_wrong(it, policy));
        self.report.add(findings, |_| None);
    }
}

/// `None` if the container's init has ended: no program of the container can run any more.
fn mounts_unless_ended(pid: u32) -> Result<Option<(HeldProcess, MountTable)>, ProcessError> {
    let process = match HeldProcess::open(pid) {
        Err(ProcessError::Ended(_)) => return Ok(None),
        process => process?,
    };
    match process.mounts() {
        // An exiting process loses its mount namespace before its end.
        Err(_) if process.ends_within(EXIT_TIMEOUT) => Ok(None),
        table => Ok(Some((process, table?))),
    }
}

/// True for a process whose mounts are not those of a container, as gVisor's and Kata's.
fn is_sandbox(process: &HeldProcess) -> Result<bool, RefreshError> {
    match refuse_sandbox(process, &process.mount_namespace()?) {
        Ok(()) => Ok(false),
        Err(RefreshError::MountsOfNode(_) | RefreshError::Sandbox(_)) => Ok(true),
        Err(error) => Err(error),
    }
}

/// `None` if the table is not that of the container.
fn differences<'e>(
    expected: &'e ExpectedBinds,
    table: &MountTable,
) -> Option<Vec<(&'e ExpectedBind, Difference)>> {
    let mut comparison = Comparison::new(expected);
    for mount in table.entries() {
        comparison.add(mount);
    }
    comparison.differences()
}
