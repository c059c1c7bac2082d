//! Records what the kernel will show for each bind of a new container, see
//! [`bindguard_core::proof`].
//!
//! The record is made after all repairs and edits, right before the runtime runs. A source is
//! opened only if no server or daemon must answer; the other sources are counted as unproven.

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use bindguard_core::policy::Alarm;
use bindguard_core::proof::{ExpectedBind, ExpectedBinds, ExpectedPropagation};
use bindguard_core::spec::{Bind, RequestedPropagation, SpecEdit};
use bindguard_sys::bundle::record;
use bindguard_sys::observe::BindSource;
use bindguard_sys::{Handle, Mounts, open_without_waiting};

use crate::admission::OpenBundle;
use crate::inspect::{MAX_HELD_BINDS, source_of};

/// The record of a bundle, and the number of binds that it lacks.
#[derive(Debug, Default)]
pub(crate) struct NewRecord {
    pub expected: ExpectedBinds,
    pub unproven: usize,
    /// Why there is no record.
    pub problem: Option<io::Error>,
}

/// A bind, its final source and the propagation that its mount may have.
struct BindToRecord<'w, 'a> {
    bind: &'w Bind<'a>,
    source: &'w Path,
    propagation: ExpectedPropagation,
}

/// Writes the record of a bundle whose spec has these edits. `is_host_root`: true for the position
/// of a bind that must receive the host's umounts. Returns an empty record if policy wants no proof,
/// and a problem if the file cannot be written.
pub(crate) fn record_expected_binds(
    bundle: &OpenBundle<'_>,
    edits: &[SpecEdit],
    is_host_root: impl Fn(usize) -> bool,
) -> NewRecord {
    record::remove(bundle.path);
    let binds = bundle.spec.binds();
    if bundle.policy.proof == Alarm::Off || binds.is_empty() {
        return NewRecord::default();
    }
    let sources = final_sources(bundle, edits);
    let wanted = wanted(binds, &sources, |bind| {
        propagation(bundle, bind, edits, is_host_root(bind.index()))
    });
    let expectation = expect(&wanted);
    match record::write(bundle.path, &expectation.expected) {
        Ok(()) => expectation,
        Err(error) => NewRecord {
            unproven: binds.len(),
            problem: Some(error),
            ..NewRecord::default()
        },
    }
}

/// The sources of the binds of an admitted spec, for a container that has no bundle yet.
#[derive(Debug, Default)]
pub struct ExpectedSources(Vec<(PathBuf, ExpectedBind)>);

impl ExpectedSources {
    /// The number of binds whose source is known.
    pub fn binds(&self) -> usize {
        self.0.len()
    }

    /// The sources of a spec that has these edits. None if policy wants no proof.
    pub(crate) fn of(bundle: &OpenBundle<'_>, edits: &[SpecEdit]) -> Self {
        if bundle.policy.proof == Alarm::Off {
            return Self::default();
        }
        let binds = bundle.spec.binds();
        let sources = final_sources(bundle, edits);
        // The bundle decides on flags and propagation later: other plugins may change them.
        let wanted = wanted(binds, &sources, |_| ExpectedPropagation::Any);
        let expected = expect(&wanted).expected.binds.into_iter();
        let with_source = expected.filter_map(|expected| {
            let is_its = |wanted: &&BindToRecord<'_, '_>| wanted.bind.index() == expected.bind;
            let source = wanted.iter().find(is_its)?.source.to_owned();
            Some((source, expected))
        });
        Self(with_source.collect())
    }

    /// The expectations for a bundle, whose spec other plugins may have changed: for the binds that
    /// still have the same source and destination.
    pub(crate) fn in_bundle(&self, bundle: &OpenBundle<'_>) -> ExpectedBinds {
        let binds = bundle.spec.binds().iter().filter_map(|bind| {
            let is_same = |(source, expected): &&(PathBuf, ExpectedBind)| {
                source == bind.source() && expected.destination == bind.destination()
            };
            let (_, expected) = self.0.iter().find(is_same)?;
            Some(ExpectedBind {
                bind: bind.index(),
                denied: bind.denied(),
                propagation: propagation(bundle, bind, &[], false),
                ..expected.clone()
            })
        });
        ExpectedBinds {
            binds: binds.collect(),
            ..ExpectedBinds::default()
        }
    }
}

