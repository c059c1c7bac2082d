//! Asking sources whether they are alive, all in one go, by a process that may hang in this one's place.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::evidence::{Reach, SubpathEvidence};
use bindguard_sys::Mounts;
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::probe::{Answer, Patience, probe};

/// How long sources that may hang are asked: well within the guard's own deadline.
const PATIENCE: Patience = Patience { each: Duration::from_millis(700), all: Duration::from_millis(1200) };

/// How long an operator waits for all of a node's sources.
const OPERATORS_PATIENCE: Duration = Duration::from_secs(10);

/// The answers of one source's paths, in their order.
#[derive(Debug, Default)]
pub(crate) struct Answers(Vec<Answer>);

impl Answers {
    /// What each path answered, as evidence.
    pub(crate) fn reaches(&self) -> Vec<Reach> {
        self.0.iter().map(reach).collect()
    }

    /// What the first path answered.
    pub(crate) fn reach(&self) -> Reach {
        self.0.first().map_or(Reach::NotAsked, reach)
    }

    /// The first path with its symlinks followed, when it was reached.
    pub(crate) fn resolved(&self) -> Option<&Path> {
        match self.0.first()? {
            Answer::Reached(path) => Some(path),
            Answer::Refused(_) | Answer::Silent | Answer::NotAsked => None,
        }
    }
}

/// Asks every source's paths; one set of answers for each, in the same order.
pub(crate) fn ask(sources: &[Vec<PathBuf>]) -> Vec<Answers> {
    // Without a process to ask with, nobody is called dead.
    let mut answers = probe(&sources.concat(), PATIENCE).unwrap_or_default().into_iter();
    let mut answer = |_: &PathBuf| answers.next().unwrap_or(Answer::NotAsked);
    sources.iter().map(|paths| Answers(paths.iter().map(&mut answer).collect())).collect()
}

/// What each of a node's sources answers, in their order, asked for somebody who can wait longer than a create can. One that
/// is silent ends a round; those behind it get a round of their own, until there is no time left.
pub(crate) fn ask_patiently(paths: &[PathBuf]) -> Vec<Reach> {
    let (start, mut reaches) = (Instant::now(), Vec::new());
    while reaches.len() < paths.len() {
        let all = OPERATORS_PATIENCE.saturating_sub(start.elapsed());
        let answers = probe(&paths[reaches.len()..], Patience { all, ..PATIENCE }).unwrap_or_default();
        let heard = answers.iter().take_while(|answer| !matches!(answer, Answer::NotAsked));
        let before = reaches.len();
        reaches.extend(heard.map(reach));
        if reaches.len() == before {
            reaches.resize(paths.len(), Reach::NotAsked);
        }
    }
    reaches
}

/// Looks at subpaths, those on servers after asking them.
pub(crate) fn observe_all(held: &[HeldSubpath], mounts: &Mounts) -> Vec<SubpathEvidence> {
    let paths: Vec<_> = held.iter().map(|held| held.to_ask(mounts)).collect();
    held.iter().zip(ask(&paths)).map(|(held, answers)| held.observe(mounts, &answers.reaches())).collect()
}

/// Looks at one subpath.
pub(crate) fn observe(held: &HeldSubpath, mounts: &Mounts) -> SubpathEvidence {
    let [answers] = &ask(&[held.to_ask(mounts)])[..] else { return held.observe(mounts, &[]) };
    held.observe(mounts, &answers.reaches())
}

fn reach(answer: &Answer) -> Reach {
    match answer {
        Answer::Reached(_) => Reach::Alive,
        Answer::Refused(error) => {
            Reach::Refused { number: error.raw_os_error().unwrap_or(0), words: error.to_string() }
        }
        Answer::Silent => Reach::Silent(PATIENCE.each.as_millis() as u64),
        Answer::NotAsked => Reach::NotAsked,
    }
}