/// The expectations for recorded binds, by what their sources are now.
pub(crate) fn expect_again(bundle: &OpenBundle<'_>, recorded: &[&ExpectedBind]) -> ExpectedBinds {
    let found: Vec<_> = bundle
        .spec
        .binds()
        .iter()
        .filter_map(|bind| {
            let expected = recorded.iter().find(|it| it.bind == bind.index())?;
            Some((bind, source_of(bind, bundle.path), expected.propagation))
        })
        .collect();
    let wanted: Vec<_> = found
        .iter()
        .map(|(bind, source, propagation)| BindToRecord {
            bind,
            source,
            propagation: *propagation,
        })
        .collect();
    expect(&wanted).expected
}

fn expect(wanted: &[BindToRecord<'_, '_>]) -> NewRecord {
    let mut binds = Vec::with_capacity(wanted.len());
    let earlier = Mounts::default();
    for some in wanted.chunks(MAX_HELD_BINDS) {
        let opened: Vec<_> = some
            .iter()
            .filter_map(|wanted| {
                let is_local = |handle: &Handle| earlier.is_local(handle);
                let handle = open_without_waiting(wanted.source, is_local).ok()?;
                Some((wanted, handle.unqueried()))
            })
            .collect();
        let mounts = earlier.for_newly_opened();
        binds.extend(opened.iter().filter_map(|(wanted, handle)| {
            let source = BindSource::of(handle, &mounts)?;
            let (mount, path) = (&source.mount, &source.path);
            let expected = ExpectedBind::new(wanted.bind, mount, path, wanted.propagation)?;
            let identity = handle.identity().ok();
            let identity = identity.filter(|_| mount.fs_type.is_local());
            Some(ExpectedBind {
                resolved: (path != wanted.source).then(|| path.clone()),
                inode: identity.map(|identity| identity.inode),
                ..expected
            })
        }));
    }
    NewRecord {
        unproven: wanted.len() - binds.len(),
        expected: ExpectedBinds {
            binds,
            ..ExpectedBinds::default()
        },
        problem: None,
    }
}

fn wanted<'w, 'a>(
    binds: &'w [Bind<'a>],
    sources: &'w [Cow<'_, Path>],
    propagation: impl Fn(&Bind<'a>) -> ExpectedPropagation,
) -> Vec<BindToRecord<'w, 'a>> {
    let pairs = binds.iter().zip(sources);
    pairs
        .map(|(bind, source)| BindToRecord {
            bind,
            source,
            propagation: propagation(bind),
        })
        .collect()
}

/// The source of each bind, after the edits.
fn final_sources<'e>(bundle: &'e OpenBundle<'_>, edits: &'e [SpecEdit]) -> Vec<Cow<'e, Path>> {
    let binds = bundle.spec.binds().iter();
    binds
        .map(|bind| match edited_source(bind, edits) {
            Some(source) => source.into(),
            None => source_of(bind, bundle.path),
        })
        .collect()
}

fn edited_source<'e>(bind: &Bind<'_>, edits: &'e [SpecEdit]) -> Option<&'e Path> {
    edits.iter().find_map(|edit| match edit {
        SpecEdit::Source { bind: index, to } if *index == bind.index() => Some(to.as_path()),
        SpecEdit::Source { .. } | SpecEdit::BindRslave { .. } | SpecEdit::RootfsRslave => None,
    })
}

fn propagation(
    bundle: &OpenBundle<'_>,
    bind: &Bind<'_>,
    edits: &[SpecEdit],
    is_host_root: bool,
) -> ExpectedPropagation {
    let is_edited = edits.contains(&SpecEdit::BindRslave { bind: bind.index() });
    let requested = match is_edited {
        true => RequestedPropagation::RecursiveSlave,
        false => bind.propagation(),
    };
    match requested {
        RequestedPropagation::RecursiveSlave if is_host_root => ExpectedPropagation::Slave,
        requested => ExpectedPropagation::of_request(requested, bundle.spec.rootfs_propagation()),
    }
}
